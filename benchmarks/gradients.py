"""Gradient rules: how far each is from the gradient of the equilibrium, and what it costs, for a function."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import kerneq as kq
from kerneq.gradients import AbstractGradient, Implicit, Neumann, Phantom, Point, Reversible, Shine, Unrolled
from kerneq.solution import Limits
from kerneq.solvers.loops import find_point

from .measure import Setup, measure_peak_memory
from .page import fill, format_table
from .results import BenchmarkError, Result

RATES = (0.6, 0.8, 0.95)  # by which f contracts
UNIT = Phantom(1, 1.0)  # one evaluation of f with its gradient: the unit of work
RULES: tuple[AbstractGradient, ...] = (
    Implicit(tol=1e-6),
    Implicit(tol=1e-3),
    Neumann(0),
    Neumann(5),
    Neumann(20),
    UNIT,
    Phantom(5),
    Phantom(20),
    Shine(),
    Shine(5),
    Unrolled(5),
    Unrolled(20),
    Reversible(5),
    Reversible(20),
    Reversible(40, 0.5),
)


def bench_gradients(setup: Setup) -> Iterator[Result]:
    """Every gradient rule at the equilibrium of a tanh layer: its error, its work and its memory."""
    if setup.cuda:
        raise BenchmarkError("these errors are those of float64: give --device cpu.")
    for rate in RATES[1:2] if setup.quick else RATES:
        yield _measure(rate, setup)


def _measure(rate: float, setup: Setup) -> Result:
    torch.manual_seed(0)
    samples, size = 64, 128
    layer, x = nn.Linear(size, size, bias=False).double(), torch.randn(samples, size).double() / 4
    nn.init.orthogonal_(layer.weight, rate)
    wanted = torch.rand(samples, size).double()

    def f(z: Tensor) -> Tensor:
        return torch.tanh(layer(z)) + x

    start, known = torch.zeros_like(x), kq.maps.as_map(f)
    found, _ = find_point(known, start, kq.solvers.Anderson(), Limits(1e-12, 500))
    _, learnt = find_point(known, start, kq.solvers.Broyden(memory=60), Limits(1e-6, 200))

    def differentiate(rule: AbstractGradient) -> Tensor:
        at = learnt if isinstance(rule, Shine) else Point(found.value)
        loss = (rule.attach(known, at).z - wanted).square().sum()
        return torch.autograd.grad(loss, layer.weight)[0]

    truth = differentiate(Unrolled(steps=400))  # backpropagation through a long solve, at a price no training could pay
    unit, rows = count_flops(partial(differentiate, UNIT)), []
    for rule in RULES:
        setup.progress(f"contraction {rate}: {name_rule(rule)}")
        error = (differentiate(rule) - truth).norm() / truth.norm()
        work = count_flops(partial(differentiate, rule)) / unit
        held = measure_peak_memory(partial(differentiate, rule), setup.device) / 2**20
        rows.append({"rule": name_rule(rule), "error": float(error), "work": work, "memory (MiB)": held})
    notes = (
        f"tanh(Wz) + x of {size} numbers and {samples} samples, float64, W orthogonal times {rate}.",
        "error: of the gradient with respect to W of a squared distance, relative; that of 400 unrolled steps is true.",
        f"work: multiplications and additions in matrix products, in units of {name_rule(UNIT)}, one evaluation of f "
        "with its gradient.",
        "The solve comes before for all but Unrolled and Reversible, which make their own; Shine's is by Broyden.",
    )
    return Result("gradients", f"Gradient rules where f contracts by {rate}", rows, notes, {"table": f"{rate}"})


def count_flops(call: Callable[[], object]) -> int:
    """Return the multiplications and additions in all matrix products of a call."""
    with Products() as products:  # type: ignore[no-untyped-call]
        call()
    return products.flops


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts matrix products. (`FlopCounterMode` fails where a backward pass makes another.)"""

    flops = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if function in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            self.flops += 2 * arguments[0].numel() * arguments[1].shape[-1]
        return function(*arguments, **(named or {}))


def name_rule(rule: AbstractGradient) -> str:
    """Return a rule as one writes it, without what stays at its default."""
    first, *rest = vars(rule).values() if not isinstance(rule, Implicit) else (rule.tol,)
    return f"{type(rule).__name__}({', '.join(f'{value:g}' for value in (first, *rest[:1]))})"


def make_table(record: Path) -> str:
    """Return the table of the docs: errors at each contraction, work and memory at the middle one."""
    results = json.loads(record.read_text(encoding="utf-8"))["results"]
    middle = results[len(results) // 2]["rows"]
    columns = ["rule", *[f"error at {result['asked']['table']}" for result in results], "work", "memory (MiB)"]
    rows = []
    for place, row in enumerate(middle):
        errors = [f"{result['rows'][place]['error']:.1e}" for result in results]
        rows.append([f"`{row['rule']}`", *errors, row["work"], row["memory (MiB)"]])
    return format_table(rows, columns)


def write_gradients(record: Path, page: Path) -> None:
    """Fill the table of gradients in a page of the docs from the record."""
    text = page.read_text(encoding="utf-8")
    page.write_text(fill(text, {"gradients-cpu": make_table(record)}, page), encoding="utf-8")
