"""γ, the inverse width of the Gaussian kernel: fixed (KerDEQ) or following the data (GEQ)."""

import abc
import dataclasses
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from ..solution import check_positive


class AbstractWidth(abc.ABC):
    """A rule for γ: a value; each cell makes its own state for it."""

    @abc.abstractmethod
    def module(self, size: int) -> "Width": ...


class Width(nn.Module, abc.ABC):
    @abc.abstractmethod
    def forward(self) -> Tensor:
        """γ, as it is used during one solve."""

    adapts: ClassVar[bool]  # whether `observe` has an effect

    @abc.abstractmethod
    def observe(self, distances: Tensor) -> None:
        """Take note of ‖rᵢW_h‖² of every patch at an equilibrium."""


@final
@dataclasses.dataclass(frozen=True)
class Fixed(AbstractWidth):
    """γ as given (KerDEQ: 0.5)."""

    gamma: float = 0.5

    def __post_init__(self) -> None:
        check_positive("gamma", self.gamma)

    def module(self, size: int) -> "FixedWidth":
        return FixedWidth(self.gamma)


@final
class FixedWidth(Width):
    adapts: ClassVar[bool] = False

    def __init__(self, gamma: float):
        super().__init__()
        self.register_buffer("gamma", torch.tensor(float(gamma)), persistent=False)

    def forward(self) -> Tensor:
        return self.get_buffer("gamma")

    def observe(self, distances: Tensor) -> None:
        return None


@final
@dataclasses.dataclass(frozen=True)
class Adaptive(AbstractWidth):
    """γ = share / M, M the smallest ‖rᵢW_h‖² among the patches (GEQ: 0.2 / M).

    The paper gives no rule for M. Ours: a running mean of the minimum over (the first samples of) a batch at the
    equilibria found in training, frozen in evaluation and saved with the model. Training can drive single patches to
    r ≈ 0, and then γ without limit, which switches the equilibrium off; so M is never below a share of the mean.
    """

    share: float = 0.2
    momentum: float = 0.1
    floor: float = 0.2  # M is at least this share of the mean over the patches

    def __post_init__(self) -> None:
        check_positive("share", self.share)
        if not 0 < self.momentum <= 1:
            raise ValueError(f"`momentum` must lie in (0, 1], got {self.momentum}.")
        check_positive("floor", self.floor)

    def module(self, size: int) -> "AdaptiveWidth":
        return AdaptiveWidth(self, size)


@final
class AdaptiveWidth(Width):
    adapts: ClassVar[bool] = True

    smallest: Tensor
    looks: Tensor

    def __init__(self, rule: Adaptive, size: int):
        super().__init__()
        self.rule = rule
        self.register_buffer("smallest", torch.tensor(float(size)))  # M; `size` is E‖rᵢ‖² for unit entries
        self.register_buffer("looks", torch.tensor(0.0))  # how often M was looked at

    def forward(self) -> Tensor:
        return self.rule.share / self.smallest.clone()

    def observe(self, distances: Tensor) -> None:
        found = torch.maximum(distances.min(), self.rule.floor * distances.mean()).to(self.smallest)
        found = torch.where(found.isfinite(), found, self.smallest)  # one bad batch must not spoil γ for good
        weight = torch.where(self.looks == 0, 1.0, self.rule.momentum).to(self.smallest)
        self.smallest.lerp_(found, weight)
        self.looks += 1
