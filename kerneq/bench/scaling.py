"""How time and memory of one layer, forward and backward, grow with batch, picture size, steps and width."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kerneq.bench.limits import flops_of_an_image, in_words, limits
from kerneq.bench.memory import peak_memory
from kerneq.bench.peers import captured
from kerneq.bench.table import Result
from kerneq.bench.timing import Bench, Work, alternate, in_layout
from kerneq.cells import ConvCell
from kerneq.cells.base import OBSERVED
from kerneq.equilibrium import Equilibrium
from kerneq.gradients import Implicit, InFeatures
from kerneq.kernels import Gaussian
from kerneq.solvers import Picard

GRID = {"batch": (1, 4, 16, 64, 256, 1024), "picture": (16, 32, 64, 128, 256), "steps": (2, 4, 8, 16, 32)}
WIDTHS = {True: (64, 128, 256, 512), False: (32, 64, 128, 256)}  # on a GPU or not
NOTES = (
    "÷ bare f: over 2 × steps bare evaluations of the map, without gradients, run likewise (captured on a GPU).",
    "∝ n^: the exponent of growth from the row above. % of matmul: rate of the convolutions over that limit.",
)


def bench_scaling(bench: Bench) -> Iterator[Result]:
    best = limits(bench.device, bench.quick)
    base = {"batch": 64 if bench.cuda else 4, "picture": 32, "steps": 4, "width": 256 if bench.cuda else 32}
    if bench.quick:
        base |= {"picture": 8, "width": 32}
    for quantity, values in (GRID | {"width": WIDTHS[bench.cuda]}).items():
        rows: list[dict[str, Any]] = []
        failures: tuple[str, ...] = ()
        for value in values[:2] if bench.quick else values:
            found, missed = _point(bench, base | {quantity: value}, best["matmul"], f"{quantity} {value}")
            rows.append(_grown({quantity: value} | found, rows[-1] if rows else None, quantity))
            failures += missed
        fixed = ", ".join(f"{name} {value}" for name, value in base.items() if name != quantity)
        precision = "bfloat16" if bench.cuda else "float32"
        title = f"Forward + backward of one layer by {quantity}; {fixed}; {precision}"
        notes = (*NOTES, in_words(best, bench.device), *failures)
        yield Result("scaling", title, rows, notes, {"table": "growth", "by": quantity} | base)


def _point(bench: Bench, sizes: dict[str, int], matmul: float, what: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Time and memory at one point of the grid; on a GPU launched one by one, and captured."""
    step, bare = _works(bench.device, sizes["batch"], sizes["picture"], sizes["steps"], sizes["width"])
    step()  # settles what is settled once
    peak = peak_memory(step, bench.device)
    failures: tuple[str, ...] = ()
    works: dict[str, Work] = {"eager": step, "bare": bare}
    if bench.cuda:
        graphs, failures = captured({"captured": step, "bare captured": bare})
        works |= graphs
    times = {name: timing.seconds for name, timing in alternate(works, bench, what).items()}
    best, bare_time = times.get("captured", times["eager"]), times.get("bare captured", times["bare"])
    row: dict[str, Any] = {"time (ms)": 1e3 * times["eager"]}
    if bench.cuda:
        row["captured (ms)"] = 1e3 * times["captured"] if "captured" in times else None
    row["÷ bare f"] = best / bare_time
    row["% of matmul"] = 100 * _flops(sizes) / best / matmul
    row["peak (MiB)"] = peak / 2**20
    return row, failures


def _flops(sizes: dict[str, int]) -> float:
    """Of the convolutions: those of an image of 8 × 8 times images and pixels."""
    return _flops_of_8_by_8(sizes["steps"], sizes["width"]) * sizes["batch"] * (sizes["picture"] / 8) ** 2


@functools.cache
def _flops_of_8_by_8(steps: int, width: int) -> int:
    """By a twin on the CPU."""
    cpu = torch.device("cpu")
    return flops_of_an_image(lambda batch: _works(cpu, batch, 8, steps, width)[0], OBSERVED + 1)


def _grown(row: dict[str, Any], last: dict[str, Any] | None, by: str) -> dict[str, Any]:
    """The row with the exponents of growth since the last one."""
    grown: dict[str, Any] = {}
    for column, value in row.items():
        grown[column] = value
        if column in ("time (ms)", "captured (ms)", "peak (MiB)"):
            known = last is not None and last[column] and value
            ratio = math.log(row[by] / last[by]) if last is not None else 1.0
            grown[f"{column.split()[0]} ∝ n^"] = math.log(value / last[column]) / ratio if last and known else None
    return grown


def _works(
    device: torch.device, batch: int, picture: int, steps: int, width: int
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """The layer forward and backward, and the bare evaluations it is compared with."""
    torch.manual_seed(0)
    cell = ConvCell(Gaussian(0.2), inputs=width // 4, state=width, features=width // 4).to(device)
    backward = Implicit(InFeatures(Picard()), 1e-3, steps, steps, on_failure="return")
    equilibrium = Equilibrium(cell, solver=Picard(), gradient=backward, max_steps=steps, check_every=steps)
    layer = in_layout(equilibrium.train(), channels_last=True)
    x = torch.randn(batch, width // 4, picture, picture, device=device).to(memory_format=torch.channels_last)

    def step() -> Tensor:
        layer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            value: Tensor = layer(x).value
        torch.autograd.backward(value, torch.ones_like(value))
        return value.detach()

    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        f = cell.bind(x)
        start = f(cell.initial(f))  # in the dtype of the iterates

    @torch.no_grad()
    def bare() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            z = start
            for _ in range(2 * steps):
                z = f(z)
            return z

    return step, bare
