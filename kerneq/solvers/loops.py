"""`solve` and its two loops, until each sample has converged or for a fixed number of steps, and what they record."""

import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Self, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..equation import Equation
from ..maps import AbstractMap, Map, Point, as_map
from ..solution import Limits, OnFailure, Solution, Status, Trace, final_codes, report_failure
from ..structure import Norm, Packed, Structure, Tree, pack_state, unpack_state
from ..tensors import (
    check_kind,
    check_whole,
    forget_casts,
    magnitude,
    per_sample,
    precision,
    restrict,
    take_samples,
    working_dtype,
)
from .base import (
    AbstractPoint,
    AbstractSolver,
    AbstractSpace,
    Evaluation,
    Measurement,
    PartsSpace,
    StateSpace,
    move,
    relative_residual,
)
from .broyden import Secants

CUDA_STRIDE = 4  # steps between two residual checks on a GPU, where a check waits for the device
SHRINK = 0.25  # finished samples leave the computation once they are this share of it
AGREEMENT = 1.5  # times `tol`: the residual in the whole batch of a sample that converged apart
TOGETHER = (
    "f gives other values for the whole batch than for its parts: samples meet in it (batch norm in training, a mean "
    "over the batch), or it changes between calls. They were solved again as one state. Give `batched=False` for that "
    "from the start, or make f treat each sample on its own."
)
ROUNDING = 0.75  # a residual of ε to this power, ε the dtype's rounding unit, may be rounding alone
PATIENCE = 5  # steps without a lower residual before a sample near its dtype's rounding error is given up

Array = npt.NDArray[Any]


def solve(
    f: Map,
    z0: Tree,
    solver: AbstractSolver[Any],
    *,
    tol: float | None = None,
    max_steps: int = 50,
    check_every: int | None = None,
    on_failure: OnFailure = "return",
    batched: bool = True,
    norm: Norm = "joint",
    trace: bool | Collection[int] = False,
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
    limits = Limits(tol, max_steps, check_every, on_failure).check()
    g, z = pack_state(as_map(f), z0, batched, norm)
    solution, _ = run_untraced(find_point, g, z, solver, limits, trace)
    return map_states(solution, partial(unpack_state, g))


def map_states(solution: Solution, function: Callable[[Tensor], Tree]) -> Solution:
    """Return the solution with its value and the states of its trace transformed."""
    trace = solution.trace
    if trace is not None:
        trace = dataclasses.replace(trace, states={step: function(z) for step, z in trace.states.items()})
    return dataclasses.replace(solution, value=function(solution.value), trace=trace)


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
    limits: Limits,
    trace: bool | Collection[int] = False,
    graph: bool = False,
) -> tuple[Solution, Point]:
    """Solve z = f(z); return the solution, and its value as a `Point` with what the solve has computed there.

    With `graph`, the last evaluation of a function keeps its graph for the gradient, where it is of the whole batch.
    """
    recorder = None if trace is False else Recorder(f, () if trace is True else trace)
    end = solve_map(f, z0, solver, limits, recorder, graph)
    solution, point = end.solution, end.point
    if isinstance(f, Equation):
        solution = dataclasses.replace(solution, error_bound=f.error_bound(end.gap))
    if recorder is not None:
        solution = dataclasses.replace(solution, trace=recorder.end())
    point = dataclasses.replace(point if isinstance(point, Point) else Point(solution.value), memory=end.memory)
    return report_failure(solution, limits.on_failure, "cell" if isinstance(f, Equation) else "function"), point


def solve_map(
    f: AbstractMap,
    z0: Tensor | None,
    solver: AbstractSolver[Any],
    limits: Limits,
    recorder: "Recorder | None" = None,
    graph: bool = False,
) -> "End":
    """Solve z = f(z); where the samples turn out to meet in f, once more as one state, from where they are.

    For `graph` see `find_point`.
    """
    space = solver.space(f)
    if graph and isinstance(space, StateSpace) and not isinstance(f, Equation):
        space = dataclasses.replace(space, graph=True)
    if isinstance(f, Packed) and f.leafwise:
        space = PartsSpace(space, f.structure.sizes)
    end = solve_space(space, z0, solver, limits, recorder)
    if end.apart is None:
        end = check_together(space, end)
    if end.apart:
        return end
    warnings.warn(TOGETHER, RuntimeWarning, stacklevel=4)
    apart, structure = end.solution, Structure.of(end.solution.value, batched=False)
    batch = len(apart.value)
    space = PartsSpace(solver.space(Packed(f, structure)), [apart.value[0].numel()] * batch)
    joint = solve_space(space, structure.pack(apart.value), solver, limits)
    together = joint.solution
    residual, codes = together.residual.expand(batch), together.codes.expand(batch)
    value, steps = structure.unpack(together.value), apart.steps + together.steps
    return End(Solution(value, residual, steps, codes, together.tol), joint.gap.expand(batch), None)


@torch.no_grad()
def check_together(space: AbstractSpace, end: "End") -> "End":
    """Measure the samples that converged once more, as one batch, and say whether they agree, but for rounding.

    Those whose residual was 0 and is not are too small for their dtype, which is another matter.
    """
    solution, whole = end.solution, space.evaluate_last(end.solution.value)
    forget_casts(solution.value)
    unit = magnitude(torch.maximum(whole.z.abs(), whole.image.abs()))  # squares of 1e-30 are 0 in float32
    residual, _ = relative_residual(whole.z / unit, whole.image / unit)
    rounding = torch.finfo(whole.image.dtype).eps ** ROUNDING
    wrong = solution.converged & ~(residual <= AGREEMENT * solution.tol + rounding)
    vanished = wrong & (solution.residual == 0)
    solution = dataclasses.replace(
        solution,
        residual=torch.where(vanished, residual, solution.residual),
        codes=torch.where(vanished, Status.PRECISION.code, solution.codes),
    )
    apart, point = not bool((wrong & ~vanished).any()), whole.point
    if apart and isinstance(point, Point) and point.system is not None:
        point = dataclasses.replace(point, system=dataclasses.replace(point.system, apart=True))
    return dataclasses.replace(end, solution=solution, point=point, apart=apart)


@final
@dataclasses.dataclass(frozen=True)
class End:
    """How a loop ended."""

    solution: Solution
    gap: Tensor  # ‖f(z) − z‖ of each sample, (batch,)
    point: AbstractPoint | None  # what is known of the value, if it is the very state that was measured last
    apart: bool | None = True  # whether the samples, which converged apart, have so as one batch; None: not known
    memory: Secants | None = None  # what `Broyden` has learnt, of all samples


def solve_space(
    space: AbstractSpace,
    z0: Tensor | None,
    solver: AbstractSolver[Any],
    limits: Limits,
    recorder: "Recorder | None" = None,
) -> End:
    """Let the solver iterate in this space, from the iterate that stands for z0."""
    with torch.no_grad():
        at = space.start(z0)
        stride = check_stride(limits.check_every, at.image)
        if stride < limits.max_steps:
            end = run_adaptive(space, at, solver, limits, stride, recorder)
        else:
            end = run_fixed(space, at, solver, limits, recorder)
    value = end.solution.value
    forget_casts(value)
    if value is not z0:
        return end
    # It converged where it started: the caller may write there again.
    return dataclasses.replace(
        end, solution=dataclasses.replace(end.solution, value=value.detach().clone()), point=None
    )


def check_stride(check_every: int | None, z: Tensor) -> int:
    """Return the steps between two residual checks; unless given, each step, or every fourth where a check waits for
    the device. An export has nothing to check."""
    if torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling():  # 2.6 has no `is_exporting`
        return sys.maxsize
    return check_every or (CUDA_STRIDE if z.is_cuda else 1)


def run_fixed(
    space: AbstractSpace,
    at: Evaluation,
    solver: AbstractSolver[Any],
    limits: Limits,
    recorder: "Recorder | None" = None,
) -> End:
    """Take `max_steps` steps without reading a number, for `torch.export` and CUDA graphs; the residual is measured at
    the end, on the device."""
    iteration, max_steps = Iteration(space, solver, at.z.device, recorder), limits.max_steps
    at = iteration.advance(at, max_steps - 1)
    ahead = solver.steady or max_steps == 1  # whether the value is a step ahead of the last evaluation
    value = space.answer(at, iteration.step(at)) if ahead else at.point.z
    measured = space.measure(at)
    if recorder is not None:
        recorder.observe(measured)
    tol = limits.tolerance(precision(at.image))
    steps = torch.full_like(measured.residual, max_steps, dtype=torch.int64)
    codes = final_codes(measured.residual, tol)
    point = measured.point if measured.point.z is value else None
    return End(Solution(value, measured.residual, steps, codes, tol), measured.gap, point, memory=iteration.learnt)


def run_adaptive(
    space: AbstractSpace,
    at: Evaluation,
    solver: AbstractSolver[Any],
    limits: Limits,
    stride: int,
    recorder: "Recorder | None" = None,
) -> End:
    """Step until every sample has converged or failed, with a residual check every `stride` steps.

    Each sample keeps its best point, and samples that are finished leave the computation. With a recorder they stay,
    and each step is checked.
    """
    tol, max_steps = limits.tolerance(precision(at.image)), limits.max_steps
    steady, at = solver.steady, _store_alike(at)
    stride = stride if recorder is None else 1
    iteration, samples = Iteration(space, solver, at.z.device), Samples(at, tol, solver.picard_steps(space))
    first = min(stride, CUDA_STRIDE) - 1  # no more, since f may expand
    iteration.choose_plain(samples.record.plain)
    at = iteration.advance(at, first)
    if stride - 1 > first:
        iteration.plain = False
        at = iteration.advance(at, stride - 1 - first)
    step, count = stride, stride - 1
    while True:
        last = step == max_steps
        measured = iteration.space.measure(at, tol if recorder is None and not last else None)
        if recorder is not None:
            recorder.observe(measured)
        better = samples.record.observe(step, measured, count)
        finished = samples.record.finished
        over, value = bool(finished.all()), at.point.z
        if not over and (steady or not last):
            iteration.choose_plain(samples.record.plain)
            z = iteration.step(at)
            if steady or step == 1:  # a sample that goes on is worth no less a step ahead
                value = _pick(finished, value, iteration.space.answer(at, z))
        samples.best = _pick(better, value, samples.best)
        if over or last:
            end = samples.end(space, measured.point)
            return end if samples.left else dataclasses.replace(end, memory=iteration.learnt)
        ending = samples.record.ending
        if recorder is None and not ending:
            z = samples.drop_finished(iteration, z)
        del at, measured  # with the graph of an evaluation that was not the last one
        count = min(stride, max_steps - step)
        keep = ending and not samples.left and not iteration.started  # a graph beside a history is too much memory
        try:
            at = iteration.evaluate(z, keep and count == 1)
        except Exception:  # of the user's function, which perhaps cannot be had for some samples only
            if not samples.left or not space.doubtful:
                raise
            return samples.end(space, None)
        step += count
        if count > 1:
            at = iteration.advance(at, count - 1, keep)


class Iteration:
    """A solver with its memory, at work on the samples that are still in the computation."""

    def __init__(
        self,
        space: AbstractSpace,
        solver: AbstractSolver[Any],
        device: torch.device,
        recorder: "Recorder | None" = None,
    ):
        self.space, self.solver, self.device, self.recorder = space, solver, device, recorder
        self.memory: Any = None
        self.plain: bool | Tensor = False  # which samples take Picard steps: all, none, or those of a mask (batch,)
        self.started = False
        self.unseen: list[Evaluation] = []  # by the solver
        on = torch.is_autocast_enabled(device.type)  # autocast is for f only, not for the small systems of a solver
        self.precisely = torch.autocast(device.type, enabled=False) if on else contextlib.nullcontext()

    def choose_plain(self, plain: Array) -> None:
        """Let the samples of the mask take Picard steps until the next call: its copy to a device waits for it."""
        some = torch.from_numpy(plain).to(self.device) if plain.any() and not plain.all() else None
        self.plain = bool(plain.all()) if some is None else some

    def step(self, at: Evaluation) -> Tensor:
        """Return the next iterate: where the solver steps from `at`, or f(z) for samples that take Picard steps.

        Where all do, the solver is not called, and sees these evaluations later.
        """
        if self.plain is True:
            at = dataclasses.replace(at, point=Point(at.z))  # the state there need not be kept
            self.unseen.append(at)
            return at.image
        with self.precisely:
            if not self.started:
                self.memory, self.started = self.solver.init(self.space, at.z), True
            for each in (*self.unseen, at):
                z, self.memory = self.solver.step(self.space, each, self.memory)
        self.unseen = []
        return z if self.plain is False else torch.where(per_sample(self.plain, z), at.image, z)

    def restrict(self, space: AbstractSpace, index: Tensor) -> None:
        """Go on with the samples in `index` only, in the space of those."""
        self.space = space
        self.memory, self.unseen = restrict(self.memory, index), [restrict(at, index) for at in self.unseen]
        self.plain = restrict(self.plain, index)

    @property
    def learnt(self) -> Secants | None:
        """What `Broyden` has learnt of the Jacobian; other memories are not worth keeping after a solve."""
        return self.memory if isinstance(self.memory, Secants) else None

    def evaluate(self, z: Tensor, last: bool) -> Evaluation:
        """Evaluate at z; `last`: where the solve will probably end."""
        return self.space.evaluate_last(z) if last else self.space.evaluate(z)

    def advance(self, at: Evaluation, count: int, last: bool = False) -> Evaluation:
        """Take `count` steps and return the last evaluation."""
        for left in reversed(range(count)):
            if self.recorder is not None:
                self.recorder.observe(self.space.measure(at))
            at = self.evaluate(self.step(at), last and left == 0)
        return at


class Samples:
    """The best point of each sample and its record: of those in the computation, and of those that have left it."""

    def __init__(self, at: Evaluation, tol: float, picard_steps: int | None):
        self.record = SampleRecord.open(len(at.z), tol, at.image.dtype, picard_steps)
        self.best = at.point.z
        self.left: list[tuple[SampleRecord, Tensor]] = []

    def drop_finished(self, iteration: Iteration, z: Tensor) -> Tensor:
        """Let finished samples leave once they are a share of all; return the z of those that stay."""
        finished = self.record.finished
        if np.count_nonzero(finished) < SHRINK * len(z):
            return z
        keep, done = np.flatnonzero(~finished), np.flatnonzero(finished)
        index = torch.from_numpy(keep).to(z.device)
        rest = iteration.space.rows(index)
        if rest is None:
            return z
        iteration.restrict(rest, index)
        self.left.append((self.record.take(done), take_samples(self.best, torch.from_numpy(done).to(z.device))))
        self.record, self.best = self.record.take(keep), take_samples(self.best, index)
        return take_samples(z, index)

    def end(self, space: AbstractSpace, measured: AbstractPoint | None) -> End:
        """Return the outcome for all samples, in the order of the batch; `measured` is the state measured last, or None
        where the samples that are left could not be evaluated without the others."""
        record, value, device = self.record, self.best, self.best.device
        if self.left:
            records, values = zip(*self.left, (record, value), strict=True)
            record, order = SampleRecord.join(records)
            value = take_samples(torch.cat(values), torch.from_numpy(order).to(device))
        point = measured if measured is not None and measured.z is value else None
        missed = record.codes != Status.CONVERGED.code
        # The residual of other samples that failed may be that of another variable, which the space has iterated.
        exact = space.remeasure(value) if point is None and bool(missed.any()) else None
        if exact is not None:
            exact_residual, exact_gap = _on_host([exact.residual, exact.gap], record.dtype)
            record.residual[missed], record.gap[missed] = exact_residual[missed], exact_gap[missed]
        apart: bool | None = measured is not None
        if space.doubtful and apart and not missed.all() and (point is None or (record.residual == 0).any()):
            apart = None
        gap, residual, steps, codes = map(torch.from_numpy, (record.gap, record.residual, record.steps, record.codes))
        if device.type != "cpu":  # two transfers, not four
            gap, residual = torch.stack((gap, residual)).to(device).unbind()
            steps, codes = torch.stack((steps, codes)).to(device).unbind()
        return End(Solution(value, residual, steps, codes, record.tol), gap, point, apart)


@final
class Recorder:
    """Writes down every step of a solve, for `Solution.trace`."""

    def __init__(self, f: AbstractMap, wanted: Collection[int]):
        for step in wanted:
            check_whole("trace", step)
        self.f, self.wanted = f, frozenset(wanted)
        self.residuals: list[Tensor] = []
        self.energies: list[Tensor] = []
        self.states: dict[int, Tensor] = {}

    def observe(self, measured: Measurement) -> None:
        """Enter the next step."""
        z = measured.point.z
        self.residuals.append(measured.residual)
        if isinstance(self.f, Equation):
            self.energies.append(self.f.energy(z))
        if len(self.residuals) in self.wanted:
            self.states[len(self.residuals)] = z.clone()

    def end(self) -> Trace:
        """Return what was written down."""
        energy = torch.stack(self.energies) if self.energies else None
        return Trace(torch.stack(self.residuals), energy, self.states)


@final
@dataclasses.dataclass
class SampleRecord:
    """Which samples have finished, how, and after how many steps: an entry per sample still in the computation.

    In NumPy: on a CPU this runs at every step, and on so few numbers an operation of PyTorch costs several of NumPy's.
    A tolerance the dtype cannot reach shows as a residual that has stopped falling within ε^¾ (ε: the dtype's
    rounding unit); bfloat16 stalls near 0.5 ε, float32 and float64 at 10 to 1000 ε, depending on the width.
    """

    tol: float
    rounding: float  # ε^¾
    dtype: torch.dtype  # of the residuals
    picard_steps: int | None  # see `AbstractSolver.picard_steps`
    rows: Array  # where in the batch each sample stands
    residual: Array  # of the best point
    gap: Array  # ‖f(z) − z‖ there
    merit: Array  # the lowest energy, or the lowest residual: what "best" means
    lowest: Array  # residual so far
    fell: Array  # the step at which `lowest` last fell
    steps: Array
    codes: Array
    finished: Array
    last: Array  # residual at the last check; 1 before the first one
    share: Array  # of the residual at the check before it
    plain: Array  # whether the sample takes Picard steps

    @property
    def ending(self) -> bool:
        """Whether all samples will have converged at the next check, and none before, if the residuals go on so."""
        with np.errstate(over="ignore", invalid="ignore"):  # residuals near the largest number, or past it
            return not self.finished.any() and bool((self.last * self.share <= self.tol).all())

    @classmethod
    def open(cls, batch: int, tol: float, dtype: torch.dtype, picard_steps: int | None) -> Self:
        """Make a record in which nothing is known yet, of a map with values of this dtype."""
        real, rounding = working_dtype(dtype), torch.finfo(dtype).eps ** ROUNDING
        residual, gap, merit, lowest = torch.full((4, batch), torch.inf, dtype=real).numpy()
        fell, steps = np.zeros((2, batch), dtype=np.int64)
        codes = np.full(batch, Status.MAX_STEPS.code, dtype=np.int64)
        finished = np.zeros(batch, dtype=np.bool_)
        last, share = np.ones((2, batch), dtype=residual.dtype)
        plain = np.full(batch, picard_steps is not None)
        columns = (residual, gap, merit, lowest, fell, steps, codes, finished, last, share, plain)
        return cls(tol, rounding, real, picard_steps, np.arange(batch), *columns)

    @classmethod
    def join(cls, parts: Sequence[Self]) -> tuple[Self, Array]:
        """Join the records of all samples in the order of the batch; return that order as well."""
        first, columns = parts[0], zip(*(part._columns() for part in parts), strict=True)
        joined = cls(first.tol, first.rounding, first.dtype, first.picard_steps, *map(np.concatenate, columns))
        order = joined.rows.argsort()
        return joined.take(order), order

    def take(self, index: Array) -> Self:
        """Return a record of the entries in `index` only."""
        columns = (column[index] for column in self._columns())
        return type(self)(self.tol, self.rounding, self.dtype, self.picard_steps, *columns)

    def _columns(self) -> list[Array]:
        return [value for value in vars(self).values() if isinstance(value, np.ndarray)]

    def observe(self, step: int, measured: Measurement, count: int) -> Array:
        """Enter a measurement, `count` steps after the last; return where it is the best so far: at `tol`, or by its
        merit, up to its slack."""
        found = (measured.residual, measured.gap, measured.merit, measured.slack)
        residual, gap, *rest = _on_host([t for t in found if t is not None], self.dtype)
        merit, limit = rest[0] if rest else residual, self.merit
        if len(rest) == 2:
            with np.errstate(over="ignore", invalid="ignore"):  # an energy near the largest number, or past it
                limit = limit + rest[1]
        active, finite = ~self.finished, np.isfinite(residual)
        with np.errstate(over="ignore", invalid="ignore"):
            np.divide(residual, self.last, out=self.share, where=active)
        np.copyto(self.last, residual, where=active)
        reached = residual <= self.tol
        better: Array = active & finite & ((merit <= limit) | reached)
        np.copyto(self.steps, step, where=active)
        for column, new in ((self.residual, residual), (self.gap, gap), (self.merit, merit)):
            np.copyto(column, new, where=better)
        ends = (
            (~finite, Status.NONFINITE),
            (self._stalled(step, residual), Status.PRECISION),
            (reached, Status.CONVERGED),
        )
        for mask, status in ends:
            if np.count_nonzero(mask):
                np.copyto(self.codes, status.code, where=mask & active)
                self.finished |= mask
        if count and self.picard_steps is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                self.plain &= (self.last * self.share ** (self.picard_steps / count) <= self.tol) | self.finished
        return better

    def _stalled(self, step: int, residual: Array) -> Array:
        """Return where the residual is within reach of rounding and has not fallen for a while."""
        falls = residual < self.lowest  # by however little: what converges slowly has not stopped
        np.copyto(self.fell, step, where=falls)
        np.copyto(self.lowest, residual, where=falls)
        stalled: Array = (residual <= self.rounding) & (step - self.fell >= PATIENCE)
        return stalled


def _on_host(measured: list[Tensor], dtype: torch.dtype) -> list[Array]:
    """Return measurements as arrays; from another device in one transfer, since each would wait for it."""
    if measured[0].device.type != "cpu":
        return list(torch.stack([t.to(dtype) for t in measured]).cpu().numpy())
    return [t.to(dtype).numpy() for t in measured]


def _store_alike(at: Evaluation) -> Evaluation:
    """Return the same evaluation with z stored as the image is, since z may become the value."""
    return at if at.z.stride() == at.image.stride() else move(at, torch.empty_like(at.image).copy_(at.z))


def _pick(mask: Array, new: Tensor, old: Tensor) -> Tensor:
    """Return the rows of `new` where the mask holds, else of `old`; one of them itself where all rows agree."""
    if mask.all():
        return new
    if not mask.any():
        return old
    return torch.where(per_sample(torch.from_numpy(mask).to(new.device), new), new, old)
