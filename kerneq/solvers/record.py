"""The record of each sample during a solve: its best residual, and how it ended."""

import dataclasses
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..solution import Status
from ..spaces import Measurement
from ..tensors import restrict, working_dtype

Array = npt.NDArray[Any]

PATIENCE = 5  # steps without a lower residual before a sample near its dtype's rounding error is given up


@final
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

    @classmethod
    def join(cls, parts: Sequence["SampleRecord"]) -> tuple["SampleRecord", Tensor]:
        """Join the records of all samples in the order of the batch; return that order as well."""
        names = [field.name for field in dataclasses.fields(cls) if field.type is Tensor]
        columns = (torch.cat([getattr(part, name) for part in parts]) for name in names)
        joined = cls(parts[0].tol, parts[0].rounding, *columns)
        order = joined.rows.argsort()
        return restrict(joined, order), order

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
