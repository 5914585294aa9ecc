"""How ∂L/∂z* reaches the parameters."""

from .base import AbstractGradient as AbstractGradient
from .implicit import ConjugateGradient as ConjugateGradient
from .implicit import Implicit as Implicit
from .implicit import InFeatures as InFeatures
from .phantom import Phantom as Phantom
from .unrolled import Unrolled as Unrolled
