"""The similarity S between input and state, and its two derivatives: one kernel a file."""

from .base import AbstractKernel as AbstractKernel
from .gaussian import Gaussian as Gaussian
from .linear import Linear as Linear
from .polynomial import Polynomial as Polynomial
from .sigmoid import Sigmoid as Sigmoid
from .width import Adaptive as Adaptive
from .width import Fixed as Fixed
