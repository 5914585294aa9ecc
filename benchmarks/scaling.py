"""How time and memory of one layer, forward and backward, grow with batch, picture size, steps and width."""

import functools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import kerneq as kq

from .measure import SPREAD, Setup, columns, compare, count_flops_per_image, measure_limits, store_channels_last
from .results import Result

GRID = {"batch": (1, 4, 16, 64, 256, 1024), "picture": (16, 32, 64, 128, 256), "steps": (2, 4, 8, 16, 32)}
WIDTHS = {True: (64, 128, 256, 512), False: (32, 64, 128, 256)}  # on a GPU or not
NOTES = (
    "÷ bare f: over 2 × steps bare evaluations of the map, without gradients, run in the same way (captured on a GPU).",
    "∝ n^: the exponent of growth from the row above. % of matmul: rate of the convolutions over that limit.",
    SPREAD,
)


def bench_scaling(setup: Setup) -> Iterator[Result]:
    """How the cost and memory of a layer grow with batch, picture size, steps and width."""
    limits = measure_limits(setup)
    base = {"batch": 64 if setup.cuda else 4, "picture": 32, "steps": 4, "width": 256 if setup.cuda else 32}
    if setup.quick:
        base |= {"picture": 8, "width": 32}
    for quantity, values in (GRID | {"width": WIDTHS[setup.cuda]}).items():
        rows: list[dict[str, Any]] = []
        failures: tuple[str, ...] = ()
        for value in values[:2] if setup.quick else values:
            found, failed = _measure_point(base | {quantity: value}, setup, limits.matmul, f"{quantity} {value}")
            rows.append(_add_growth({quantity: value} | found, rows[-1] if rows else None, quantity))
            failures += failed
        fixed = ", ".join(f"{name} {value}" for name, value in base.items() if name != quantity)
        precision = "bfloat16" if setup.cuda else "float32"
        title = f"Forward + backward of one layer by {quantity}; {fixed}; {precision}"
        notes = (*NOTES, str(limits), *failures)
        yield Result("scaling", title, rows, notes, {"table": "growth", "by": quantity} | base)


def _measure_point(
    sizes: dict[str, int], setup: Setup, matmul: float, what: str
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Time and memory at one point of the grid; on a GPU launched one by one, and captured."""
    step, bare = _layer(setup.device, sizes["batch"], sizes["picture"], sizes["steps"], sizes["width"])
    calls = {"layer": step, "bare f": bare}
    costs, failures = compare(calls, setup, what, calls)
    layer = costs["layer"]
    row: dict[str, Any] = columns(layer.eager) | (columns(layer.captured, captured=True) if setup.cuda else {})
    row["÷ bare f"] = layer.best.seconds / costs["bare f"].best.seconds
    row["% of matmul"] = 100 * count_flops(sizes) / layer.best.seconds / matmul
    row["peak (MiB)"] = layer.peak / 2**20
    return row, failures


def count_flops(sizes: dict[str, int]) -> float:
    """Operations of the convolutions: those of an image of 8 × 8 times images and pixels."""
    return _count_flops_of_8_by_8(sizes["steps"], sizes["width"]) * sizes["batch"] * (sizes["picture"] / 8) ** 2


@functools.cache
def _count_flops_of_8_by_8(steps: int, width: int) -> int:
    """Counted on a CPU copy of the layer."""
    cpu = torch.device("cpu")
    return count_flops_per_image(lambda batch: _layer(cpu, batch, 8, steps, width)[0])


def _add_growth(row: dict[str, Any], last: dict[str, Any] | None, by: str) -> dict[str, Any]:
    """The row with the exponents p of growth ∝ nᵖ since the last one."""
    grown: dict[str, Any] = {}
    for column, value in row.items():
        grown[column] = value
        if column in ("time (ms)", "captured (ms)", "peak (MiB)"):
            exponent = None
            if last is not None and last[column] and value:
                exponent = math.log(value / last[column]) / math.log(row[by] / last[by])
            grown[f"{column.split()[0]} ∝ n^"] = exponent
    return grown


def _layer(
    device: torch.device, batch: int, picture: int, steps: int, width: int
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """The layer forward and backward, and the bare evaluations it is compared with."""
    torch.manual_seed(0)
    cell = kq.cells.ConvCell(kq.kernels.Gaussian(0.2), inputs=width // 4, state=width, features=width // 4).to(device)
    in_features = kq.gradients.InFeatures(kq.solvers.Picard())
    gradient = kq.gradients.Implicit(in_features, tol=1e-3, max_steps=steps, check_every=steps, on_failure="return")
    equilibrium = kq.Equilibrium(
        cell, solver=kq.solvers.Picard(), gradient=gradient, max_steps=steps, check_every=steps
    )
    layer = store_channels_last(equilibrium.train())
    x = torch.randn(batch, width // 4, picture, picture, device=device).to(memory_format=torch.channels_last)
    precision = partial(torch.autocast, device.type, torch.bfloat16, enabled=device.type == "cuda")

    def step() -> Tensor:
        layer.zero_grad(set_to_none=True)
        with precision():
            value: Tensor = layer(x).value
        torch.autograd.backward(value, torch.ones_like(value))
        return value.detach()

    with torch.no_grad(), precision():
        f = cell.bind(x)
        start = f.evaluate(None).image  # in the dtype of the iterates

    @torch.no_grad()
    def bare() -> Tensor:
        with precision():
            z = start
            for _ in range(2 * steps):
                z = f(z)
            return z

    return step, bare
