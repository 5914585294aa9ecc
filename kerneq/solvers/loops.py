"""`solve` and its two loops: until each sample has converged, or for a fixed number of steps."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from ..equation import Equation
from ..maps import AbstractMap, Map, Point, as_map
from ..solution import OnFailure, Solution, Status, check_limits, final_codes, report_failure
from ..spaces import AbstractPoint, AbstractSpace, Evaluation, move
from ..tensors import check_kind, per_sample, restrict, take_samples
from .base import AbstractSolver
from .record import SampleRecord

CUDA_STRIDE = 4  # steps between two residual checks on a GPU, where a check waits for the device
SHRINK = 0.25  # finished samples leave the computation once they are this share of it


def solve(
    f: Map,
    z0: Tensor | None,
    solver: AbstractSolver[Any],
    *,
    tol: float = 1e-3,
    max_steps: int = 50,
    check_every: int | None = None,
    on_failure: OnFailure = "return",
) -> Solution:
    """Look for z = f(z), each sample on its own, from z0 (batch, ...), with at most `max_steps` evaluations of f.

    A sample stops at the first residual check that finds at most `tol`; its value is the very point whose residual is
    reported. One that runs out of steps returns its best point, moved one step on where the solver is `steady`. The
    residual is checked every `check_every` steps: by default each step on a CPU and every fourth on a GPU, where a
    check waits for the device. With `check_every >= max_steps` nothing waits: a fixed number of steps, fit for
    `torch.export` and CUDA graphs, whose last iterate is the value. For the equation of a cell z0 may be None: z = 0,
    whose evaluation needs no Wz.
    """
    check_kind("solver", solver, AbstractSolver)
    check_limits(tol, max_steps, check_every, on_failure)
    solution, _ = run_untraced(find_point, as_map(f), z0, solver, tol, max_steps, check_every, on_failure)
    return solution


def run_untraced(run: Callable[..., Any], *arguments: Any) -> Any:
    """Return run(*arguments), which no compiler traces: the loop reads residuals, and what is worth compiling is the
    map inside it. (As a decorator, `disable` would import the compiler, seconds, for everybody.)"""
    if torch.compiler.is_compiling():
        run = torch.compiler.disable(run)  # type: ignore[no-untyped-call]
    return run(*arguments)


def find_point(
    f: AbstractMap,
    z0: Tensor | None,
    solver: AbstractSolver[Any],
    tol: float,
    max_steps: int,
    check_every: int | None,
    on_failure: OnFailure,
) -> tuple[Solution, Point]:
    """Solve z = f(z); return the solution, and its value as a `Point` with what the solve has computed there."""
    solution, gap, point = solve_space(solver.space(f), z0, solver, tol, max_steps, check_every)
    if isinstance(f, Equation):
        solution = dataclasses.replace(solution, error_bound=f.error_bound(gap))
    return report_failure(solution, on_failure), point if isinstance(point, Point) else Point(solution.value)


def solve_space(
    space: AbstractSpace,
    z0: Tensor | None,
    solver: AbstractSolver[Any],
    tol: float,
    max_steps: int,
    check_every: int | None,
) -> tuple[Solution, Tensor, AbstractPoint | None]:
    """Let the solver iterate in this space; return the solution, ‖f(z) − z‖ of each sample, and what is known of its
    value."""
    with torch.no_grad():
        at = space.start(z0)
        stride = check_stride(check_every, at.image)
        if stride < max_steps:
            end = run_adaptive(space, at, solver, tol, max_steps, stride)
        else:
            end = run_fixed(space, at, solver, tol, max_steps)
    value, point = end.value, end.point
    if value is z0:  # converged where it started: the caller may write there again
        value, point = z0.detach().clone(), None
    if torch.is_autocast_enabled(value.device.type):
        torch.clear_autocast_cache()  # PyTorch 2.6 would keep casts made without a graph for whatever runs next
    pairs = ((end.gap, end.residual), (end.steps, end.codes))
    if end.gap.device != value.device:  # two transfers, not four
        pairs = tuple(torch.stack(pair).to(value.device).unbind() for pair in pairs)  # type: ignore[assignment]
    (gap, residual), (steps, codes) = pairs
    return Solution(value, residual, steps, codes, tol), gap, point


def check_stride(check_every: int | None, z: Tensor) -> int:
    """Return the steps between two residual checks; unless given, each step, or every fourth where a check waits for
    the device. An export has nothing to check."""
    if torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling():  # 2.6 has no `is_exporting`
        return sys.maxsize
    return check_every or (CUDA_STRIDE if z.is_cuda else 1)


@final
@dataclasses.dataclass(frozen=True)
class End:
    """How a loop ended; but for the value (batch,) each, and on the host where the loop has checked residuals."""

    value: Tensor
    residual: Tensor  # ‖f(z) − z‖ / ‖f(z)‖
    gap: Tensor  # ‖f(z) − z‖
    steps: Tensor
    codes: Tensor  # `Status.code`
    point: AbstractPoint | None  # what is known of the value, if it is the very state that was measured last


def run_fixed(space: AbstractSpace, at: Evaluation, solver: AbstractSolver[Any], tol: float, max_steps: int) -> End:
    """Take `max_steps` steps without reading a number, for `torch.export` and CUDA graphs; the residual is measured at
    the end, on the device."""
    running = Running(space, solver, at.z.device.type)
    at = running.advance(at, max_steps - 1)
    ahead = solver.steady or max_steps == 1  # whether the value is a step ahead of the last evaluation
    value = space.answer(at, running.step(at)) if ahead else at.point.z
    measured = space.measure(at)
    steps = torch.full_like(measured.residual, max_steps, dtype=torch.int64)
    codes = final_codes(measured.residual, tol)
    point = measured.point if measured.point.z is value else None
    return End(value, measured.residual, measured.gap, steps, codes, point)


def run_adaptive(
    space: AbstractSpace, at: Evaluation, solver: AbstractSolver[Any], tol: float, max_steps: int, stride: int
) -> End:
    """Step until every sample has converged or failed, with a residual check every `stride` steps.

    Each sample keeps its best point, and samples that are finished leave the computation.
    """
    steady, delays, at = solver.steady, solver.delays(space), _store_alike(at)
    running, samples = Running(space, solver, at.z.device.type), Samples(at, tol)
    delay = min(stride, CUDA_STRIDE) - 1 if delays else 0
    at = running.advance(running.take_picard_steps(at, delay), stride - 1 - delay)
    step = stride
    while True:
        last = step == max_steps
        measured = running.space.measure(at, None if last else tol)
        better = samples.record.observe(step, measured)
        finished = samples.record.finished
        over, value = bool(finished.all()), at.point.z
        if not over and (steady or not last):
            z = running.step(at)
            if steady or step == 1:  # a sample that goes on is worth no less a step ahead
                value = _pick(finished, value, running.space.answer(at, z))
        samples.best = _pick(better, value, samples.best)
        if over or last:
            break
        z, count = samples.drop_finished(running, z), min(stride, max_steps - step)
        at, step = running.space.evaluate(z), step + count
        if count > 1:
            at = running.advance(at, count - 1)
    return _end(space, samples, measured.point)


class Running:
    """A solver with its memory, at work on the samples that are still in the computation."""

    def __init__(self, space: AbstractSpace, solver: AbstractSolver[Any], device: str):
        self.space, self.solver = space, solver
        self.memory: Any = None
        self.started = False
        self.unseen: list[Evaluation] = []  # by the solver
        on = torch.is_autocast_enabled(device)  # autocast is for f only, not for the small systems of a solver
        self.precisely = torch.autocast(device, enabled=False) if on else contextlib.nullcontext()

    def step(self, at: Evaluation) -> Tensor:
        """Let the solver step from `at`, after the evaluations it has not seen yet; return the next iterate."""
        with self.precisely:
            if not self.started:
                self.memory, self.started = self.solver.init(self.space, at.z), True
            for each in (*self.unseen, at):
                z, self.memory = self.solver.step(self.space, each, self.memory)
        self.unseen.clear()
        return z

    def advance(self, at: Evaluation, count: int) -> Evaluation:
        """Take `count` steps and return the last evaluation."""
        for _ in range(count):
            at = self.space.evaluate(self.step(at))
        return at

    def take_picard_steps(self, at: Evaluation, count: int) -> Evaluation:
        """Take `count` steps z ← f(z), which the solver sees later; return the last evaluation."""
        for _ in range(count):
            self.unseen.append(dataclasses.replace(at, point=Point(at.z)))  # the state there need not be kept
            at = self.space.evaluate(at.image)
        return at


class Samples:
    """The best point of each sample and its record: of those in the computation, and of those that have left it."""

    def __init__(self, at: Evaluation, tol: float):
        self.record, self.best = SampleRecord.open(len(at.z), tol, at.image.dtype), at.point.z
        self.left: list[tuple[SampleRecord, Tensor]] = []

    def drop_finished(self, running: Running, z: Tensor) -> Tensor:
        """Let finished samples leave once they are a share of all; return the z of those that stay."""
        finished = self.record.finished
        if int(finished.sum()) < SHRINK * len(z):
            return z
        keep, done = (~finished).nonzero().flatten(), finished.nonzero().flatten()
        index = keep.to(z.device)
        rest = running.space.rows(index)
        if rest is None:
            return z
        running.space, running.memory = rest, restrict(running.memory, index)
        self.left.append((restrict(self.record, done), take_samples(self.best, done.to(z.device))))
        self.record, self.best = restrict(self.record, keep), take_samples(self.best, index)
        return take_samples(z, index)

    def join(self) -> tuple[SampleRecord, Tensor]:
        """Return record and best point of all samples, in the order of the batch."""
        if not self.left:
            return self.record, self.best
        records, values = zip(*self.left, (self.record, self.best), strict=True)
        record, order = SampleRecord.join(records)
        return record, take_samples(torch.cat(values), order.to(self.best.device))


def _store_alike(at: Evaluation) -> Evaluation:
    """Return the same evaluation with z stored as the image is, since z may become the value."""
    return at if at.z.stride() == at.image.stride() else move(at, torch.empty_like(at.image).copy_(at.z))


def _end(space: AbstractSpace, samples: Samples, measured: AbstractPoint) -> End:
    """Return the outcome for all samples; `measured` is the state that was measured last, exactly."""
    record, value = samples.join()
    point = measured if measured.z is value else None
    missed = record.codes != Status.CONVERGED.code
    # The residual of other samples that failed may be that of another variable, which the space has iterated.
    exact = space.remeasure(value) if point is None and bool(missed.any()) else None
    if exact is not None:
        record.residual[missed] = exact.residual.to(record.residual)[missed]
        record.gap[missed] = exact.gap.to(record.gap)[missed]
    return End(value, record.residual, record.gap, record.steps, record.codes, point)


def _pick(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Return the rows of `new` where the mask holds, else of `old`; one of them itself where all rows agree."""
    if bool(mask.all()):
        return new
    if not bool(mask.any()):
        return old
    return torch.where(per_sample(mask.to(new.device), new), new, old)
