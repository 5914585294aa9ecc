"""The linear operator W from state to features as a module, dense or convolutional, and its norm."""

import abc
from collections.abc import Callable
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from .linear_maps import AbstractLinearMap, as_linear_map
from .norm_tracker import NormTracker, norm_at
from .tensors import autocasted


class AbstractOperator(nn.Module, abc.ABC):
    """A weight W and an estimate of its operator norm, which follows the weight from step to step.

    The state dict has the vector of the estimate and whether it is settled, so that a loaded model has nothing to
    search for.
    """

    weight: nn.Parameter

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.tracker = NormTracker()

    @abc.abstractmethod
    def state_shape(self, example: Tensor) -> tuple[int, ...]:
        """Return the shape of one state, given one value of a = Ux + b."""

    def bind(self, scale: Tensor | float = 1.0) -> AbstractLinearMap:
        """Return W times a scale for one solve: under autocast it is converted once and not at every step."""
        return as_linear_map(autocasted(self.weight * scale))

    def norm(self, example: Tensor) -> Tensor:
        """Return ‖W‖ on states of the size that goes with `example`, as a differentiable number."""
        return norm_at(self.weight, self.tracker.update(self.weight, self.state_shape(example), self.training))

    def last_norm(self) -> Tensor | None:
        """Return ‖W‖ by the vector found last, without a search; None before the first."""
        return norm_at(self.weight, self.tracker.vector) if self.tracker.vector.numel() > 0 else None

    def settle(self) -> None:
        """In evaluation, find the vector for the weight as it is now, in place, if states have been seen before."""
        self.tracker.settle(self.weight)

    @property
    def settled(self) -> bool:
        """Whether a vector has been found in evaluation, and nothing has been trained since."""
        return self.tracker.settled is not None

    def train(self, mode: bool = True) -> Self:
        """Forget in training that the vector was settled: a CUDA graph changes weights without changing a version."""
        if mode:
            self.tracker.settled = None
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the vector where the weight goes."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.tracker.vector = fn(self.tracker.vector)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "vector"] = self.tracker.vector
        destination[prefix + "settled"] = torch.tensor(self.tracker.is_settled(self.weight))

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: list[str], *lists: Any
    ) -> None:
        vector, settled = state_dict.pop(prefix + "vector", None), state_dict.pop(prefix + "settled", False)
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *lists)
        self.tracker.settled = None
        if vector is None:
            missing.append(prefix + "vector")
        else:
            self.tracker.load(vector, self.weight, prefix + "weight" in state_dict and bool(settled))


@final
class Dense(AbstractOperator):
    """v = W z, W a matrix (features × state)."""

    def __init__(self, state: int, features: int):
        super().__init__(torch.randn(features, state) / state**0.5)

    def state_shape(self, example: Tensor) -> tuple[int, ...]:
        return (self.weight.shape[1],)


@final
class Conv(AbstractOperator):
    """v = W ∗ z, a zero-padded convolution (features, state, size, size) that keeps the size of the picture."""

    def __init__(self, state: int, features: int, size: int):
        super().__init__(torch.randn(features, state, size, size) / (size * state**0.5))

    def state_shape(self, example: Tensor) -> tuple[int, ...]:
        return (self.weight.shape[1], *example.shape[-2:])


def compute_scale(norm: Tensor, limit: float) -> Tensor:
    """Return min(1, limit / norm), by which an operator is scaled to its limit; NaN where the norm is no number."""
    # Where the factor is 1 its slope is 0 times that of limit / norm, which must not be infinite. For a norm of ∞ it
    # would be 0, a layer without W that says it has converged; 0 · ∞ is NaN, and makes it one too.
    factor = (limit / norm.clamp_min(limit / 2)).clamp_max(1.0)
    return torch.add(factor, norm.detach(), alpha=0)
