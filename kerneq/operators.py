"""The linear operator W from state to features, dense or convolutional: apply, adjoint, operator norm."""

import abc
import dataclasses
from typing import Any, Self, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .fused.convolution import Convolution
from .spectrum import top_singular_vector

SETTLE_STEPS = 40  # Lanczos steps for a weight not seen before
TRACK_STEPS = 1  # power iterations a training step, from the vector of the step before


@dataclasses.dataclass(frozen=True)
class BoundOperator:
    """W with its weight fixed for one solve; `size` is the size of a convolution's kernel, 0 for a dense matrix."""

    weight: Tensor
    size: int

    convolution: Convolution = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "convolution", Convolution(self.weight))

    def __call__(self, z: Tensor) -> Tensor:
        return self.convolution(z) if self.size else F.linear(z, self.weight)

    def added(self, v: Tensor, z: Tensor, sign: int) -> Tensor:
        """v ± Wz, without a graph."""
        return self.convolution.added(v, z, sign) if self.size else torch.add(v, self(z), alpha=sign)

    def adjoint(self, v: Tensor) -> Tensor:
        return self.convolution.adjoint(v) if self.size else F.linear(v, self.weight.mT)

    def adjoint_relu(self, v: Tensor, shift: Tensor | None) -> Tensor:
        """max(Wᵀv + shift, 0)."""
        if self.size:
            return self.convolution.adjoint_relu(v, shift)
        drive = self.adjoint(v)
        return torch.relu(drive if shift is None else drive + shift)

    def adjoint_masked(self, v: Tensor, z: Tensor, g: Tensor | None, sign: int) -> Tensor:
        """g ± Wᵀv where z > 0, else 0; without a graph."""
        if self.size:
            return self.convolution.adjoint_masked(v, z, g, sign)
        drive = sign * self.adjoint(v) if g is None else torch.add(g, self.adjoint(v), alpha=sign)
        return torch.ops.aten.threshold_backward(drive, z, 0)

    def weight_gradient(self, z: Tensor, v: Tensor) -> Tensor:
        """The gradient of ⟨Wz, v⟩ with respect to the weight."""
        return self.convolution.weight_gradient(z, v) if self.size else v.mT @ z

    def detach(self) -> "BoundOperator":
        return BoundOperator(self.weight.detach(), self.size)


class AbstractOperator(nn.Module, abc.ABC):
    """A weight W and an estimate of its operator norm, followed from step to step.

    The estimate is ‖W u‖ at a unit vector u of the state, kept in the state dict. In training each `norm` call makes
    one power iteration from the last u; in evaluation, u is settled by Lanczos once after the weight has changed and
    then stays. ‖W u‖ is differentiated with respect to W, which gives the gradient of the norm.
    """

    size: int
    weight: nn.Parameter
    vector: Tensor

    def __init__(self, weight: Tensor, size: int):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.size = size
        self.register_buffer("vector", torch.zeros(0))
        self._settled: tuple[int, int] | None = None  # address and version of the weight `vector` was settled for

    @abc.abstractmethod
    def state_shape(self, example: Tensor) -> tuple[int, ...]:
        """The shape of one state, given one value of a = Ux + b."""

    def bind(self, scale: Tensor | float = 1.0) -> BoundOperator:
        """W times a scale, as it is used during one solve: under autocast, converted once and not at every step."""
        weight, kind = self.weight * scale, self.weight.device.type
        if torch.is_autocast_enabled(kind):
            weight = weight.to(torch.get_autocast_dtype(kind))
        return BoundOperator(weight, self.size)

    def norm(self, example: Tensor) -> Tensor:
        """‖W‖ on states of the size that goes with `example`, as a differentiable number."""
        self._follow(self.state_shape(example))
        return self.last_norm()

    def last_norm(self) -> Tensor:
        """‖W u‖ at the vector followed so far."""
        u = _wide(self.vector).clone()  # a later step may move the buffer while this one waits for its backward pass
        with torch.autocast(u.device.type, enabled=False):
            image = BoundOperator(_wide(self.weight), self.size)(u.unsqueeze(0))
            return torch.linalg.vector_norm(image) / torch.linalg.vector_norm(u)

    @torch.inference_mode(False)  # `vector` outlives the call: made in inference mode, it could not be followed later
    @torch.no_grad()
    def _follow(self, shape: tuple[int, ...]) -> None:
        """Move `vector` towards the top singular vector of the weight as it is now."""
        w = BoundOperator(_wide(self.weight.detach()), self.size)
        fresh = tuple(self.vector.shape) != shape
        traced = torch.compiler.is_compiling() or torch.compiler.is_exporting()
        if fresh and traced:  # no numbers to settle on: the program would hold a wrong norm for ever
            raise RuntimeError(
                f"The norm of W on states of shape {shape} is not known yet: call the model once, in `eval()` and on "
                "an input of this size, before it is exported."
            )
        if fresh:
            # A fixed generator: neither the global seed nor the device changes where the search starts.
            start = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            self.vector = start.to(self.weight)
        if traced:
            return
        now = self._identity()
        track = self.training and not fresh
        if track or fresh or now != self._settled:
            if self.vector.is_inference():
                self.vector = self.vector.clone()
            steps = TRACK_STEPS if track else SETTLE_STEPS
            with torch.autocast(self.weight.device.type, enabled=False):
                self.vector.copy_(top_singular_vector(w, w.adjoint, _wide(self.vector), steps, lanczos=not track))
            self._settled = None if track else now

    def train(self, mode: bool = True) -> Self:
        """Whatever is trained is settled anew: a CUDA graph changes weights without a trace in their version."""
        if mode:
            self._settled = None
        return super().train(mode)

    def _identity(self) -> tuple[int, int]:
        return self.weight.data_ptr(), 0 if self.weight.is_inference() else self.weight._version

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """With whether `vector` belongs to the weight: where it does, a model that is loaded has nothing to settle."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "settled"] = torch.tensor(self._settled == self._identity())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        saved, settled = state_dict.get(prefix + "vector"), state_dict.pop(prefix + "settled", False)
        if saved is not None and saved.shape != self.vector.shape:  # it depends on the pictures the model has seen
            self.vector = torch.zeros_like(saved, dtype=self.weight.dtype, device=self.vector.device)
        super()._load_from_state_dict(state_dict, prefix, *args)
        whole = saved is not None and prefix + "weight" in state_dict
        self._settled = self._identity() if whole and bool(settled) else None


@final
class Dense(AbstractOperator):
    """v = W z, W a matrix (features × state)."""

    def __init__(self, state: int, features: int):
        super().__init__(torch.randn(features, state) / state**0.5, size=0)

    def state_shape(self, example: Tensor) -> tuple[int, ...]:
        return (self.weight.shape[1],)


@final
class Conv(AbstractOperator):
    """v = W ∗ z, a zero-padded convolution (features, state, size, size) that keeps the size of the picture."""

    def __init__(self, state: int, features: int, size: int):
        super().__init__(torch.randn(features, state, size, size) / (size * state**0.5), size=size)

    def state_shape(self, example: Tensor) -> tuple[int, ...]:
        return (self.weight.shape[1], *example.shape[-2:])


def _wide(t: Tensor) -> Tensor:
    """In float32 at least: a norm is no place for half precision."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def limited(norm: Tensor, limit: float) -> Tensor:
    """The factor min(1, limit / norm) that holds an operator under its limit."""
    return (limit / norm.clamp_min(torch.finfo(norm.dtype).tiny)).clamp_max(1.0)
