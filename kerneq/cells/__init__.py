"""Which equation: the f of z = f(z; x)."""

from .base import AbstractCell as AbstractCell
from .conv import ConvCell as ConvCell
from .dense import DenseCell as DenseCell
from .equation import Equation as Equation
