"""Work that does not depend on each other, on streams of its own: on a GPU the small parts hide behind the large."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def run_on_streams(functions: Sequence[Callable[[Tensor], T]], inputs: Sequence[Tensor], overlap: bool) -> list[T]:
    """Each function on its input; the first on the current stream and, with `overlap` on a GPU, the others beside it.

    The results may be tensors, tuples, lists and dataclasses of them; they are ready on the current stream.
    """
    if not overlap or not inputs[0].is_cuda or len(functions) == 1:
        return [function(x) for function, x in zip(functions, inputs, strict=True)]
    here = torch.cuda.current_stream()
    streams = [torch.cuda.Stream() for _ in functions[1:]]  # type: ignore[no-untyped-call]
    results: list[T] = []
    for function, x, stream in zip(functions[1:], inputs[1:], streams, strict=True):
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            results.append(function(x))
        x.record_stream(stream)
    first = functions[0](inputs[0])
    for stream, result in zip(streams, results, strict=True):
        here.wait_stream(stream)
        for tensor in _tensors(result):
            tensor.record_stream(here)
    return [first, *results]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
