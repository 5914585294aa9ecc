"""Solvers: the price of a step over the bare map, and the way to the same residual, side by side with torchdeq."""

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kerneq.bench.memory import peak_memory
from kerneq.bench.problems import conv, dense
from kerneq.bench.table import Result
from kerneq.bench.timing import Work, alternate, effort
from kerneq.cells.base import AbstractKernelCell
from kerneq.equation import AbstractEquation, Evaluation
from kerneq.solvers import Anderson, Broyden, Picard, Proximal, solve
from kerneq.solvers.base import AbstractSolver
from kerneq.solvers.loop import relative_residual

OURS: dict[str, AbstractSolver[Any]] = {
    "Picard": Picard(),
    "Proximal, bare": Proximal(memory=0),
    "Proximal": Proximal(),
    "Anderson(5)": Anderson(5),
    "Broyden(10)": Broyden(10),
}
THEIRS = ("fixed_point_iter", "anderson", "broyden")  # torchdeq's, with its own settings
STEPS = 12
SLACK = 1.5  # torchdeq returns f of the point it measured, whose own residual may be a little above the tolerance
Found = tuple[Tensor, int]  # what a solver returned, and the evaluations it took
Run = Callable[[], Found]


def bench_solvers(device: torch.device, quick: bool) -> Iterator[Result]:
    batch = 256 if device.type == "cuda" else (4 if quick else 8)
    for norm in (1.0, 2.0):
        for name, (cell, x) in (("dense", dense(device, norm)), ("conv", conv(device, norm, batch))):
            yield _one(name, norm, cell, x, device, tol=1e-5, quick=quick)


def _one(
    name: str, norm: float, cell: AbstractKernelCell, x: Tensor, device: torch.device, tol: float, quick: bool
) -> Result:
    with torch.no_grad():
        f = cell.bind(x)
    z0 = cell.initial(f)
    per_step, to_tol = _runs(f, z0, STEPS, 1e-12), _runs(f, z0, 200, tol)
    rounds, budget = effort(device, quick)
    step_times = alternate({"bare f": _bare(f, z0), **per_step}, device, rounds, budget)
    full_times = alternate(dict(to_tol), device, rounds, budget)
    bare = step_times["bare f"].seconds / STEPS
    with torch.no_grad():
        found = {key: run() for key, run in to_tol.items()}
        residuals = {key: _residual(f, value) for key, (value, _) in found.items()}
    reached = {key for key, residual in residuals.items() if residual <= SLACK * tol}
    peers = [full_times[key].seconds for key in reached if key.startswith("torchdeq")]
    rows = []
    for key, run in to_tol.items():
        seconds = full_times[key].seconds if key in reached else None
        rows.append(
            {
                "solver": key,
                "step / bare f": step_times[key].seconds / per_step[key]()[1] / bare,
                "evaluations": found[key][1] if seconds else None,
                "time (ms)": 1e3 * seconds if seconds else None,
                "÷ torchdeq's best": seconds / min(peers) if seconds and peers else None,
                "true residual": residuals[key],
                "peak (MiB)": peak_memory(run, device) / 2**20,
            }
        )
    title = f"{name} map, ‖W‖‖W_h‖ = {norm:g} (L = {norm**2:g}), {tuple(z0.shape)}, bare f {1e3 * bare:.2f} ms"
    notes = (
        f"step / bare f: {STEPS} evaluations by the solver over {STEPS} bare ones, both without gradients.",
        f"evaluations, time: to a true residual of {SLACK:g} × {tol:g} or less in every sample; –: not within 200.",
    )
    return Result("solvers", title, rows, notes)


def _bare(f: Callable[[Tensor], Tensor], z0: Tensor) -> Work:
    @torch.no_grad()
    def work() -> None:
        z = z0
        for _ in range(STEPS):
            z = f(z)

    return work


def _runs(f: AbstractEquation, z0: Tensor, steps: int, tol: float) -> dict[str, Run]:
    """Every solver, ours and theirs, on the same equation."""
    runs: dict[str, Run] = {name: partial(_ours, f, z0, solver, steps, tol) for name, solver in OURS.items()}
    if importlib.util.find_spec("torchdeq") is not None:
        runs |= {f"torchdeq {name}": partial(_theirs, f, z0, name, steps, tol) for name in THEIRS}
    return runs


def _ours(f: AbstractEquation, z0: Tensor, solver: AbstractSolver[Any], steps: int, tol: float) -> Found:
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


def _residual(f: AbstractEquation, z: Tensor) -> float:
    residual, _ = relative_residual(Evaluation(z, f(z)))
    return float(residual.max())
