"""How ∂L/∂z* reaches the parameters."""

from ..solvers.features import InFeatures as InFeatures
from .base import AbstractGradient as AbstractGradient
from .implicit import ConjugateGradient as ConjugateGradient
from .implicit import Implicit as Implicit
from .unrolled import Phantom as Phantom
from .unrolled import Unrolled as Unrolled
