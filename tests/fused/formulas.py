"""The three radial kernels as the patch step sees them, and one that Triton has no words for."""

import torch
from torch import Tensor

from kerneq.kernels import AbstractRadialKernel, Cauchy, Gaussian, Multiquadric


class Tangent(AbstractRadialKernel):
    """η = −½ atan(s): a function that triton.language does not have."""

    @staticmethod
    def height(s: Tensor) -> Tensor:
        return -0.5 * torch.atan(s)

    @staticmethod
    def weight(s: Tensor) -> Tensor:
        return 1 / (1 + s**2)

    @staticmethod
    def slope(s: Tensor) -> Tensor:
        return -2 * s / (1 + s**2) ** 2


FORMULAS = [Gaussian, Multiquadric, Cauchy]
