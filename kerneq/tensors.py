"""Shared tensor utilities and argument checks: per-sample norms, memory layouts, dtypes."""

import dataclasses
import numbers
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

T = TypeVar("T")
Owner = TypeVar("Owner")


class cached(Generic[Owner, T]):
    """A property of a frozen value that is computed once; `functools.cached_property` that torch.compile can trace."""

    def __init__(self, function: Callable[[Owner], T]):
        self.function, self.name, self.__doc__ = function, function.__name__, function.__doc__

    def __get__(self, instance: Owner, owner: type[Owner]) -> T:
        value = self.function(instance)
        if not torch.compiler.is_compiling():
            instance.__dict__[self.name] = value  # found there from now on, before this
        return value


def per_sample(t: Tensor, like: Tensor) -> Tensor:
    """View (batch,), one number a sample, so that it broadcasts against `like` (batch, ...)."""
    return t.view(-1, *[1] * (like.dim() - 1))


def per_sample_norm(t: Tensor, order: float = 2) -> Tensor:
    """Return the norm of each sample, (batch,), ‖t‖₂ unless another order is given, accumulated in float32 at least."""
    dims = tuple(range(1, t.dim()))
    dtype = torch.float64 if t.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(t, order, dim=dims, dtype=dtype) if dims else t.abs().to(dtype)


def magnitude(t: Tensor) -> Tensor:
    """Return the power of two at or below the largest entry of each sample, (batch, 1, ...); NaN where one is NaN.

    Dividing by it loses no digit and makes the rest safe to square: 1e-21 would vanish in float32, and 1e20 overflow.
    """
    largest = per_sample_norm(t, torch.inf).clamp_min(torch.finfo(t.dtype).tiny)
    return per_sample(largest / (2 * torch.frexp(largest).mantissa), t).to(t.dtype)


def per_sample_dot(p: Tensor, q: Tensor) -> Tensor:
    """Return ⟨p, q⟩ of each sample, (batch,), accumulated in float32 at least."""
    return (p * q).sum(tuple(range(1, p.dim())), dtype=working_dtype(p.dtype))


def take_samples(t: Tensor, index: Tensor) -> Tensor:
    """Return the samples in `index`, stored as t is; `index_select` alone would lose channels-last order."""
    if is_channels_last(t):
        return t.permute(0, 2, 3, 1).index_select(0, index).permute(0, 3, 1, 2)
    return t.index_select(0, index)


def map_tensors(function: Callable[[Tensor], Tensor], tree: T) -> T:
    """Apply the function to every tensor of a dataclass, tuple or dict, however nested.

    Anything else (a number, a name, None) stays as it is.
    """
    if isinstance(tree, Tensor):
        return function(tree)  # type: ignore[return-value]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields: dict[str, Any] = {
            field.name: map_tensors(function, getattr(tree, field.name)) for field in dataclasses.fields(tree)
        }
        return dataclasses.replace(tree, **fields)
    if isinstance(tree, tuple):
        return tuple(map_tensors(function, item) for item in tree)  # type: ignore[return-value]
    if isinstance(tree, dict):
        return {key: map_tensors(function, item) for key, item in tree.items()}  # type: ignore[return-value]
    return tree


def restrict(tree: T, index: Tensor) -> T:
    """Restrict every per-sample tensor of a dataclass (its first dimension is the batch) to the samples in `index`."""
    return map_tensors(lambda t: take_samples(t, index) if t.dim() > 0 else t, tree)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of norms, sums and small systems: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32  # PyTorch 2.6 exports `promote_types` in vain


def widened(t: Tensor) -> Tensor:
    """Return t in float32 at least, for norms and other sums."""
    return t if t.dtype in (torch.float32, torch.float64) else t.float()


def autocasted(t: Tensor) -> Tensor:
    """Return t in the dtype of autocast, where that is on."""
    kind = t.device.type
    return t.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else t


def forget_casts(t: Tensor) -> None:
    """Clear the casts of autocast: PyTorch 2.6 would keep those made without a graph for whatever runs next."""
    if torch.is_autocast_enabled(t.device.type):
        torch.clear_autocast_cache()


def precision(t: Tensor) -> torch.dtype:
    """Return the dtype that t was computed in, as far as can be told: that of autocast where it is on."""
    kind = t.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else t.dtype


def is_channels_last(t: Tensor) -> bool:
    """Whether images are stored channels-last, (batch, height, width, channels) in memory."""
    return t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last)


def is_only_channels_last(t: Tensor) -> bool:
    """Whether they are, and not contiguous as well: images of one channel, or of one pixel, are both."""
    return t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous()


def version(t: Tensor) -> int:
    """Return how often t has been written to; 0 where PyTorch does not count."""
    return 0 if torch.compiler.is_compiling() or t.is_inference() else t._version


def is_transformed() -> bool:
    """Whether a transform of `torch.func` is active, or forward mode without it (`torch.autograd.forward_ad`).

    The test is that of PyTorch's own `autograd.Function`, inside of which forward mode is off.
    """
    forward = forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()
    return forward or torch._C._are_functorch_transforms_active()


def in_backward() -> bool:
    """Whether this runs inside a backward pass: in a layer, because gradient checkpointing computes it once more."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def needs_graph(*tensors: Tensor) -> bool:
    """Whether autograd will differentiate the result: then plain operations are needed, which autograd records."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def check_positive(name: str, value: float) -> None:
    """Raise unless the value is a positive, finite number."""
    if not (_is_number(value) and 0 < value < float("inf")):
        raise ValueError(f"`{name}` must be positive and finite, got {value!r}.")


def check_nonnegative(name: str, value: float) -> None:
    """Raise unless the value is a number and at least 0."""
    if not (_is_number(value) and value >= 0):
        raise ValueError(f"`{name}` must not be negative, got {value!r}.")
    if value == float("inf"):
        raise ValueError(f"`{name}` must be finite, got {value!r}.")


def check_share(name: str, value: float) -> None:
    """Raise unless the value is a number in (0, 1]."""
    if not (_is_number(value) and 0 < value <= 1):
        raise ValueError(f"`{name}` must lie in (0, 1], got {value!r}.")


def _is_number(value: object) -> bool:
    """Whether the value is a number, and not a truth value."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_whole(name: str, value: int, least: int = 1) -> None:
    """Raise unless the value is a whole number, `least` or more."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(f"`{name}` must be a whole number, at least {least}, got {value!r}.")


def check_kind(name: str, value: object, kind: type) -> None:
    """Raise unless the value is of this kind: a solver, say, and not a string or the class itself."""
    if not isinstance(value, kind):
        raise TypeError(f"`{name}` must come from `kerneq.{name}s`, got {value!r}.")
