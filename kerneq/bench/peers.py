"""Solvers on one equation, ours and torchdeq's: what each found, and in how many evaluations."""

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kerneq.bench.timing import capture
from kerneq.equation import AbstractEquation
from kerneq.solvers import AbstractSolver, Anderson, Broyden, InFeatures, Picard, Proximal, solve

Solver = AbstractSolver[Any] | InFeatures
OURS: dict[str, Solver] = {
    "Picard": Picard(),
    "Proximal, bare": Proximal(memory=0),
    "Proximal": Proximal(),
    "Anderson(5)": Anderson(5),
    "Anderson(5), in features": InFeatures(Anderson(5)),
    "Broyden(10)": Broyden(10),
}
THEIRS = ("fixed_point_iter", "anderson", "broyden")  # torchdeq's, with its own settings
Found = tuple[Tensor, int]  # what a solver returned, and the evaluations it took
Run = Callable[[], Found]


def runs(f: AbstractEquation, z0: Tensor, steps: int, tol: float) -> dict[str, Run]:
    """Every solver, ours and theirs, on the same equation."""
    made: dict[str, Run] = {name: partial(_look, f, z0, solver, steps, tol) for name, solver in OURS.items()}
    if importlib.util.find_spec("torchdeq") is not None:
        made |= {f"torchdeq {name}": partial(_theirs, f, z0, name, steps, tol) for name in THEIRS}
    return made


def try_run(run: Run) -> Found | None:
    """What the solver found; None if the card's memory or its small systems were not enough for it."""
    try:
        return run()
    except (torch.OutOfMemoryError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
        return None


def ours(f: AbstractEquation, z0: Tensor, solver: Solver, steps: int, tol: float = 1e-3) -> Tensor:
    """A fixed number of steps at which nothing looks, so that they can be captured."""
    return solve(f, z0, solver, tol=tol, max_steps=steps, check_every=steps).value


def fewest(f: AbstractEquation, z0: Tensor, solver: Solver, most: int, tol: float) -> int | None:
    """The fewest steps after which a solve that never looked has reached `tol` in every sample."""
    reaching = (n for n in range(1, most + 1) if residual_of(f, ours(f, z0, solver, n, tol)) <= tol)
    return next(reaching, None)


def captured(works: Mapping[str, Callable[[], Tensor]]) -> tuple[dict[str, Callable[[], Tensor]], tuple[str, ...]]:
    """Those works that can be a CUDA graph, as one each; for the others a sentence that says why not."""
    graphs: dict[str, Callable[[], Tensor]] = {}
    failures: list[str] = []
    for name, work in works.items():
        try:
            graphs[name] = capture(work)
        except RuntimeError as error:  # a fact about the work, and no reason to stop measuring the others
            failures.append(f"{name} was not captured: {str(error).splitlines()[0]}")
    return graphs, tuple(failures)


def residual_of(f: AbstractEquation, z: Tensor) -> float:
    """The largest relative residual in the batch, computed afresh."""
    return float(solve(f, z, Picard(), max_steps=1).residual.max())


def _look(f: AbstractEquation, z0: Tensor, solver: Solver, steps: int, tol: float) -> Found:
    solution = solve(f, z0, solver, tol=tol, max_steps=steps)
    return solution.value, int(solution.steps.max())


def _theirs(f: AbstractEquation, z0: Tensor, name: str, steps: int, tol: float) -> Found:
    from torchdeq.solver import get_solver

    evaluations = 0

    def counted(z: Tensor) -> Tensor:
        nonlocal evaluations
        evaluations += 1
        return f(z)

    with torch.no_grad():
        found = get_solver(name)(counted, z0, max_iter=steps, tol=tol, stop_mode="rel")
    return found[0].view_as(z0), evaluations
