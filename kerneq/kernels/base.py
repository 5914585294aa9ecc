"""What a kernel is: a similarity S(a, z, v) between the input a = Ux + b and the state z with its features v = Wz.

A kernel is a value with pure functions of tensors. There are two families: `inner`, S = κ(⟨a, z⟩) + ½‖v‖², and
`radial`, S = Σᵢ H(‖rᵢW_h‖²) on the patches of r = a − v. A new kernel of either is its formulas and nothing else.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import ClassVar, TypeVar

from torch import Tensor, nn

from ..tensors import per_sample_dot

Number = TypeVar("Number", float, Tensor)


@dataclasses.dataclass(frozen=True)
class Slope:
    """S and its two partial derivatives at one point; d(z) = ∂S/∂z + Wᵀ ∂S/∂v."""

    dz: Tensor | None  # ∂S/∂z, shaped as z; None where S depends on z only through v
    dv: Tensor | None  # ∂S/∂v, shaped as v; None where it is zero
    value: Tensor | None = None  # S of each sample, (batch,), where it was asked for


@dataclasses.dataclass(frozen=True)
class Binding:
    """What S depends on beside z, for one batch: what does not change during a solve is computed already."""

    a: Tensor  # (batch, ...), as the kernel uses it
    Q: Tensor | None = None  # W_hW_hᵀ, (n, n)
    gamma: Tensor | None = None  # γ
    split: int = 1  # channels of a patch
    patch: int = 1  # pixels of its side
    bias: Tensor | None = None  # b of ⟨b, z⟩, (state,): S + ⟨b, z⟩ is what counts, and z = σ(Wᵀ∂S/∂v + b)

    def add_bias(self, z: Tensor | None, dv: Tensor, value: Tensor | None) -> Slope:
        """Return the derivatives of S + ⟨b, z⟩, given ∂S/∂v and, where it is wanted, S, of an S without ∂S/∂z."""
        assert self.bias is not None
        dz = self.bias.view(-1, *[1] * (dv.dim() - 2)).expand(len(dv), -1, *dv.shape[2:])
        return Slope(dz, dv, value if value is None or z is None else value + per_sample_dot(dz, z))


@dataclasses.dataclass(frozen=True)
class KernelConstants:
    """What holds for every input, given upper bounds on ‖W‖ and ‖W_h‖."""

    gain: float  # ‖W‖‖W_h‖; ‖W‖ for a kernel without W_h
    push: float  # how far a moves f(z), at most, relative to ‖a‖
    lipschitz: float  # L, at most
    threshold: float | None  # E is strongly convex as long as L is below it; None: for every L
    convexity: float  # μ, at least
    sensitivity: float  # the Lipschitz constant of aW_h ↦ z*, or of a ↦ z*


class AbstractParameters(nn.Module, abc.ABC):
    """The trainable part of a kernel, which belongs to a cell."""

    @abc.abstractmethod
    def gain(self) -> Tensor:
        """Return ‖W_h‖."""

    @property
    @abc.abstractmethod
    def excess(self) -> float:
        """By what factor ‖W_h‖ may exceed the `gain` found last."""

    @abc.abstractmethod
    def observe(self, a: Tensor, z: Tensor, operator: Callable[[Tensor], Tensor]) -> None:
        """Adapt to an equilibrium z found in training; `operator` applies W."""


class AbstractKernel(abc.ABC):
    """A similarity S: a frozen value, safe to share between cells."""

    in_state: ClassVar[bool]  # whether a lives in the space of z, not of v
    equation: ClassVar[str]  # z = σ(d(z)) with σ = relu, as text

    @property
    @abc.abstractmethod
    def through_features(self) -> bool:
        """Whether z acts through v = Wz alone, but for a term linear in z: then the equation can be solved for v."""

    @property
    def convex_loss(self) -> bool:
        """Whether S = −ρ(a − v) with ρ convex and, for ‖W_h‖ ≤ 1, ∇ρ 1-Lipschitz, which `Resolvent` needs."""
        return False

    def parameters(self, features: int, conv: bool) -> AbstractParameters | None:
        """Make the parameters that a cell with so many features owns; None where there is nothing to train."""
        return None

    @abc.abstractmethod
    def max_norm(self, norm: float) -> float:
        """Return how large ‖W‖‖W_h‖ may be so that L ≤ norm²."""

    @abc.abstractmethod
    def bounds(self, square: Number, norm: float) -> tuple[Number, Number]:
        """Return L, the Lipschitz constant of d, and μ, by how much E is strongly convex; it may be negative.

        `square` is ‖W‖²‖W_h‖², ‖W‖² for a kernel without W_h; `norm` is that of the cell.
        """

    @abc.abstractmethod
    def bind(self, parameters: AbstractParameters | None, a: Tensor, norm: float) -> Binding:
        """Return S at one batch of inputs."""

    @abc.abstractmethod
    def differentiate(self, at: Binding, z: Tensor | None, v: Tensor | None, value: bool) -> Slope:
        """Return the derivatives at (z, v), or at zero where both are None; S itself with `value`."""

    @abc.abstractmethod
    def hvp(self, at: Binding, v: Tensor) -> Callable[[Tensor], Tensor]:
        """Return y ↦ (∂²S/∂v²) y at v, without a graph."""

    @abc.abstractmethod
    def state_hvp(self, at: Binding, z: Tensor) -> Callable[[Tensor], Tensor] | None:
        """Return w ↦ (∂²S/∂z²) w at z, without a graph; None where S is linear in z beside v. No kernel mixes z and
        v."""

    def constants(self, norm: float, hidden: float) -> KernelConstants | None:
        """Return the constants for ‖W‖ ≤ norm and ‖W_h‖ ≤ hidden; None where they depend on the input."""
        return None

    @abc.abstractmethod
    def unit(self, norm: float, size: int) -> float:
        """Return the factor by which a kernel multiplies an a of `size` typical entries, and so z."""

    def weights(self, at: Binding, v: Tensor) -> Tensor | None:
        """Return how much each patch counts at v, (batch, groups of channels, rows, columns); None where there are
        none."""
        return None
