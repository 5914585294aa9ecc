"""Solvers, ours beside torchdeq's: the cost of a step over the bare map, and of reaching the same residual."""

import importlib.util
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import kerneq as kq

from .measure import SPREAD, Call, Setup, columns, compare
from .problems import PRECISION, Problem, conv, dense
from .results import Result, ratio

Solver = kq.solvers.AbstractSolver[Any]
OURS: dict[str, Solver] = {
    "Picard": kq.solvers.Picard(),
    "Proximal, bare": kq.solvers.Proximal(memory=0),
    "Proximal": kq.solvers.Proximal(),
    "Anderson(5)": kq.solvers.Anderson(5),
    "Anderson(5), in features": kq.solvers.InFeatures(kq.solvers.Anderson(5)),
    "Broyden(10)": kq.solvers.Broyden(10),
}
THEIRS = ("fixed_point_iter", "anderson", "broyden")  # torchdeq's, with its own settings
STEPS, CAPTURED_STEPS = 12, 40  # evaluations over which the cost of one is measured
MAX_EVALUATIONS = {1e-3: 50, 1e-5: 200}  # allowed on the way to a residual
SLACK = 1.5  # torchdeq returns f of the point it measured, whose own residual may be a little above the tolerance

Solved = tuple[Tensor, int]  # what a solver returned, and the evaluations it took
Solve = Callable[[], Solved]


def bench_solvers(setup: Setup) -> Iterator[Result]:
    """The cost of a solver's step over the bare map, and of reaching the same residual, beside torchdeq."""
    for problem in _problems(setup):
        yield _measure_cost_of_step(problem, setup)
        for tol in list(MAX_EVALUATIONS)[:1] if setup.quick else MAX_EVALUATIONS:
            yield _measure_time_to_residual(problem, setup, tol)


def _problems(setup: Setup) -> Iterator[Problem]:
    batch = 128 if setup.cuda else (2 if setup.quick else 8)
    for norm in (2.0,) if setup.quick else (1.0, 2.0):
        yield dense(setup.device, norm, 8 if setup.quick else 256)
        yield conv(setup.device, norm, batch, 8 if setup.quick else 32)


def _measure_cost_of_step(problem: Problem, setup: Setup) -> Result:
    """Compare a fixed number of steps with as many bare evaluations: launched one by one, and as CUDA graphs."""
    f, z0 = problem.bind()
    calls: dict[str, Call] = {"bare f": partial(_iterate, f, z0, STEPS)}
    evaluations = {"bare f": STEPS}
    for name, solve in make_solves(f, z0, STEPS, 1e-12).items():
        solved = _try(solve)
        if solved is not None:
            calls[name], evaluations[name] = solve, solved[1]
    fixed = {name: partial(solve_fixed, f, z0, solver, CAPTURED_STEPS) for name, solver in OURS.items()}
    to_capture = {"bare f": partial(_iterate, f, z0, CAPTURED_STEPS), **fixed}
    costs, failures = compare(calls, setup, f"{_title(problem, z0)}, a step", to_capture)
    step = {name: cost.eager.seconds / evaluations[name] for name, cost in costs.items()}
    bare = costs["bare f"].captured
    rows = []
    for name, seconds in step.items():
        row: dict[str, Any] = {"solver": name, "step (ms)": 1e3 * seconds}
        row |= {"spread (%)": 100 * costs[name].eager.spread, "÷ bare f": seconds / step["bare f"]}
        if setup.cuda:
            captured = costs[name].captured
            row["captured (ms)"] = 1e3 * captured.seconds / CAPTURED_STEPS if captured else None
            row["captured spread (%)"] = 100 * captured.spread if captured else None
            row["captured ÷ bare f captured"] = captured.seconds / bare.seconds if captured and bare else None
        rows.append(row)
    notes = [f"A step: one of {STEPS} evaluations by the solver, residual checks included, no gradients.", SPREAD]
    if setup.cuda:
        notes.append(
            f"captured: one of {CAPTURED_STEPS} steps in a CUDA graph, without residual checks; torchdeq always checks."
        )
    title = f"Cost of a step: {_title(problem, z0)}"
    return Result("solvers", title, rows, (*notes, PRECISION, *failures), problem.asked | {"table": "step"})


def _measure_time_to_residual(problem: Problem, setup: Setup, tol: float) -> Result:
    """Measure evaluations, time and memory to the same residual."""
    f, z0 = problem.bind()
    what, limit = f"{_title(problem, z0)}, to {tol:g}", MAX_EVALUATIONS[tol]
    candidates = make_solves(f, z0, limit, tol)
    evaluations: dict[str, int] = {}
    residuals: dict[str, float] = {}
    for name, solve in candidates.items():
        setup.progress(f"{what}: {name}")
        solved = _try(solve)
        if solved is not None:
            evaluations[name], residuals[name] = solved[1], measure_residual(f, solved[0])
    reached = {name: candidates[name] for name, found in residuals.items() if found <= SLACK * tol}
    fixed = {}
    for name in reached:
        steps = find_fewest_steps(f, z0, OURS[name], evaluations[name], tol) if setup.cuda and name in OURS else None
        if steps is not None:
            fixed[name] = partial(solve_fixed, f, z0, OURS[name], steps, tol)
    costs, failures = compare(reached, setup, what, fixed)
    theirs = [cost for name, cost in costs.items() if name not in OURS]
    best = min(theirs, key=lambda cost: cost.eager.seconds, default=None)
    best_time, best_peak = (best.eager.seconds, best.peak) if best else (None, None)
    rows = []
    for name in candidates:
        cost, found = costs.get(name), residuals.get(name)
        row: dict[str, Any] = {
            "solver": name,
            "evaluations": evaluations[name] if cost else None,
            **columns(cost.eager if cost else None),
            "÷ torchdeq's best": ratio(cost.eager.seconds, best_time) if cost else None,
        }
        if setup.cuda:
            captured = cost.captured if cost else None
            row |= columns(captured, captured=True)
            row["captured ÷ torchdeq's best"] = ratio(captured.seconds, best_time) if captured else None
        row["true residual"] = found if found is not None and math.isfinite(found) else None
        row["peak (MiB)"] = cost.peak / 2**20 if cost else None
        row["peak ÷ torchdeq's best"] = ratio(cost.peak, best_peak) if cost else None
        rows.append(row)
    notes = [
        f"To a true residual of {SLACK:g} × {tol:g} or less in every sample; –: not within {limit} evaluations.",
        "evaluations: calls of f by torchdeq, steps of ours; Proximal and in features do the work of up to two more.",
        "torchdeq's best: the fastest of its solvers that got there; its time and its peak.",
        SPREAD,
        PRECISION,
    ]
    if setup.cuda:
        notes.insert(1, "captured: the fewest steps that reach it, known beforehand, as one CUDA graph.")
    title = f"To a residual of {tol:g}: {_title(problem, z0)}"
    return Result("solvers", title, rows, (*notes, *failures), problem.asked | {"table": "residual", "tol": tol})


# Solving one equation, by each solver


def make_solves(f: kq.cells.Equation, z0: Tensor, max_steps: int, tol: float) -> dict[str, Solve]:
    """Every solver, ours and theirs, on the same equation."""
    made: dict[str, Solve] = {name: partial(_solve, f, z0, solver, max_steps, tol) for name, solver in OURS.items()}
    if importlib.util.find_spec("torchdeq") is not None:
        made |= {f"torchdeq {name}": partial(_solve_by_torchdeq, f, z0, name, max_steps, tol) for name in THEIRS}
    return made


def solve_fixed(f: kq.cells.Equation, z0: Tensor, solver: Solver, steps: int, tol: float = 1e-3) -> Tensor:
    """Take a fixed number of steps without residual checks, so that they can be captured."""
    return kq.solve(f, z0, solver, tol=tol, max_steps=steps, check_every=steps).value


def find_fewest_steps(f: kq.cells.Equation, z0: Tensor, solver: Solver, most: int, tol: float) -> int | None:
    """The fewest fixed steps after which every sample has reached `tol`."""
    for steps in range(1, most + 1):
        if measure_residual(f, solve_fixed(f, z0, solver, steps, tol)) <= tol:
            return steps
    return None


def measure_residual(f: kq.cells.Equation, z: Tensor) -> float:
    """The largest relative residual in the batch, computed afresh."""
    return float(kq.solve(f, z, kq.solvers.Picard(), max_steps=1).residual.max())


def _solve(f: kq.cells.Equation, z0: Tensor, solver: Solver, max_steps: int, tol: float) -> Solved:
    solution = kq.solve(f, z0, solver, tol=tol, max_steps=max_steps)
    return solution.value, int(solution.steps.max())


def _solve_by_torchdeq(f: kq.cells.Equation, z0: Tensor, name: str, max_steps: int, tol: float) -> Solved:
    from torchdeq.solver import get_solver

    evaluations = 0

    def counted(z: Tensor) -> Tensor:
        nonlocal evaluations
        evaluations += 1
        return f(z)

    with torch.no_grad():
        found = get_solver(name)(counted, z0, max_iter=max_steps, tol=tol, stop_mode="rel")
    return found[0].view_as(z0), evaluations


def _try(solve: Solve) -> Solved | None:
    """Run a solver; None if memory runs out or one of its linear systems is singular."""
    try:
        return solve()
    except (torch.OutOfMemoryError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
        return None


@torch.no_grad()
def _iterate(f: kq.cells.Equation, z0: Tensor, steps: int) -> Tensor:
    z = z0
    for _ in range(steps):
        z = f(z)
    return z


def _title(problem: Problem, z0: Tensor) -> str:
    return f"{problem.name} map, L = {problem.norm**2:g}, {' × '.join(map(str, z0.shape))}"
