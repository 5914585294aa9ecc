"""The two loops that run a solver: until each sample has converged, or for a fixed number of steps."""

import contextlib
import dataclasses
from typing import Any, Protocol, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..solution import Status, final_codes
from ..spaces import AbstractPoint, AbstractSpace, Evaluation, Measurement, move
from ..tensors import per_sample, restrict, take_samples, working_dtype

Array = npt.NDArray[Any]

CUDA_STRIDE = 4  # steps between two residual checks on a GPU, where a check waits for the device
SHRINK = 0.25  # finished samples leave the computation once they are this share of it
PATIENCE = 5  # steps without a lower residual before a sample near its dtype's rounding error is given up


class Rule(Protocol):
    """What the loops need of an `AbstractSolver`."""

    @property
    def steady(self) -> bool: ...
    def delays(self, space: AbstractSpace) -> bool: ...
    def init(self, space: AbstractSpace, z0: Tensor) -> Any: ...
    def step(self, space: AbstractSpace, at: Evaluation, memory: Any) -> tuple[Tensor, Any]: ...


@final
@dataclasses.dataclass(frozen=True)
class End:
    """How a loop ended; but for the value (batch,) each, and on the host where the loop has checked residuals."""

    value: Tensor
    residual: Tensor  # ‖f(z) − z‖ / ‖f(z)‖
    gap: Tensor  # ‖f(z) − z‖
    steps: Tensor
    codes: Tensor  # `Status.code`
    point: AbstractPoint | None  # what is known of the value


def run_fixed(space: AbstractSpace, at: Evaluation, solver: Rule, tol: float, max_steps: int) -> End:
    """Take `max_steps` steps without reading a number, for `torch.export` and CUDA graphs; the residual is measured at
    the end, on the device."""
    quiet, memory, z = _without_autocast(at.z), solver.init(space, at.z), at.z
    ahead = solver.steady or max_steps == 1  # whether the value is a step ahead of the last evaluation
    for left in reversed(range(max_steps)):
        if left or ahead:
            with quiet:
                z, memory = solver.step(space, at, memory)
        if left:
            at = space.evaluate(z)
    measured = space.measure(at)
    value = space.answer(at, z) if ahead else at.value
    steps = torch.full_like(measured.residual, max_steps, dtype=torch.int64)
    codes = final_codes(measured.residual, tol)
    return End(value, measured.residual, measured.gap, steps, codes, _known(measured.point, value))


def run_adaptive(space: AbstractSpace, at: Evaluation, solver: Rule, tol: float, max_steps: int, stride: int) -> End:
    """Step until every sample has converged or failed, with a residual check every `stride` steps.

    Each sample keeps its best point, and samples that are finished leave the computation.
    """
    if at.z.stride() != at.image.stride():
        at = move(at, torch.empty_like(at.image).copy_(at.z))  # it may become a value
    quiet, memory, started, step = _without_autocast(at.z), None, False, 1
    record, best = SampleRecord.open(len(at.z), tol, at.image.dtype), at.value
    finished: list[tuple[SampleRecord, Tensor]] = []  # samples that have left the computation, with their values
    delayed: list[Evaluation] = []  # that the solver has not seen yet
    if solver.delays(space):
        step = min(stride, CUDA_STRIDE)
        for _ in range(step - 1):
            delayed.append(dataclasses.replace(at, point=None))
            at = space.evaluate(at.image)
    while True:
        z, better, last = at.z, None, step == max_steps
        if last or step % stride == 0:
            measured = space.measure(at, None if last else tol)
            better = record.observe(step, measured)
            if bool(record.finished.all()):
                best = _pick(better, at.value, best)
                break
        if solver.steady or not last:
            with quiet:
                if not started:
                    memory, started = solver.init(space, z), True
                for each in (*delayed, at):
                    z, memory = solver.step(space, each, memory)
            delayed.clear()
        if better is not None:
            ahead = solver.steady or step == 1  # a sample that goes on is worth no less a step ahead
            value = _pick(record.finished, at.value, space.answer(at, z)) if ahead else at.value
            best = _pick(better, value, best)
        if last:
            break
        if better is not None and SHRINK * len(best) <= int(record.finished.sum()):
            done, keep = record.finished.nonzero().flatten(), (~record.finished).nonzero().flatten()
            index = keep.to(best.device)
            rest = space.rows(index)
            if rest is not None:
                finished.append((restrict(record, done), take_samples(best, done.to(best.device))))
                space, memory, record = rest, restrict(memory, index), restrict(record, keep)
                z, best = take_samples(z, index), take_samples(best, index)
        at = space.evaluate(z)
        step += 1
    record, best = _gather([*finished, (record, best)])
    return End(best, record.residual, record.gap, record.steps, record.codes, _known(measured.point, best))


def _without_autocast(z: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context without autocast, which is for f only, not for the small systems of a solver."""
    kind = z.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()


def _known(point: AbstractPoint | None, value: Tensor) -> AbstractPoint | None:
    """Return what is known of the value, if it is the very state that was measured last."""
    return point if point is not None and point.z is value else None


def _pick(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Return the rows of `new` where the mask holds, else of `old`; one of them itself where all rows agree."""
    if bool(mask.all()):
        return new
    if not bool(mask.any()):
        return old
    return torch.where(per_sample(mask.to(new.device), new), new, old)


@dataclasses.dataclass
class SampleRecord:
    """Which samples have finished, how, and after how many steps: an entry per sample still in the computation.

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
        """Make a record in which nothing is known yet, on the host; every column has memory of its own, since `observe`
        writes in place."""
        rows = torch.arange(batch)
        residual, gap, merit, lowest = torch.full((4, batch), torch.inf, dtype=working_dtype(dtype))
        fell, steps = torch.zeros(2, batch, dtype=torch.int64)
        codes = torch.full_like(rows, Status.MAX_STEPS.code)
        finished = torch.zeros(batch, dtype=torch.bool)
        rounding = torch.finfo(dtype).eps ** 0.75
        return cls(tol, rounding, rows, residual, gap, merit, lowest, fell, steps, codes, finished)

    def observe(self, step: int, measured: Measurement) -> Tensor:
        """Enter one measurement; return where it is the best so far: at `tol`, or by its merit, give or take its slack.

        In NumPy, on the memory of the tensors: on a CPU this runs at every step, and on so few numbers an operation of
        PyTorch costs several of NumPy's.
        """
        found = (measured.residual, measured.gap, measured.merit, measured.slack)
        residual, gap, *rest = _on_host([t for t in found if t is not None], self.residual.dtype)
        merit, limit = rest[0] if rest else residual, self.merit.numpy()
        if len(rest) == 2:
            with np.errstate(over="ignore", invalid="ignore"):  # an energy near the largest number, or past it
                limit = limit + rest[1]
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
        """Return where the residual is within reach of rounding and has not fallen for a while."""
        lowest, fell = self.lowest.numpy(), self.fell.numpy()
        falls = residual < lowest  # by however little: what converges slowly has not stopped
        np.copyto(fell, step, where=falls)
        np.copyto(lowest, residual, where=falls)
        stalled: Array = (residual <= self.rounding) & (step - fell >= PATIENCE)
        return stalled


def _on_host(measured: list[Tensor], dtype: torch.dtype) -> list[Array]:
    """Return measurements as arrays; from another device in one transfer, since each would wait for it."""
    if measured[0].device.type != "cpu":
        return list(torch.stack([t.to(dtype) for t in measured]).cpu().numpy())
    return [t.to(dtype).numpy() for t in measured]


def _gather(parts: list[tuple[SampleRecord, Tensor]]) -> tuple[SampleRecord, Tensor]:
    """Join records and values of all samples, in the order of the batch."""
    if len(parts) == 1:
        return parts[0]
    records = [record for record, _ in parts]
    columns = (torch.cat([getattr(r, name) for r in records]) for name in _COLUMNS)
    joined = SampleRecord(records[0].tol, records[0].rounding, *columns)
    values = torch.cat([value for _, value in parts])
    order = joined.rows.argsort()
    return restrict(joined, order), take_samples(values, order.to(values.device))


_COLUMNS = [field.name for field in dataclasses.fields(SampleRecord) if field.type is Tensor]
