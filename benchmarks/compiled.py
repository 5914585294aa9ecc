"""Layers of a fixed number of steps as one program of torch.compile, beside the same layers as they are."""

import time
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

import kerneq as kq

from .measure import SPREAD, Call, Setup, columns, compare
from .results import Result

STEPS = 4
FIXED = kq.gradients.Implicit(tol=1e-3, max_steps=STEPS, check_every=STEPS, on_failure="return")


def bench_compiled(setup: Setup) -> Iterator[Result]:
    """Fixed-step layers by `torch.compile(fullgraph=True)`, beside the same layers as they are."""
    width, side = (32, 8) if setup.quick else (64, 32)
    gaussian = kq.kernels.Gaussian(0.2, split=16, hidden=32)
    problems = {
        "dense, 8 states of 128": (
            kq.cells.DenseCell(gaussian, inputs=64, state=128, features=64),
            torch.randn(8, 64),
        ),
        f"convolutional, 8 states of {width} × {side} × {side}": (
            kq.cells.ConvCell(kq.kernels.Gaussian(0.2), inputs=16, state=width, features=width // 2),
            torch.randn(8, 16, side, side),
        ),
    }
    rows = []
    for problem, (cell, x) in problems.items():
        for name, solver in (("Picard", kq.solvers.Picard()), ("Proximal", kq.solvers.Proximal())):
            setup.progress(f"{problem}, {name}: compiling")
            layer = kq.Equilibrium(cell, solver=solver, gradient=FIXED, max_steps=STEPS, check_every=STEPS)
            rows.append({"layer": f"{name}, {problem}"} | _measure(layer.to(setup.device), x.to(setup.device), setup))
    notes = (
        f"Predictions by {STEPS} steps in eval(), without gradients; compiled is `torch.compile(layer, "
        "fullgraph=True)` with PyTorch's usual backend.",
        "off by: the largest difference of an entry of z.",
        SPREAD,
    )
    yield Result("compiled", "Layers of fixed steps, compiled", rows, notes, {"table": "compiled", "batch": 8})


@torch.no_grad()
def _measure(layer: kq.Equilibrium, x: Tensor, setup: Setup) -> dict[str, float | None]:
    layer.eval()
    program, started = torch.compile(layer, fullgraph=True), time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what PyTorch says about itself while it compiles
        value = layer(x).value  # first: ‖W‖ is measured here, and the program holds it
        error = (program(x).value - value).abs().max()
    seconds = time.perf_counter() - started
    calls: dict[str, Call] = {"eager": lambda: layer(x), "compiled": lambda: program(x)}
    costs, _ = compare(calls, setup, "layer")
    return {
        **columns(costs["eager"].eager),
        "compiled (ms)": 1e3 * costs["compiled"].eager.seconds,
        "compiled ÷ eager": costs["compiled"].eager.seconds / costs["eager"].eager.seconds,
        "off by": float(error),
        "to compile (s)": seconds,
    }
