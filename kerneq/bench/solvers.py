"""Solvers: the price of a step over the bare map, and the way to the same residual, side by side with torchdeq."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kerneq.bench.memory import peak_memory
from kerneq.bench.peers import OURS, Found, Run, captured, fewest, ours, residual_of, runs, try_run
from kerneq.bench.problems import PRECISION, conv, dense
from kerneq.bench.table import Result
from kerneq.bench.timing import Bench, Timing, Work, alternate
from kerneq.equation import AbstractEquation

STEPS = {False: 12, True: 40}  # evaluations whose price is measured, eager and captured
LIMITS = {1e-3: 50, 1e-5: 200}  # evaluations allowed on the way to a residual
SLACK = 1.5  # torchdeq returns f of the point it measured, whose own residual may be a little above the tolerance


@dataclasses.dataclass(frozen=True)
class Problem:
    name: str
    norm: float
    f: AbstractEquation
    z0: Tensor

    def __str__(self) -> str:
        return f"{self.name} map, L = {self.norm**2:g}, {' × '.join(map(str, self.z0.shape))}"

    @property
    def asked(self) -> dict[str, Any]:
        return {"map": self.name, "L": self.norm**2, "batch": len(self.z0)}


def bench_solvers(bench: Bench) -> Iterator[Result]:
    problems = list(_problems(bench))
    for problem in problems:
        yield _price(problem, bench)
        for tol in list(LIMITS)[:1] if bench.quick else LIMITS:
            yield _way(problem, bench, tol)


def _problems(bench: Bench) -> Iterator[Problem]:
    batch = 128 if bench.cuda else (2 if bench.quick else 8)
    for norm in (2.0,) if bench.quick else (1.0, 2.0):
        made = {
            "dense": dense(bench.device, norm, 8 if bench.quick else 256),
            "conv": conv(bench.device, norm, batch, 8 if bench.quick else 32),
        }
        for name, (cell, x) in made.items():
            with torch.no_grad():
                f = cell.bind(x)
            yield Problem(name, norm, f, cell.initial(f))


def _price(problem: Problem, bench: Bench) -> Result:
    """A fixed number of steps over as many bare evaluations: launched one by one, and as CUDA graphs."""
    f, z0 = problem.f, problem.z0
    works: dict[str, Work] = {"bare f": partial(_bare, f, z0, STEPS[False])}
    counts = {"bare f": STEPS[False]}
    for name, run in runs(f, z0, STEPS[False], 1e-12).items():
        got = try_run(run)
        if got is not None:
            works[name], counts[name] = run, got[1]
    each = _each(alternate(works, bench, f"{problem}, a step"), counts)
    in_graph: dict[str, float] = {}
    failures: tuple[str, ...] = ()
    if bench.cuda:
        blind = {name: partial(ours, f, z0, solver, STEPS[True]) for name, solver in OURS.items()}
        graphs, failures = captured({"bare f": partial(_bare, f, z0, STEPS[True]), **blind})
        in_graph = _each(alternate(graphs, bench, f"{problem}, a step captured"), dict.fromkeys(graphs, STEPS[True]))
    rows = []
    for name, seconds in each.items():
        row: dict[str, Any] = {"solver": name, "step (ms)": 1e3 * seconds, "÷ bare f": seconds / each["bare f"]}
        if bench.cuda:
            inside = in_graph.get(name)
            row["captured (ms)"] = 1e3 * inside if inside else None
            row["captured ÷ bare f captured"] = inside / in_graph["bare f"] if inside and "bare f" in in_graph else None
        rows.append(row)
    notes = [f"A step: one of {STEPS[False]} evaluations by the solver, looks at the residual included, no gradients."]
    if bench.cuda:
        notes.append(
            f"captured: one of {STEPS[True]} steps in a CUDA graph, where nothing looks; torchdeq always does."
        )
    asked = problem.asked | {"table": "step"}
    return Result("solvers", f"Price of a step: {problem}", rows, (*notes, PRECISION, *failures), asked)


def _way(problem: Problem, bench: Bench, tol: float) -> Result:
    """Evaluations, time and memory to the same residual."""
    f, z0 = problem.f, problem.z0
    what = f"{problem}, to {tol:g}"
    found: dict[str, tuple[Run, Found, float]] = {}  # by those that ran
    for name, run in runs(f, z0, LIMITS[tol], tol).items():
        bench.say(f"{what}: {name}")
        got = try_run(run)
        if got is not None:
            found[name] = (run, got, residual_of(f, got[0]))
    reached = [name for name, (_, _, residual) in found.items() if residual <= SLACK * tol]
    works: dict[str, Work] = {name: found[name][0] for name in reached}
    times = alternate(works, bench, what)
    peaks = {name: peak_memory(work, bench.device) for name, work in works.items()}
    in_graph: dict[str, Timing] = {}
    failures: tuple[str, ...] = ()
    if bench.cuda:
        steps = {n: fewest(f, z0, OURS[n], found[n][1][1], tol) for n in reached if n in OURS}
        blind = {n: partial(ours, f, z0, OURS[n], count, tol) for n, count in steps.items() if count}
        graphs, failures = captured(blind)
        in_graph = alternate(graphs, bench, f"{what}, captured")
    best = min((n for n in reached if n not in OURS), key=lambda n: times[n].seconds, default=None)
    rows = []
    for name in runs(f, z0, 1, tol):
        _, got, residual = found.get(name, (None, None, None))
        mine, inside = times.get(name), in_graph.get(name)
        row: dict[str, Any] = {
            "solver": name,
            "evaluations": got[1] if got and mine else None,
            "time (ms)": 1e3 * mine.seconds if mine else None,
            "÷ torchdeq's best": _ratio(mine, times, best),
        }
        if bench.cuda:
            row["captured (ms)"] = 1e3 * inside.seconds if inside else None
            row["captured ÷ torchdeq's best"] = _ratio(inside, times, best)
        row["true residual"] = residual if residual is not None and math.isfinite(residual) else None
        row["peak (MiB)"] = peaks[name] / 2**20 if mine else None
        row["peak ÷ torchdeq's best"] = peaks[name] / peaks[best] if mine and best else None
        rows.append(row)
    notes = [
        f"To a true residual of {SLACK:g} × {tol:g} or less in every sample; –: not within {LIMITS[tol]} evaluations.",
        "torchdeq's best: the fastest of its solvers that got there; its time and its peak.",
        PRECISION,
    ]
    if bench.cuda:
        notes.insert(1, "captured: the fewest steps that reach it, known beforehand, as one CUDA graph.")
    title = f"To a residual of {tol:g}: {problem}"
    return Result("solvers", title, rows, (*notes, *failures), problem.asked | {"table": "residual", "tol": tol})


def _each(times: dict[str, Timing], counts: dict[str, int]) -> dict[str, float]:
    return {name: timing.seconds / counts[name] for name, timing in times.items()}


def _ratio(mine: Timing | None, times: dict[str, Timing], best: str | None) -> float | None:
    return mine.seconds / times[best].seconds if mine and best else None


@torch.no_grad()
def _bare(f: Callable[[Tensor], Tensor], z0: Tensor, steps: int) -> Tensor:
    z = z0
    for _ in range(steps):
        z = f(z)
    return z
