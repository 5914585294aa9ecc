"""How ∂L/∂z* reaches the parameters: `Implicit` (the default: exact), `Phantom` (some steps), `Unrolled` (all of them).

`Implicit` solves a linear system, by `InFeatures`, by `ConjugateGradient` or by a solver of `kerneq.solvers`.
"""

from ..maps import Point as Point
from ..solvers.features import InFeatures as InFeatures
from .base import AbstractGradient as AbstractGradient
from .implicit import ConjugateGradient as ConjugateGradient
from .implicit import Implicit as Implicit
from .unrolled import Phantom as Phantom
from .unrolled import Unrolled as Unrolled
