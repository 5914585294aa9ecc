"""What a card can run, and how work is spread over it.

The one place that decides whether a Triton program may take the place of plain PyTorch.
"""

import functools
import importlib.util
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from ..tensors import is_transformed, map_tensors

T = TypeVar("T")


def _has_triton() -> bool:
    """Whether there is a Triton with tensor descriptors, 3.4 or later; looked for without importing it."""
    package = importlib.util.find_spec("triton")
    if package is None or package.origin is None:
        return False
    return (Path(package.origin).parent / "tools" / "tensor_descriptor.py").exists()


HAS_TRITON = _has_triton()
HALF = (torch.bfloat16, torch.float16)
FLOATS = (*HALF, torch.float32)


@functools.cache
def _properties(card: int) -> tuple[tuple[int, int], int]:
    """Compute capability and multiprocessors of a card: asked at every launch, and PyTorch takes its time to answer."""
    found = torch.cuda.get_device_properties(card)
    return (found.major, found.minor), found.multi_processor_count


def capability(t: Tensor) -> tuple[int, int]:
    """The compute capability of the tensor's card; (0, 0) where there is none, or none by NVIDIA."""
    return _properties(t.get_device())[0] if t.is_cuda and torch.version.cuda is not None else (0, 0)


def runs_triton(t: Tensor, dtypes: Collection[torch.dtype] = FLOATS) -> bool:
    """Whether a Triton program may work on `t`.

    It takes Triton, an NVIDIA card with bfloat16 and asynchronous copies, and a known dtype. A program that is
    compiled or exported holds plain operations: the compiler fuses by itself. So do transforms: see `is_transformed`.
    """
    if not (HAS_TRITON and t.is_cuda) or torch.compiler.is_compiling() or is_transformed() or t.dtype not in dtypes:
        return False
    return capability(t) >= (8, 0)


def needs_graph(*tensors: Tensor) -> bool:
    """Whether autograd will differentiate what is made of these: then plain operations, which record themselves."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def differentiable(
    plain: Callable[..., Sequence[Tensor | None]],
    inputs: Sequence[Tensor | None],
    cotangents: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """The gradients of plain operations with a graph of their own; None for an input that needs none.

    This is what the backward of a fused operation gives when a second derivative is coming.
    """
    leaves = [t.view_as(t) if t is not None and t.requires_grad else None for t in inputs]
    outputs = plain(*(t if leaf is None else leaf for t, leaf in zip(inputs, leaves, strict=True)))
    made, wanted, given = ([t for t in some if t is not None] for some in (outputs, leaves, cotangents))
    grads = iter(torch.autograd.grad(made, wanted, given, create_graph=True, allow_unused=True))
    return tuple(None if leaf is None else next(grads) for leaf in leaves)


def processors(t: Tensor) -> int:
    """The number of multiprocessors of the tensor's card; 2 on a CPU, for Triton's interpreter."""
    return _properties(t.get_device())[1] if t.is_cuda else 2


def run_on_streams(functions: Sequence[Callable[[Tensor], T]], inputs: Iterable[Tensor], overlap: bool) -> list[T]:
    """Each function on its input; with `overlap` on a GPU, each on a stream of its own.

    So the small parts of work that does not depend on each other hide behind the large. Inputs that are made one by one
    are made on the current stream, beside the functions before them. The results are tensors, or tuples and
    dataclasses of them, ready on the current stream.
    """
    beside: list[torch.cuda.Stream] = []
    results: list[T] = []
    for function, x in zip(functions, inputs, strict=True):
        if not overlap or not x.is_cuda or len(functions) == 1:
            results.append(function(x))
            continue
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            results.append(function(x))
        x.record_stream(stream)
        beside.append(stream)
    if not beside:
        return results
    here = torch.cuda.current_stream()

    def used_here(t: Tensor) -> Tensor:
        t.record_stream(here)
        return t

    for stream in beside:
        here.wait_stream(stream)
    return [map_tensors(used_here, result) for result in results]
