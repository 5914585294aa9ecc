"""How much Python one pass through a layer runs: calls, functions, and changes from one file to another."""

import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import FrameType

import torch

import kerneq as kq

from .measure import Call, Setup
from .results import Result

ROOT = str(Path(kq.__file__).parent)
STEPS = 3
NOTES = (
    "calls: of functions written in kerneq; lambdas and comprehensions are not counted, nor is code of torch.",
    "functions, files: the different ones among them. changes of file: calls in another file than the call before.",
    "On a GPU the backward pass runs in a thread of its own, which is not counted.",
)
Function = tuple[str, int]  # its file and its first line


def bench_calls(setup: Setup) -> Iterator[Result]:
    """The Python calls of one default layer with three solver steps."""
    torch.manual_seed(0)
    cell = kq.cells.ConvCell(kq.kernels.Gaussian(), inputs=16, state=64, features=32)
    layer = kq.Equilibrium(cell, max_steps=STEPS).to(setup.device).train()
    x = torch.randn(8, 16, 8, 8, device=setup.device)

    def backward() -> None:
        torch.autograd.backward(layer(x).value.sum())

    rows = []
    for name, call in {"forward": lambda: layer(x), "forward + backward": backward}.items():
        setup.progress(name)
        call()  # what is done once, such as settling the norm of W
        calls = record_calls(call)
        row = {"pass": name, "steps": int(layer(x).steps.max()), "calls": len(calls), "functions": len(set(calls))}
        row["changes of file"] = sum(one[0] != other[0] for one, other in pairwise(calls))
        rows.append(row | {"files": len({file for file, _ in calls})})
    yield Result("calls", f"One default layer, at most {STEPS} solver steps", rows, NOTES, {"table": "calls"})


def record_calls(call: Call) -> list[Function]:
    """The functions of kerneq that one call runs, in order."""
    found: list[Function] = []

    def observe(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT) and not code.co_name.startswith("<"):
            found.append((code.co_filename, code.co_firstlineno))

    sys.setprofile(observe)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found
