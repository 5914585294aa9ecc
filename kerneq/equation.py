"""The equation z = σ(d(z)) at one batch of inputs, as the solvers see it."""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Self

from torch import Tensor

from .prox import AbstractProx

Linear = Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Everything one evaluation at z tells; energies are per sample."""

    z: Tensor
    image: Tensor  # f(z)
    drive: Tensor | None = None  # d(z)
    energy: Tensor | None = None  # E(z)
    rounding: Tensor | None = None  # how far E(z) may be off by rounding alone

    @functools.cached_property
    def gap(self) -> Tensor:
        """f(z) − z, computed once for the residual and for the solver."""
        return self.image - self.z


class AbstractMap(abc.ABC):
    """A map z ↦ f(z) of batches which can be restricted to some of its samples, so that finished ones cost nothing."""

    @abc.abstractmethod
    def __call__(self, z: Tensor) -> Tensor: ...

    @abc.abstractmethod
    def rows(self, index: Tensor) -> Self:
        """The same map for the samples in `index` only."""


class AbstractFeatures(AbstractMap):
    """v ↦ Wσ(…), whose fixed point is v = Wz of an equilibrium z."""

    @abc.abstractmethod
    def state(self, v: Tensor) -> Tensor:
        """z = σ(Wᵀ∂S/∂v + ∂S/∂z) at v."""

    @abc.abstractmethod
    def start(self, z0: Tensor | None) -> Tensor:
        """Wz₀; zero without a z₀."""


@dataclasses.dataclass(frozen=True)
class Closing:
    """The loop z = σ(Wᵀm + ∂S/∂z), m = ∂S/∂v at v = Wz, opened at its last link, for the backward pass.

    The backward system w = D(g + Hw), H = ±WᵀNW, becomes y = WDg ± WDWᵀNy in the (smaller) space of y = Ww, and w
    follows from y. The sign is apart from N, which saves a pass.
    """

    m: Tensor  # with its graph
    dz: Tensor | None  # ∂S/∂z, with its graph
    weight: Tensor  # of W, with its graph
    apply: Linear  # W
    added: Callable[[Tensor, Tensor, int], Tensor]  # v, z, ± ↦ v ± Wz
    weight_gradient: Callable[[Tensor, Tensor], Tensor]  # of ⟨Wz, v⟩, given z and v
    bend: Linear  # N = ±∂²S/∂v²
    sign: int
    pull: Linear  # D
    pull_adjoint: Callable[[Tensor, Tensor | None, int], Tensor]  # n, g, ± ↦ D(g ± Wᵀn), or ±DWᵀn without g

    def source(self, g: Tensor) -> Tensor:
        return self.apply(self.pull(g))

    def step(self, source: Tensor, y: Tensor) -> Tensor:
        return self.added(source, self.pull_adjoint(self.bend(y), None, 1), self.sign)

    def recover(self, g: Tensor, y: Tensor) -> Tensor:
        return self.pull_adjoint(self.bend(y), g, self.sign)


class AbstractEquation(AbstractMap):
    """f(z) = σ(d(z)), the optimality condition of min E(z) = ½‖z‖² + 1ᵀφ(z) − S(z), with d = ∇S.

    `bound` is L, the Lipschitz constant of d; `convexity` is μ, the strong convexity of E (it may be negative).
    """

    bound: Tensor
    convexity: Tensor
    prox: AbstractProx

    @abc.abstractmethod
    def evaluate(self, z: Tensor, drive: bool = True, energy: bool = True) -> Evaluation:
        """One evaluation; with `energy`, E(z) comes out of the same products. Without `drive` σ may be part of them."""

    @abc.abstractmethod
    def evaluate_zero(self, drive: bool = True, energy: bool = True) -> Evaluation:
        """The evaluation at z = 0, where there is no Wz to compute; its z holds one zero for all entries."""

    @abc.abstractmethod
    def in_features(self) -> AbstractFeatures | None:
        """The same equation for v = Wz; None where z acts in other ways too."""

    @abc.abstractmethod
    def closing(self, z: Tensor) -> Closing | None:
        """The last link of the loop at the equilibrium z, where the kernel allows a backward solve in the features."""

    @abc.abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything f depends on that may have a gradient."""

    @abc.abstractmethod
    def on(self, *tensors: Tensor) -> Self:
        """The same equation on other tensors, in the order of `tensors`."""

    def __call__(self, z: Tensor) -> Tensor:
        return self.evaluate(z, drive=False, energy=False).image

    def drive(self, z: Tensor) -> Tensor:
        drive = self.evaluate(z, energy=False).drive
        assert drive is not None
        return drive

    def energy(self, z: Tensor) -> Tensor:
        energy = self.evaluate(z).energy
        assert energy is not None
        return energy
