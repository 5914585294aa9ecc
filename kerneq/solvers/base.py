"""What a solver is, and `solve`: the one loop that runs every solver, each sample on its own."""

import abc
import contextlib
import dataclasses
import sys
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..equation import AbstractMap, Evaluation, Map, Measurement, as_map
from ..solution import OnFailure, Solution, Status, check_limits, final_codes, settle
from ..tensors import check_kind, is_exported, per_sample, restrict, take_samples, working_dtype

Memory = TypeVar("Memory")
Array = npt.NDArray[Any]

CUDA_STRIDE = 4  # steps between two looks at the residual on a GPU: each look waits for the device
NEVER = sys.maxsize
SHRINK = 0.25  # finished samples leave the computation once they are this share of it
PATIENCE = 5  # steps without a lower residual before a sample near its dtype's rounding error is given up


class AbstractSolver(abc.ABC, Generic[Memory]):
    """A rule z, f(z) ↦ next z, a frozen value. The loop in `solve` calls f once a step, measures, and decides.

    To write one: `init` and `step`. The properties say what the rule looks at and what may be relied on; `space` lets
    it iterate in another space than that of z.
    """

    @property
    def steady(self) -> bool:
        """A step is never worse than where it starts: a solve out of steps returns the last step, not its start."""
        return False

    def waits(self, f: AbstractMap) -> bool:
        """Whether plain steps z ← f(z) will do until the first look, and the rule is told of them after it.

        Where f contracts most solves are over by then, and what the rule would have remembered costs nothing.
        """
        return False

    def needs(self, f: AbstractMap) -> tuple[bool, bool]:
        """Whether the rule looks at d(z) where it iterates f, and whether at E, which then decides what is best."""
        return False, False

    def space(self, f: AbstractMap) -> AbstractMap:
        """The map that is iterated; its evaluations know their z."""
        return f

    @abc.abstractmethod
    def init(self, f: AbstractMap, z0: Tensor) -> Memory:
        """The memory before the first step: None, or a dataclass of tensors whose dimension 0 is the sample."""

    @abc.abstractmethod
    def step(self, f: AbstractMap, at: Evaluation, memory: Memory) -> tuple[Tensor, Memory]:
        """The next iterate and the memory that goes with it; f has been evaluated, and is not called."""


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

    A sample stops at the first look at which its residual is at most `tol`; its value is the very point whose
    residual is reported. One that runs out of steps returns its best point, moved one step on where the solver is
    `steady`. The residual is looked at every `check_every` steps: by default each step on a CPU and every fourth on
    a GPU, where a look waits for the device. With `check_every >= max_steps` nothing waits: a fixed number of
    steps, fit for `torch.export` and CUDA graphs, whose last iterate is the value. For the equation of a cell z0 may be
    None: z = 0, whose evaluation needs no Wz.
    """
    check_kind("solver", solver, AbstractSolver)
    check_limits(tol, max_steps, check_every, on_failure)
    return untraced(_solve, as_map(f), z0, solver, tol, max_steps, check_every, on_failure)


def untraced(run: Callable[..., Solution], *arguments: Any) -> Solution:
    """run(*arguments), which no compiler looks into: the loop looks at the residual, and what is worth compiling is the
    map inside it. (As a decorator, `disable` would import the compiler, seconds, for everybody.)"""
    if torch.compiler.is_compiling():
        run = torch.compiler.disable(run)  # type: ignore[no-untyped-call]
    return run(*arguments)


def _solve(
    f: AbstractMap,
    z0: Tensor | None,
    solver: AbstractSolver[Any],
    tol: float,
    max_steps: int,
    check_every: int | None,
    on_failure: OnFailure,
) -> Solution:
    if z0 is not None:
        f.check_start(z0)
    with torch.no_grad():
        space = solver.space(f)
        at = space.start(z0, *solver.needs(space))
        stride = look_stride(check_every, at.image)
        record, value, at = _iterate(space, at, solver, tol, max_steps, stride)
        if value is z0:  # converged where it started: the caller may write there again
            value = z0.detach().clone()
        space.found(value, at)
        if space is not f and stride < max_steps and bool((missed := record.codes != Status.CONVERGED.code).any()):
            exact = f.measure(f.evaluate(value))  # what was measured on the way to a failure need not be z's residual
            for column, found in ((record.residual, exact.residual), (record.gap, exact.gap)):
                column[missed] = found.to(column)[missed]
    if torch.is_autocast_enabled(value.device.type):
        torch.clear_autocast_cache()  # PyTorch 2.6 would give casts made without a graph to whoever wants one next
    pairs = ((record.gap, record.residual), (record.steps, record.codes))
    if record.gap.device != value.device:  # two transfers, not four
        pairs = tuple(torch.stack(pair).to(value.device).unbind() for pair in pairs)  # type: ignore[assignment]
    (gap, residual), (steps, codes) = pairs
    return settle(Solution(value, residual, steps, codes, tol, f.error_bound(gap)), on_failure)


def look_stride(check_every: int | None, z: Tensor) -> int:
    """Steps between two looks at the residual; unless said, each step, or every fourth where a look waits.

    An export has nothing to look at.
    """
    if is_exported():
        return NEVER
    return check_every or (CUDA_STRIDE if z.is_cuda else 1)


def _iterate(
    f: AbstractMap, at: Evaluation, solver: AbstractSolver[Any], tol: float, max_steps: int, stride: int
) -> tuple["SampleRecord", Tensor, Evaluation]:
    """Step until every sample has finished, or, with a stride of `max_steps` or more, without a look at any number.

    Returns the record, the value, and the last evaluation.

    The record of a solve that looks is on the host, where reading it is free; that of one that does not is made at its
    end, on the device.
    """
    looking = stride < max_steps
    if looking and at.z.stride() != at.image.stride():
        at = dataclasses.replace(at, z=torch.empty_like(at.image).copy_(at.z))  # it may become a value
    waits = min(stride, CUDA_STRIDE) - 1 if looking and solver.waits(f) else 0
    passed: list[Evaluation] = []  # that the rule has not been told of yet
    memory: Any = None
    record = SampleRecord.open(len(at.z), tol, at.image.dtype) if looking else None
    finished: list[tuple[SampleRecord, Tensor]] = []  # samples that have left the computation, with their values
    z, best = at.z, at.value
    casting = torch.is_autocast_enabled(z.device.type)  # which is for f only, not for the solver's small systems
    quiet = torch.autocast(z.device.type, enabled=False) if casting else contextlib.nullcontext()
    for step in range(1, max_steps + 1):
        if step > 1:
            at = f.evaluate(z, *solver.needs(f))
        if step <= waits:
            passed.append(dataclasses.replace(at, state=None, features=None))
            z = at.image
            continue
        last = step == max_steps
        better = None
        if record is not None and (last or step % stride == 0):
            better = record.observe(step, f.measure(at, None if last else tol))
            if bool(record.finished.all()):
                best = _pick(better, at.value, best)
                break
        moves = solver.steady or step == 1
        if moves or not last:
            with quiet:
                memory = solver.init(f, at.z) if step == waits + 1 else memory
                for each in (*passed, at):
                    z, memory = solver.step(f, each, memory)
            passed.clear()
        if record is None or better is None:
            continue
        best = _pick(better, _pick(record.finished, at.value, f.answer(at, z) if moves else at.value), best)
        if SHRINK * len(best) <= int(record.finished.sum()):
            done, keep = record.finished.nonzero().flatten(), (~record.finished).nonzero().flatten()
            index = keep.to(best.device)
            rest = f.rows(index)
            if rest is not None:
                finished.append((restrict(record, done), take_samples(best, done.to(best.device))))
                f, memory, record = rest, restrict(memory, index), restrict(record, keep)
                z, best = take_samples(z, index), take_samples(best, index)
    if record is not None:
        return *_gather([*finished, (record, best)]), at
    value = f.answer(at, z) if solver.steady or max_steps == 1 else at.value
    return SampleRecord.single(max_steps, f.measure(at), tol), value, at


def _pick(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Rows of `new` where the mask holds, else of `old`; without touching the data where all rows agree."""
    if bool(mask.all()):
        return new
    if not bool(mask.any()):
        return old
    return torch.where(per_sample(mask.to(new.device), new), new, old)


@dataclasses.dataclass
class SampleRecord:
    """Who has finished, how, and after how many steps: an entry per sample still in the computation.

    A tolerance the dtype cannot reach shows as a residual that has stopped falling within ε^¾ (ε: the dtype's
    rounding unit); bfloat16 stalls near 0.5 ε, float32 and float64 at 10 to 1000 ε, depending on the width.
    """

    tol: float
    rounding: float  # ε^¾
    rows: Tensor  # where in the batch each sample stands
    residual: Tensor  # of the best point
    gap: Tensor  # ‖f(z) − z‖ there
    merit: Tensor  # the lowest energy, or the lowest residual: what "best" means
    lowest: Tensor  # residual so far
    fell: Tensor  # the step at which `lowest` last fell
    steps: Tensor
    codes: Tensor
    finished: Tensor

    @classmethod
    def open(cls, batch: int, tol: float, dtype: torch.dtype) -> "SampleRecord":
        """Nothing known yet, on the host; every column has memory of its own, since `observe` writes in place."""
        rows = torch.arange(batch)
        residual, gap, merit, lowest = torch.full((4, batch), torch.inf, dtype=working_dtype(dtype))
        fell, steps = torch.zeros(2, batch, dtype=torch.int64)
        codes = torch.full_like(rows, Status.MAX_STEPS.code)
        finished = torch.zeros(batch, dtype=torch.bool)
        rounding = torch.finfo(dtype).eps ** 0.75
        return cls(tol, rounding, rows, residual, gap, merit, lowest, fell, steps, codes, finished)

    @classmethod
    def single(cls, step: int, measured: Measurement, tol: float) -> "SampleRecord":
        """Of a solve that was looked at only once, at its end; on its device."""
        residual = measured.residual
        rows = torch.arange(residual.shape[0], device=residual.device)
        codes = final_codes(residual, tol)
        steps = torch.full_like(rows, step)
        return cls(tol, 0.0, rows, residual, measured.gap, residual, residual, steps, steps, codes, codes >= 0)

    def observe(self, step: int, measured: Measurement) -> Tensor:
        """Enter one measurement; True where it is the best so far: at `tol`, or by its merit, give or take its slack.

        In NumPy, on the memory of the tensors: on a CPU this runs at every step, and on so few numbers an operation of
        PyTorch costs several of NumPy's.
        """
        found = (measured.residual, measured.gap, measured.merit, measured.slack)
        residual, gap, *rest = _on_host([t for t in found if t is not None], self.residual.dtype)
        merit = rest[0] if rest else residual
        slack = rest[1] if len(rest) == 2 else None
        limit = self.merit.numpy()
        if slack is not None:
            with np.errstate(over="ignore", invalid="ignore"):  # an energy near the largest number, or past it
                limit = limit + slack
        finished = self.finished.numpy()
        running, finite = ~finished, np.isfinite(residual)
        reached = residual <= self.tol
        better = running & finite & ((merit <= limit) | reached)
        np.copyto(self.steps.numpy(), step, where=running)
        for column, new in ((self.residual, residual), (self.gap, gap), (self.merit, merit)):
            np.copyto(column.numpy(), new, where=better)
        ends = (
            (~finite, Status.NONFINITE),
            (self._stalled(step, residual), Status.PRECISION),
            (reached, Status.CONVERGED),
        )
        for mask, status in ends:
            if np.count_nonzero(mask):
                np.copyto(self.codes.numpy(), status.code, where=mask & running)
                finished |= mask
        return torch.from_numpy(better)

    def _stalled(self, step: int, residual: Array) -> Array:
        """Where the residual is within reach of rounding and has not fallen for a while."""
        lowest, fell = self.lowest.numpy(), self.fell.numpy()
        falls = residual < lowest  # by however little: what converges slowly has not stopped
        np.copyto(fell, step, where=falls)
        np.copyto(lowest, residual, where=falls)
        stalled: Array = (residual <= self.rounding) & (step - fell >= PATIENCE)
        return stalled


def _on_host(measured: list[Tensor], dtype: torch.dtype) -> list[Array]:
    """Measurements as arrays; from another device in one transfer, since each would wait for it."""
    if measured[0].device.type != "cpu":
        return list(torch.stack([t.to(dtype) for t in measured]).cpu().numpy())
    return [t.to(dtype).numpy() for t in measured]


def _gather(parts: list[tuple[SampleRecord, Tensor]]) -> tuple[SampleRecord, Tensor]:
    """Records and values of all samples, in the order of the batch."""
    records = [record for record, _ in parts]
    values = [value for _, value in parts]
    if len(parts) == 1:
        return parts[0]
    joined = SampleRecord(
        records[0].tol,
        records[0].rounding,
        *(torch.cat([getattr(r, name) for r in records]) for name in _COLUMNS),
    )
    order = joined.rows.argsort()
    return restrict(joined, order), take_samples(torch.cat(values), order.to(values[0].device))


_COLUMNS = [field.name for field in dataclasses.fields(SampleRecord) if field.type is Tensor]
