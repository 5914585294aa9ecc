"""The similarity S between input and state, and its derivatives: two families, a kernel a few formulas.

Radial kernels are functions of the distance of Wz to the input: `Gaussian`, `Cauchy`, `Multiquadric`; their γ may be
`Adaptive`. As γ → 0 they become `Squared`. Inner kernels are functions of the product of z and the input: `Linear`,
`Polynomial`, `Sigmoid`.
"""

from .base import AbstractKernel
from .inner import AbstractInnerKernel, Linear, Polynomial, Sigmoid
from .radial import AbstractRadialKernel, Adaptive, Cauchy, Gaussian, Multiquadric
from .squared import Squared

__all__ = [
    "AbstractInnerKernel",
    "AbstractKernel",
    "AbstractRadialKernel",
    "Adaptive",
    "Cauchy",
    "Gaussian",
    "Linear",
    "Multiquadric",
    "Polynomial",
    "Sigmoid",
    "Squared",
]

__dir__ = __all__.copy  # `dir` lists the public names only
