"""How to reach z = f(z)."""

from .anderson import Anderson as Anderson
from .base import AbstractSolver as AbstractSolver
from .broyden import Broyden as Broyden
from .features import InFeatures as InFeatures
from .loop import solve as solve
from .picard import Picard as Picard
from .proximal import Proximal as Proximal
