"""γ, the inverse width of a radial kernel: fixed (KerDEQ) or following the data (GEQ)."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from ..tensors import check_positive, check_share


class AbstractWidth(abc.ABC):
    """A rule for γ: a value. What it has to remember is in the `Width` of each cell."""

    adapts: ClassVar[bool]  # whether `update` has an effect, and the state is saved with the model

    @abc.abstractmethod
    def initial(self, size: int) -> dict[str, Tensor]:
        """What is remembered, before the first equilibrium; `size` is E‖rᵢ‖² for patches of unit entries."""

    @abc.abstractmethod
    def current(self, state: Mapping[str, Tensor]) -> Tensor:
        """γ, as it is used during one solve."""

    @abc.abstractmethod
    def update(self, state: Mapping[str, Tensor], distances: Tensor) -> None:
        """Take note, in place, of ‖rᵢW_h‖² of every patch at an equilibrium."""


@final
@dataclasses.dataclass(frozen=True)
class Fixed(AbstractWidth):
    """γ as given (KerDEQ: 0.5)."""

    adapts: ClassVar[bool] = False

    gamma: float = 0.5

    def __post_init__(self) -> None:
        check_positive("gamma", self.gamma)

    def initial(self, size: int) -> dict[str, Tensor]:
        return {"gamma": torch.tensor(float(self.gamma))}

    def current(self, state: Mapping[str, Tensor]) -> Tensor:
        return state["gamma"]

    def update(self, state: Mapping[str, Tensor], distances: Tensor) -> None:
        return None


@final
@dataclasses.dataclass(frozen=True)
class Adaptive(AbstractWidth):
    """γ = share / M, M the smallest ‖rᵢW_h‖² among the patches (GEQ: 0.2 / M).

    The paper gives no rule for M. Ours: a running mean of the minimum over (the first samples of) a batch at the
    equilibria found in training, frozen in evaluation and saved with the model. Training can drive single patches to
    r ≈ 0, and then γ without limit, which switches the equilibrium off; so M is never below a share of the mean.
    """

    adapts: ClassVar[bool] = True

    share: float = 0.2
    momentum: float = 0.1
    floor: float = 0.2  # M is at least this share of the mean over the patches

    def __post_init__(self) -> None:
        check_positive("share", self.share)
        check_share("momentum", self.momentum)
        check_positive("floor", self.floor)

    def initial(self, size: int) -> dict[str, Tensor]:
        return {"smallest": torch.tensor(float(size)), "looks": torch.tensor(0.0)}  # M, and how often it was updated

    def current(self, state: Mapping[str, Tensor]) -> Tensor:
        return self.share / state["smallest"].clone()

    def update(self, state: Mapping[str, Tensor], distances: Tensor) -> None:
        smallest, looks = state["smallest"], state["looks"]
        found = torch.maximum(distances.min(), self.floor * distances.mean()).to(smallest)
        found = torch.where(found.isfinite(), found, smallest)  # one bad batch must not spoil γ for good
        smallest.lerp_(found, torch.where(looks == 0, 1.0, self.momentum).to(smallest))
        looks += 1


@final
class Width(nn.Module):
    """γ of one cell: a rule and, as buffers, what the rule remembers."""

    def __init__(self, rule: AbstractWidth, size: int):
        super().__init__()
        self.rule = rule
        for name, value in rule.initial(size).items():
            self.register_buffer(name, value, persistent=rule.adapts)

    def forward(self) -> Tensor:
        return self.rule.current(dict(self.named_buffers()))

    def observe(self, distances: Tensor) -> None:
        self.rule.update(dict(self.named_buffers()), distances)
