"""How ∂L/∂z* reaches the parameters: `Implicit` (the default: exact), `Neumann`, `Phantom` and `Shine`, which are
approximations, `Unrolled` and `Reversible` (all steps of a solve, the latter without keeping them).

`Implicit` solves a linear system, by `InFeatures`, by `ConjugateGradient` or by a solver of `kerneq.solvers`.
"""

from ..maps import Point
from ..solvers.features import InFeatures
from .base import AbstractGradient, AbstractSteps
from .implicit import ConjugateGradient, Implicit
from .neumann import Neumann
from .reversible import Reversible
from .shine import Shine
from .unrolled import Phantom, Unrolled

__all__ = [
    "AbstractGradient",
    "AbstractSteps",
    "ConjugateGradient",
    "Implicit",
    "InFeatures",
    "Neumann",
    "Phantom",
    "Point",
    "Reversible",
    "Shine",
    "Unrolled",
]

__dir__ = __all__.copy  # `dir` lists the public names only
