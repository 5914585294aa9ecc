"""What a GPU can run, and how work is spread over it: whether a Triton program may replace plain PyTorch."""

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
    """Whether Triton 3.4 or later, which has tensor descriptors, is installed; it is not imported for that."""
    package = importlib.util.find_spec("triton")
    if package is None or package.origin is None:
        return False
    return (Path(package.origin).parent / "tools" / "tensor_descriptor.py").exists()


HAS_TRITON = _has_triton()
HALF = (torch.bfloat16, torch.float16)
FLOATS = (*HALF, torch.float32)


@functools.cache
def _properties(card: int) -> tuple[tuple[int, int], int]:
    """Return a GPU's compute capability and number of multiprocessors; cached, as PyTorch is slow to answer."""
    found = torch.cuda.get_device_properties(card)
    return (found.major, found.minor), found.multi_processor_count


def capability(t: Tensor) -> tuple[int, int]:
    """Return the compute capability of the tensor's GPU; (0, 0) on any other device."""
    return _properties(t.get_device())[0] if t.is_cuda and torch.version.cuda is not None else (0, 0)


def runs_triton(t: Tensor, dtypes: Collection[torch.dtype] = FLOATS) -> bool:
    """Whether a Triton program may work on `t`.

    That needs Triton, an NVIDIA GPU with bfloat16 and asynchronous copies, and one of the dtypes. Compilers and exports
    get plain operations, which the compiler fuses by itself; so do transforms (see `is_transformed`).
    """
    if not (HAS_TRITON and t.is_cuda) or torch.compiler.is_compiling() or is_transformed() or t.dtype not in dtypes:
        return False
    return capability(t) >= (8, 0)


def pull_back(
    plain: Callable[..., Sequence[Tensor | None]],
    inputs: Sequence[Tensor | None],
    cotangents: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of plain operations, with a graph of their own; None for an input that needs none.

    The backward of a fused operation returns them when a second derivative is wanted.
    """
    leaves = [t.view_as(t) if t is not None and t.requires_grad else None for t in inputs]
    outputs = plain(*(t if leaf is None else leaf for t, leaf in zip(inputs, leaves, strict=True)))
    made, wanted, given = ([t for t in some if t is not None] for some in (outputs, leaves, cotangents))
    grads = iter(torch.autograd.grad(made, wanted, given, create_graph=True, allow_unused=True))
    return tuple(None if leaf is None else next(grads) for leaf in leaves)


def processors(t: Tensor) -> int:
    """Return the number of multiprocessors of the tensor's GPU; 2 on a CPU, for Triton's interpreter."""
    return _properties(t.get_device())[1] if t.is_cuda else 2


def run_on_streams(functions: Sequence[Callable[[Tensor], T]], inputs: Iterable[Tensor]) -> list[T]:
    """Apply each function to its input, a tensor on a GPU, on a stream of its own.

    So small kernels run beside large ones that do not depend on them. Inputs that an iterator makes one by one are made
    on the current stream, while the functions before them run. The results are tensors, or tuples and dataclasses of
    them, ready on the current stream.
    """
    here = torch.cuda.current_stream()
    streams: list[torch.cuda.Stream] = []
    results: list[T] = []
    for function, x in zip(functions, inputs, strict=True):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            results.append(function(x))
        x.record_stream(stream)
        streams.append(stream)

    def use_here(t: Tensor) -> Tensor:
        t.record_stream(here)
        return t

    for stream in streams:
        here.wait_stream(stream)
    return [map_tensors(use_here, result) for result in results]
