"""The similarity S between input and state, and its derivatives: two families, a kernel a few formulas.

Radial kernels are functions of the distance of Wz to the input: `Gaussian`, `Cauchy`, `Multiquadric`; their γ may be
`Adaptive`. Inner kernels are functions of the product of z and the input: `Linear`, `Polynomial`, `Sigmoid`.
"""

from .base import AbstractKernel as AbstractKernel
from .inner import AbstractInnerKernel as AbstractInnerKernel
from .inner import Linear as Linear
from .inner import Polynomial as Polynomial
from .inner import Sigmoid as Sigmoid
from .radial import AbstractRadialKernel as AbstractRadialKernel
from .radial import Adaptive as Adaptive
from .radial import Cauchy as Cauchy
from .radial import Gaussian as Gaussian
from .radial import Multiquadric as Multiquadric
