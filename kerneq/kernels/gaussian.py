"""The Gaussian kernel of KerDEQ and GEQ, on patches or on whole vectors."""

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar, Self, final

import torch
from torch import Tensor, nn

from ..fused.radial import patch_distances, radial_hvp, radial_step
from ..operators import Dense
from ..solution import check_whole, take_samples
from .base import AbstractBoundSimilarity, AbstractKernel, AbstractSimilarity, Slope
from .width import AbstractWidth, Adaptive, Fixed, Width


@final
@dataclasses.dataclass(frozen=True)
class Gaussian(AbstractKernel):
    """S = (1/2γ) Σᵢ exp(−γ‖rᵢW_h‖²), r = a − v cut into patches rᵢ; ∂S/∂v is mᵢ = exp(−sᵢ) rᵢQ, sᵢ = γ rᵢQrᵢᵀ.

    In a convolutional cell a patch is `split` channels × `patch` × `patch` pixels (8 channels where not said); in a
    dense one it is `split` entries, or the whole vector. W_h (n × hidden) enters only through Q = W_hW_hᵀ (n × n).
    L = ‖W‖²‖W_h‖² whatever γ and the input, and E is strongly convex with μ = 1 − 2e^{−3/2}L.
    """

    in_state: ClassVar[bool] = False

    gamma: float | Adaptive | Fixed = 0.5  # γ: a number, or how it follows the data
    patch: int = 2  # p
    split: int | None = None  # c_s
    hidden: int = 64  # columns of W_h

    def __post_init__(self) -> None:
        for name, value in (("patch", self.patch), ("split", self.split), ("hidden", self.hidden)):
            if value is not None:
                check_whole(name, value)
        if not isinstance(self.gamma, AbstractWidth):
            Fixed(self.gamma)  # checks it

    @staticmethod
    def height(s: Tensor) -> Tensor:
        return 0.5 * torch.exp(-s)

    @staticmethod
    def weight(s: Tensor) -> Tensor:
        return torch.exp(-s)

    @staticmethod
    def slope(s: Tensor) -> Tensor:
        return -torch.exp(-s)

    def similarity(self, features: int, conv: bool) -> "GaussianSimilarity":
        split = self.split or (8 if conv else features)
        if features % split:
            raise ValueError(f"`split` must divide the number of features: {features} is not a multiple of {split}.")
        width = self.gamma if isinstance(self.gamma, AbstractWidth) else Fixed(self.gamma)
        return GaussianSimilarity(split, self.patch if conv else 1, self.hidden, width)


@final
class GaussianSimilarity(AbstractSimilarity):
    """W_h and γ."""

    def __init__(self, split: int, patch: int, hidden: int, width: AbstractWidth):
        super().__init__()
        self.split, self.patch = split, patch
        size = split * patch * patch
        self.project = Dense(size, hidden)  # r ↦ W_hᵀr
        nn.init.orthogonal_(self.project.weight)
        self.width: Width = width.module(size)

    def allowance(self, norm: float) -> float:
        return norm

    def gain(self) -> Tensor:
        return self.project.norm(self.project.weight)

    def bind(self, a: Tensor, norm: float) -> "BoundGaussian":
        if a.dim() == 4 and (a.shape[2] % self.patch or a.shape[3] % self.patch):
            raise ValueError(
                f"`patch` must divide the picture: {a.shape[2]}×{a.shape[3]} is not a multiple of {self.patch}."
            )
        with torch.autocast(a.device.type, enabled=False):
            weight = self.project.weight
            Q = weight.mT @ weight
        return BoundGaussian(a, Q, self.width(), self.split, self.patch)

    def diagnostics(self) -> dict[str, float]:
        return {"gamma": float(self.width())}

    @property
    def adapts(self) -> bool:
        return self.width.adapts

    @torch.no_grad()
    def observe(self, a: Tensor, v: Tensor) -> None:
        self.width.observe(patch_distances(a - v, self.project.weight, split=self.split, patch=self.patch))


@final
@dataclasses.dataclass(frozen=True)
class BoundGaussian(AbstractBoundSimilarity):
    a: Tensor
    Q: Tensor
    gamma: Tensor
    split: int
    patch: int

    bend_sign: ClassVar[int] = -1
    through_features: ClassVar[bool] = True

    def slope(self, z: Tensor, v: Tensor, value: bool) -> Slope:
        return self._slope(v, value)

    def slope_at_zero(self, value: bool) -> Slope:
        return self._slope(None, value)

    def _slope(self, v: Tensor | None, value: bool) -> Slope:
        split, patch = self.split, self.patch
        m, total = radial_step(Gaussian, self.a, v, self.Q, self.gamma, split=split, patch=patch, value=value)
        return Slope(None, m, total)

    def bend(self, v: Tensor) -> Callable[[Tensor], Tensor]:
        """y ↦ exp(−sᵢ)(Q − 2γ qᵢᵀqᵢ)y: the pullback of the patch step, which is symmetric; ∂²S/∂v² is minus this."""

        def product(y: Tensor) -> Tensor:
            split, patch = self.split, self.patch
            return radial_hvp(Gaussian, y, self.a, v, self.Q, self.gamma, split=split, patch=patch)

        return product

    def lipschitz(self, operator_norm: Tensor) -> Tensor:
        return operator_norm**2

    def convexity(self, lipschitz: Tensor) -> Tensor:
        return 1 - 2 * math.exp(-1.5) * lipschitz

    def rows(self, index: Tensor) -> Self:
        return dataclasses.replace(self, a=take_samples(self.a, index))

    def tensors(self) -> tuple[Tensor, ...]:
        return self.a, self.Q, self.gamma

    def on(self, *tensors: Tensor) -> Self:
        a, Q, gamma = tensors
        return dataclasses.replace(self, a=a, Q=Q, gamma=gamma)
