"""The linear operator W from state to features as a module, dense or convolutional.

Its estimate of ‖W‖ follows the weight through training: ‖Wu‖, where u is found by Lanczos from the u before.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from .linear_maps import LinearMap, check_top_vector, norm_at, settle_top_vector, track_top_vector
from .tensors import autocasted, in_backward, version


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Settled:
    """Which vector was found for which weight.

    The weight is known by its numbers: an address and a version stay the same where `functional_call`, `.data` or a
    freed parameter put other numbers there. Only inside a CUDA graph, where no number can be read, address and version
    have to do.
    """

    vector: Tensor
    numbers: Tensor  # a copy of the weight
    place: tuple[int, int]  # its address and version
    excess: float  # ‖W‖ is at most this times ‖Wu‖

    @classmethod
    def at(cls, vector: Tensor, weight: Tensor, excess: float) -> "Settled":
        """Note that the vector belongs to the weight as it is now."""
        return cls(vector, weight.detach().clone(), find_place(weight), excess)

    def fits(self, vector: Tensor | None, weight: Tensor) -> bool:
        """Whether both are still what they were; on a GPU this waits for the device, except inside a CUDA graph."""
        if vector is not self.vector:
            return False
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return self.place == find_place(weight)
        alike = (weight.dtype, weight.device) == (self.numbers.dtype, self.numbers.device)
        return alike and torch.equal(self.numbers, weight)


def find_place(t: Tensor) -> tuple[int, int]:
    """Return the address of a tensor and how often it has been written to."""
    return t.data_ptr(), version(t)


@final
class NormTracker:
    """A unit vector u of the state with ‖Wu‖ near ‖W‖, updated as W changes.

    In training each update takes a few Lanczos steps from the last u. In evaluation u is settled by many steps once
    after the weight has changed, and then stays. Threads may share a tracker in evaluation: each works with a vector
    of its own and publishes it in one assignment.

    u is no buffer, because its shape comes with the first pictures: what copies buffers, such as an `AveragedModel`
    that was made before them, expects that shapes do not change. So the module that owns the tracker
    (`Operator`) moves, saves and loads u itself.
    """

    def __init__(self) -> None:
        self.vector = torch.zeros(0)  # u, shaped as one state; empty until the first update
        self.settled: Settled | None = None  # None: not settled, or trained since

    @torch.inference_mode(False)  # `vector` outlives the call: made in inference mode, it could not be updated later
    @torch.no_grad()
    def update(self, weight: Tensor, shape: tuple[int, ...], training: bool) -> Tensor:
        """Return u for states of this shape and the weight as it is now."""
        vector, settled = self.vector, self.settled  # read once: another thread may publish others meanwhile
        known = vector if tuple(vector.shape) == shape and vector.device == weight.device else None
        if torch.compiler.is_compiling():
            if known is None:  # there are no numbers to find a vector for, and a program would hold a wrong norm
                raise RuntimeError(
                    f"The norm of W on states of shape {shape} is not known yet: call the model once, in `eval()` and "
                    "on an input of this size, before it is exported."
                )
            return known
        track = training and known is not None
        if track and in_backward():  # computed again by gradient checkpointing: as before
            return vector
        if not track and settled is not None and settled.fits(known, weight):
            return settled.vector
        if track:
            found, excess = track_top_vector(weight, vector), math.inf
        else:
            found, excess = settle_top_vector(weight, shape, known)
        # On a GPU a captured step knows the vector by its address, and the stream keeps readers and writers apart.
        if known is not None and (track or known.is_cuda) and not known.is_inference():
            found = known.copy_(found)
        else:
            self.vector = found
        self.settled = None if track else Settled.at(found, weight, excess)
        return found

    def settle(self, weight: Tensor) -> None:
        """In evaluation, find u for the weight as it is now, in place, if states have been seen before."""
        if self.vector.numel() > 0:
            self.update(weight, tuple(self.vector.shape), training=False)
        if self.settled is not None:  # the numbers fit, but a copy of them, or others swapped back, may lie elsewhere
            self.settled = dataclasses.replace(self.settled, place=find_place(weight))

    def is_settled(self, weight: Tensor) -> bool:
        """Whether u was found in evaluation for this very weight."""
        return self.settled is not None and self.settled.fits(self.vector, weight)

    @torch.no_grad()
    def load(self, vector: Tensor, weight: Tensor, settled: bool) -> None:
        """Take over a saved u; if it was `settled` for this weight there is nothing to search for in evaluation."""
        mine = self.vector
        if (mine.shape, mine.dtype, mine.device) != (vector.shape, weight.dtype, weight.device):
            self.vector = torch.empty_like(vector, dtype=weight.dtype, device=weight.device)
        self.vector.copy_(vector)  # in place where possible: see `update`
        excess = check_top_vector(self.vector, weight) if settled else None
        self.settled = None if excess is None else Settled.at(self.vector, weight, excess)


@final
class Operator(nn.Module):
    """A weight W, and an estimate of its operator norm that follows the weight from step to step.

    W is a matrix (features, state), or with a `size` a convolution (features, state, size, size): see `LinearMap`. The
    state dict has the vector of the estimate and whether it is settled, so that a loaded model has nothing to search
    for.
    """

    def __init__(self, state: int, features: int, size: int | None = None):
        super().__init__()
        shape = (features, state) if size is None else (features, state, size, size)
        self.weight = nn.Parameter(torch.randn(shape) / ((size or 1) * state**0.5))
        self.tracker = NormTracker()

    def bind(self, scale: Tensor | float = 1.0) -> LinearMap:
        """Return W times a scale for one solve: under autocast it is converted once and not at every step."""
        return LinearMap(autocasted(self.weight * scale))

    def norm(self, example: Tensor) -> Tensor:
        """Return ‖W‖ on states that go with `example`, (batch, any, ...) like a, as a differentiable number."""
        shape = (self.weight.shape[1], *example.shape[2:])
        return norm_at(self.weight, self.tracker.update(self.weight, shape, self.training))

    @property
    def excess(self) -> float:
        """By what factor ‖W‖ may exceed the norm found last; ∞ in training, where that is only followed."""
        settled = self.tracker.settled
        return math.inf if settled is None else settled.excess

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
@dataclasses.dataclass(frozen=True)
class Scaling:
    """How a cell holds W under its bound; each a number."""

    operator_norm: Tensor  # ‖W‖, before W is scaled
    product: Tensor  # the same, times ‖W_h‖ where there is one
    scale: Tensor  # W is multiplied by this
    excess: float = 1.0  # by what factor ‖W‖‖W_h‖ may exceed `product`

    @property
    def square(self) -> Tensor:
        """‖W‖²‖W_h‖² after scaling, without a graph."""
        return (self.product * self.scale).detach() ** 2

    @property
    def norm(self) -> Tensor:
        """‖W‖ after scaling, without a graph."""
        return (self.operator_norm * self.scale).detach()

    @property
    def norm_bound(self) -> Tensor:
        """‖W‖ after scaling, from above."""
        return self.norm * self.excess


def compute_scale(norm: Tensor, limit: float) -> Tensor:
    """Return min(1, limit / norm), by which an operator is scaled to its limit; NaN where the norm is no number."""
    # Where the factor is 1 its slope is 0 times that of limit / norm, which must not be infinite. For a norm of ∞ it
    # would be 0, a layer without W that says it has converged; 0 · ∞ is NaN, and makes it one too.
    factor = (limit / norm.clamp_min(limit / 2)).clamp_max(1.0)
    return torch.add(factor, norm.detach(), alpha=0)
