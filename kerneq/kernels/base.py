"""What a kernel is: a similarity S(a, z, v) between the input a = Ux + b and the state z with its features v = Wz."""

import abc
import dataclasses
from collections.abc import Callable
from typing import ClassVar, Self

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Slope:
    """S and its two partial derivatives at one point; d(z) = ∂S/∂z + Wᵀ ∂S/∂v."""

    dz: Tensor | None  # ∂S/∂z; None where S depends on z only through v
    dv: Tensor | None  # ∂S/∂v; None where it is zero
    value: Tensor | None = None  # S of each sample, where it was asked for


class AbstractBoundSimilarity(abc.ABC):
    """S(a, ·, ·) for one batch of inputs, with everything that does not change during a solve computed already."""

    a: Tensor

    @abc.abstractmethod
    def slope(self, z: Tensor, v: Tensor, value: bool) -> Slope:
        """The derivatives at (z, v), and S itself with `value`."""

    @abc.abstractmethod
    def slope_at_zero(self, value: bool) -> Slope:
        """The same at z = 0 and v = 0."""

    bend_sign: ClassVar[int]
    through_features: ClassVar[bool]  # whether z acts through v = Wz alone, but for a term linear in z

    @abc.abstractmethod
    def bend(self, v: Tensor) -> Callable[[Tensor], Tensor]:
        """y ↦ ±(∂²S/∂v²) y at v, with the sign `bend_sign`."""

    @abc.abstractmethod
    def lipschitz(self, operator_norm: Tensor) -> Tensor:
        """L, the Lipschitz constant of d, given ‖W‖."""

    @abc.abstractmethod
    def convexity(self, lipschitz: Tensor) -> Tensor:
        """μ, by how much E is strongly convex, given L."""

    @abc.abstractmethod
    def rows(self, index: Tensor) -> Self: ...

    @abc.abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything S depends on that may have a gradient."""

    @abc.abstractmethod
    def on(self, *tensors: Tensor) -> Self:
        """The same similarity on other tensors, in the order of `tensors`."""


class AbstractSimilarity(nn.Module, abc.ABC):
    """The trainable part of a kernel inside one cell.

    `norm` bounds the whole equation, L ≤ norm²: `allowance` is what of it is left for ‖W‖·`gain`.
    """

    @abc.abstractmethod
    def allowance(self, norm: float) -> float: ...

    @abc.abstractmethod
    def gain(self) -> Tensor | float:
        """What multiplies ‖W‖ in √L."""

    @abc.abstractmethod
    def bind(self, a: Tensor, norm: float) -> AbstractBoundSimilarity: ...

    def diagnostics(self) -> dict[str, float]:
        """Numbers worth following over a training run."""
        return {}

    @property
    def adapts(self) -> bool:
        """Whether `observe` has an effect."""
        return False

    def observe(self, a: Tensor, v: Tensor) -> None:  # noqa: B027
        """Look at v = Wz of an equilibrium found in training; for kernels that adapt to it."""


class AbstractKernel(abc.ABC):
    """A choice of similarity: a value, safe to share between cells; each cell makes its own trainable part."""

    in_state: ClassVar[bool]  # whether a lives in the space of z, not of v

    @abc.abstractmethod
    def similarity(self, features: int, conv: bool) -> AbstractSimilarity: ...


def dot(p: Tensor, q: Tensor) -> Tensor:
    """⟨p, q⟩ of each sample, in float32 at least."""
    return (p * q).flatten(1).sum(1, dtype=torch.promote_types(p.dtype, torch.float32))
