"""`solve`: the one loop that runs every solver."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ..equation import AbstractEquation, AbstractMap, Evaluation
from ..fused.residual import relative_residual
from ..solution import (
    OnFailure,
    Solution,
    check_limits,
    check_on_failure,
    per_sample,
    settle,
    take_samples,
)
from .base import AbstractSolver, Map, check_image, check_start, evaluate, looks, restrict
from .features import InFeatures, solve_in_features
from .ledger import Ledger, gather

SHRINK = 0.25  # finished samples leave the computation once they are this share of it


def solve(
    f: Map,
    z0: Tensor | None,
    solver: AbstractSolver[Any] | InFeatures,
    *,
    tol: float = 1e-3,
    max_steps: int = 50,
    check_every: int | None = None,
    on_failure: OnFailure = "return",
) -> Solution:
    """Look for z = f(z), each sample on its own, from z0, with at most `max_steps` evaluations of f.

    A sample stops at the first look at which its residual is at most `tol`; its value is the very point whose
    residual is reported. One that runs out of steps returns its best point, moved one step on where the solver is
    `steady`. The residual is looked at every `check_every` steps: by default each step on a CPU and every fourth on
    a GPU, where a look waits for the device. With `check_every >= max_steps` nothing waits: a fixed number of
    steps, fit for `torch.export` and CUDA graphs, whose last iterate is the value. For the equation of a cell z0 may be
    None: z = 0, whose evaluation needs no Wz.
    """
    check_limits(tol, max_steps)
    check_on_failure(on_failure)
    with torch.no_grad():
        if isinstance(solver, InFeatures):
            ledger, value = solve_in_features(f, z0, solver, tol, max_steps, check_every, solve)
        else:
            ledger, value = _solve(f, _first(f, z0, solver), solver, tol, max_steps, check_every)
    gap, residual, steps, codes = (
        t.to(value.device) for t in (ledger.gap, ledger.residual, ledger.steps, ledger.codes)
    )
    return settle(Solution(value, residual, steps, codes, tol, _error_bound(f, gap)), on_failure)


def _solve(
    f: Map, at: Evaluation, solver: AbstractSolver[Any], tol: float, max_steps: int, check_every: int | None
) -> tuple[Ledger, Tensor]:
    stride = looks(check_every, at.z)
    if stride < max_steps:
        return _iterate(f, at, solver, tol, max_steps, stride)
    at, value = _march(f, at, solver, max_steps)
    return Ledger.single(max_steps, *relative_residual(at), tol), value


@torch.no_grad()
def advance(f: Map, z0: Tensor, solver: AbstractSolver[Any], steps: int) -> Tensor:
    """The value `solve` would return after so many steps, for callers who do not ask how good it is."""
    return _march(f, _first(f, z0, solver), solver, steps)[1]


def _march(f: Map, at: Evaluation, solver: AbstractSolver[Any], steps: int) -> tuple[Evaluation, Tensor]:
    """A fixed number of steps without a look at any number: the last evaluation, and the last iterate."""
    memory = solver.init(f, at.z)
    for _ in range(1, steps):
        z, memory = _step(solver, at, memory)
        at = evaluate(f, z, solver)
    last = _step(solver, at, memory)[0] if solver.steady or steps == 1 else at.z
    return at, last


def _step(solver: AbstractSolver[Any], at: Evaluation, memory: Any) -> tuple[Tensor, Any]:
    with torch.autocast(at.z.device.type, enabled=False):  # for f only, not for the solver's small systems
        return solver.step(at, memory)


def _iterate(
    f: Map, at: Evaluation, solver: AbstractSolver[Any], tol: float, max_steps: int, check_every: int
) -> tuple[Ledger, Tensor]:
    """Step until every sample has finished. The ledger is on the host, where reading it is free."""
    if at.z.stride() != at.image.stride():
        at = dataclasses.replace(at, z=torch.empty_like(at.image).copy_(at.z))  # it may become a value
    memory = solver.init(f, at.z)
    ledger = Ledger.open(len(at.z), tol, at.image.dtype)
    pages: list[Ledger] = []  # of samples that have left the computation
    values: list[Tensor] = []
    z = best = at.z
    for step in range(1, max_steps + 1):
        if step > 1:
            at = evaluate(f, z, solver)
        better = None
        if step % check_every == 0 or step == max_steps:
            better = _look(ledger, step, at)
            if bool(ledger.finished.all()):
                best = _pick(better, at.z, best)
                break
        answer = at.z
        if step < max_steps or solver.steady or step == 1:
            z, memory = _step(solver, at, memory)
            answer = z if solver.steady or step == 1 else at.z
        if better is None:
            continue
        best = _pick(better, _pick(ledger.finished, at.z, answer), best)
        if isinstance(f, AbstractMap) and SHRINK * len(best) <= int(ledger.finished.sum()):
            done, keep = ledger.finished.nonzero().flatten(), (~ledger.finished).nonzero().flatten()
            pages.append(ledger.select(done))
            values.append(take_samples(best, done.to(best.device)))
            index = keep.to(best.device)
            f, memory, ledger = f.rows(index), restrict(memory, index), ledger.select(keep)
            z, best = take_samples(z, index), take_samples(best, index)
    return gather([*pages, ledger], [*values, best])


def _first(f: Map, z0: Tensor | None, solver: AbstractSolver[Any]) -> Evaluation:
    """The evaluation at z0, which settles the dtype of the iterates: that of f, which autocast may choose."""
    if z0 is None:
        if not isinstance(f, AbstractEquation):
            raise TypeError(f"`z0` may be None only for the equation of a cell, got {type(f).__name__}.")
        return f.evaluate_zero(solver.needs_drive, solver.needs_energy)
    check_start(z0)
    at = evaluate(f, z0, solver)
    check_image(z0, at.image)
    return dataclasses.replace(at, z=z0.to(at.image.dtype))


def _look(ledger: Ledger, step: int, at: Evaluation) -> Tensor:
    better: Tensor = ledger.observe(step, *relative_residual(at), at.energy, at.rounding)
    return better


def _pick(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Rows of `new` where the mask holds, else of `old`; without touching the data where all rows agree."""
    if bool(mask.all()):
        return new
    if not bool(mask.any()):
        return old
    return torch.where(per_sample(mask.to(new.device), new), new, old)


def _error_bound(f: Map, gap: Tensor) -> Tensor | None:
    """‖value − z*‖ ≤ (1 + L/μ)‖f(z) − z‖ where E is μ-strongly convex (docs/facts.md, fact 4), else infinite."""
    if not isinstance(f, AbstractEquation):
        return None
    return torch.where(f.convexity > 0, (1 + f.bound / f.convexity) * gap, torch.inf)
