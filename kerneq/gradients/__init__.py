"""How ∂L/∂z* reaches the parameters: `Implicit` (the default: exact), `Phantom` (some steps), `Unrolled` (all of them).

`Implicit` solves a linear system, by `InFeatures`, by `ConjugateGradient` or by a solver of `kerneq.solvers`.
"""

from ..maps import Point
from ..solvers.features import InFeatures
from .base import AbstractGradient
from .implicit import ConjugateGradient, Implicit
from .unrolled import Phantom, Unrolled

__all__ = ["AbstractGradient", "ConjugateGradient", "Implicit", "InFeatures", "Phantom", "Point", "Unrolled"]

__dir__ = __all__.copy  # `dir` lists the public names only
