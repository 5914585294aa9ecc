"""What an exponential family must say: p(y | η) = h(y) exp(η T(y) − A(η)), y a target, η canonical."""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor


class AbstractFamily(abc.ABC):
    """A log-partition A with its derivatives, and the sufficient statistic T.

    The equivalence needs only A convex and differentiable, so a family may also be a pure activation
    (`LeakyReLU`) that no probability density has; `admissible` says which of the two it is.
    """

    admissible: bool = True  # is A the log-partition of a probability distribution?

    @abc.abstractmethod
    def log_partition(self, eta: Tensor) -> Tensor: ...  # A

    @abc.abstractmethod
    def mean(self, eta: Tensor) -> Tensor: ...  # σ = A′

    @abc.abstractmethod
    def variance(self, eta: Tensor) -> Tensor: ...  # A″

    @abc.abstractmethod
    def canonical(self, mean: Tensor) -> Tensor: ...  # (A′)⁻¹

    @abc.abstractmethod
    def curvature(self, below: float = math.inf) -> float: ...  # sup of A″ on (−∞, below]

    @abc.abstractmethod
    def floor(self) -> float: ...  # inf of A″

    @abc.abstractmethod
    def statistic(self, y: Tensor) -> Tensor: ...  # T; a ValueError where y is outside the support


def invert(
    mean: Callable[[Tensor], Tensor], variance: Callable[[Tensor], Tensor], z: Tensor, steps: int = 200
) -> Tensor:
    """The η with mean(η) = z, by Newton's method inside a bracket; for families without a closed link."""
    low, high = torch.full_like(z, -1.0), torch.full_like(z, 1.0)
    for _ in range(60):  # 2⁶⁰: beyond it a mean that has not crossed z never will
        low = torch.where(mean(low) > z, 2 * low, low)
        high = torch.where(mean(high) < z, 2 * high, high)
    eta = 0.5 * (low + high)
    for _ in range(steps):
        error = mean(eta) - z
        low, high = torch.where(error < 0, eta, low), torch.where(error > 0, eta, high)
        newton = eta - error / variance(eta)
        inside = (newton > low) & (newton < high)
        proposal = torch.where(inside, newton, 0.5 * (low + high))
        proposal = torch.where(error == 0, eta, proposal)
        if torch.equal(proposal, eta):
            break
        eta = proposal
    return eta


@final
@dataclasses.dataclass(frozen=True)
class Custom(AbstractFamily):
    """A family given by its log-partition alone; the derivatives come from autograd, the link from `invert`.

    >>> squared = Custom(lambda eta: 0.5 * eta.square(), bound=1.0)      # the Gaussian again
    """

    partition: Callable[[Tensor], Tensor]  # A, elementwise and differentiable twice
    bound: float = math.inf  # sup A″
    admissible: bool = True

    def log_partition(self, eta: Tensor) -> Tensor:
        return self.partition(eta)

    def mean(self, eta: Tensor) -> Tensor:
        return torch.func.grad(lambda e: self.partition(e).sum())(eta)

    def variance(self, eta: Tensor) -> Tensor:
        curve = torch.func.grad(lambda e: self.mean(e).sum())(eta)
        return curve.clamp(min=0)  # A is convex: less than 0 is rounding

    def canonical(self, mean: Tensor) -> Tensor:
        return invert(self.mean, self.variance, mean)

    def curvature(self, below: float = math.inf) -> float:
        return self.bound

    def floor(self) -> float:
        return 0.0

    def statistic(self, y: Tensor) -> Tensor:
        return y


def within_support(y: Tensor, inside: Tensor, family: str, support: str) -> Tensor:
    """y itself, or an error that names the first value outside the family's support."""
    if not bool(inside.all()):
        raise ValueError(f"{family} targets must be {support}, got {y[~inside].flatten()[0].item():g}.")
    return y
