"""The three radial kernels as the patch step sees them, and one that Triton has no words for."""

import torch
from torch import Tensor


class Gaussian:
    """η = ½e^{−s}."""

    @staticmethod
    def height(s: Tensor) -> Tensor:
        return 0.5 * torch.exp(-s)

    @staticmethod
    def weight(s: Tensor) -> Tensor:
        return torch.exp(-s)

    @staticmethod
    def slope(s: Tensor) -> Tensor:
        return -torch.exp(-s)


class Multiquadric:
    """η = 1 − √(1 + s)."""

    @staticmethod
    def height(s: Tensor) -> Tensor:
        return 1 - torch.sqrt(1 + s)

    @staticmethod
    def weight(s: Tensor) -> Tensor:
        return torch.rsqrt(1 + s)

    @staticmethod
    def slope(s: Tensor) -> Tensor:
        return -0.5 * torch.rsqrt(1 + s) / (1 + s)


class Cauchy:
    """η = −½ log(1 + s)."""

    @staticmethod
    def height(s: Tensor) -> Tensor:
        return -0.5 * torch.log(1 + s)

    @staticmethod
    def weight(s: Tensor) -> Tensor:
        return 1 / (1 + s)

    @staticmethod
    def slope(s: Tensor) -> Tensor:
        return -1 / ((1 + s) * (1 + s))


class Tangent:
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
