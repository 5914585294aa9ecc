"""The Gaussian kernel of KerDEQ and GEQ, on patches or on whole vectors."""

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar, Self, final

import torch
from torch import Tensor, nn

from ..operators import Dense
from ..solution import check_whole, take_samples
from .base import AbstractBoundSimilarity, AbstractKernel, AbstractSimilarity, Slope
from .fused import patch_pullback, patch_step
from .fused_reference import cut
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
        self.width.observe(_distances(a - v, self.project.weight, self.split, self.patch))


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
        return self._slope(_picture(v), value)

    def slope_at_zero(self, value: bool) -> Slope:
        return self._slope(None, value)

    def _slope(self, v: Tensor | None, value: bool) -> Slope:
        a, split, patch = _picture(self.a), self.split, self.patch
        if not value:
            return Slope(None, patch_step(a, v, self.Q, self.gamma, split=split, patch=patch).view_as(self.a))
        m, total = patch_step(a, v, self.Q, self.gamma, split=split, patch=patch, similarity=True)
        return Slope(None, m.view_as(self.a), total)

    def bend(self, v: Tensor) -> Callable[[Tensor], Tensor]:
        """y ↦ exp(−sᵢ)(Q − 2γ qᵢᵀqᵢ)y: the pullback of the patch step, which is symmetric; ∂²S/∂v² is minus this."""
        a, features, split, patch = _picture(self.a), _picture(v), self.split, self.patch

        def product(y: Tensor) -> Tensor:
            pulled = patch_pullback(_picture(y), a, features, self.Q, self.gamma, split=split, patch=patch)
            return pulled.view_as(y)

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


def _picture(features: Tensor) -> Tensor:
    """Vectors as pictures of one pixel, so that dense and convolutional cells share one formula."""
    return features[:, :, None, None] if features.dim() == 2 else features


def _distances(r: Tensor, weight: Tensor, split: int, patch: int) -> Tensor:
    """‖rᵢW_h‖² of every patch."""
    rows = cut(_picture(r).to(weight.dtype), split, patch, channels_last=False)
    return (rows @ weight.mT).square().sum(-1)
