"""Branches that do not depend on each other, on streams of their own: on a GPU the small ones hide behind the large."""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..solution import Solution

Result = tuple[Tensor, Solution]


def run_branches(branches: Sequence[Callable[[Tensor], Result]], inputs: list[Tensor], overlap: bool) -> list[Result]:
    """Each branch on its input; the first on the current stream and, with `overlap` on a GPU, the others beside it."""
    if not overlap or not inputs[0].is_cuda or len(branches) == 1:
        return [branch(x) for branch, x in zip(branches, inputs, strict=True)]
    here = torch.cuda.current_stream()
    streams = [torch.cuda.Stream() for _ in branches[1:]]  # type: ignore[no-untyped-call]
    results: list[Result] = []
    for branch, x, stream in zip(branches[1:], inputs[1:], streams, strict=True):
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            results.append(branch(x))
        x.record_stream(stream)
    first: Result = branches[0](inputs[0])
    for stream, (z, solution) in zip(streams, results, strict=True):
        here.wait_stream(stream)
        parts = (getattr(solution, field.name) for field in dataclasses.fields(solution))
        for tensor in (z, *parts):
            if isinstance(tensor, Tensor):
                tensor.record_stream(here)
    return [first, *results]
