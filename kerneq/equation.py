"""The equation z = σ(d(z)) at one batch of inputs, as the solvers see it."""

import abc
import dataclasses
import functools
from typing import Self

from torch import Tensor

from .prox import AbstractProx


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


class AbstractEquation(AbstractMap):
    """f(z) = σ(d(z)), the optimality condition of min E(z) = ½‖z‖² + 1ᵀφ(z) − S(z), with d = ∇S.

    `bound` is L, the Lipschitz constant of d; `convexity` is μ, the strong convexity of E (it may be negative).
    """

    bound: Tensor
    convexity: Tensor
    prox: AbstractProx

    @abc.abstractmethod
    def evaluate(self, z: Tensor, energy: bool = True) -> Evaluation:
        """One evaluation; with `energy`, E(z) comes out of the same products."""

    def __call__(self, z: Tensor) -> Tensor:
        return self.evaluate(z, energy=False).image

    def drive(self, z: Tensor) -> Tensor:
        drive = self.evaluate(z, energy=False).drive
        assert drive is not None
        return drive

    def energy(self, z: Tensor) -> Tensor:
        energy = self.evaluate(z).energy
        assert energy is not None
        return energy
