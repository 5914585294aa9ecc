"""Per-sample bookkeeping of a solve: who has finished, how, and after how many steps."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ..solution import Status, take_samples

PATIENCE = 5  # steps without a lower residual before a sample near its dtype's rounding error is given up


@dataclasses.dataclass
class Ledger:
    """One entry per sample still in the computation.

    A tolerance the dtype cannot reach shows as a residual that has stopped falling within ε^¾ (ε: the dtype's
    rounding unit); bfloat16 stalls near 0.5 ε, float32 and float64 at 10 to 1000 ε, depending on the width.
    """

    tol: float
    reach: float  # ε^¾
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
    def single(cls, step: int, residual: Tensor, gap: Tensor, tol: float) -> "Ledger":
        """The page of a solve that was looked at only once, at its end."""
        rows = torch.arange(len(residual), device=residual.device)
        missed = torch.where(residual.isfinite(), Status.MAX_STEPS.code, Status.NONFINITE.code)
        codes = torch.where(residual <= tol, Status.CONVERGED.code, missed)
        steps = torch.full_like(rows, step)
        return cls(tol, 0.0, rows, residual, gap, residual, residual, steps, steps, codes, codes >= 0)

    @classmethod
    def open(cls, batch: int, tol: float, dtype: torch.dtype) -> "Ledger":
        """An empty page, on the host."""
        rows = torch.arange(batch)
        numbers = torch.full((batch,), torch.inf, dtype=torch.promote_types(dtype, torch.float32))
        zeros = torch.zeros_like(rows)
        codes = torch.full_like(rows, Status.MAX_STEPS.code)
        reach = torch.finfo(dtype).eps ** 0.75
        return cls(tol, reach, rows, numbers, numbers, numbers, numbers, zeros, zeros, codes, zeros.bool())

    def observe(self, step: int, residual: Tensor, gap: Tensor, merit: Tensor, slack: Tensor) -> Tensor:
        """Enter one measurement; True where it is the best so far.

        What nearly always holds for all samples at once is asked first: on a CPU this runs at every step.
        """
        residual, gap, merit, slack = (t.to(self.residual) for t in (residual, gap, merit, slack))
        finite = residual.isfinite()
        better = finite & (merit <= self.merit + slack)
        if bool(self.finished.any()):
            better = better & ~self.finished
            self.steps = torch.where(self.finished, self.steps, step)
        else:
            self.steps = torch.full_like(self.steps, step)
        converged = better & (residual <= self.tol)
        self._keep(better, residual, gap, merit)
        stalled = self._stalled(step, residual)
        for mask, status in ((~finite, Status.NONFINITE), (stalled, Status.PRECISION), (converged, Status.CONVERGED)):
            if bool(mask.any()):
                self.codes = torch.where(mask & ~self.finished, status.code, self.codes)
        self.finished = self.finished | converged | stalled | ~finite
        return better

    def _keep(self, better: Tensor, residual: Tensor, gap: Tensor, merit: Tensor) -> None:
        if bool(better.all()):
            self.residual, self.gap, self.merit = residual, gap, merit
        else:
            self.residual = torch.where(better, residual, self.residual)
            self.gap = torch.where(better, gap, self.gap)
            self.merit = torch.where(better, merit, self.merit)

    def _stalled(self, step: int, residual: Tensor) -> Tensor:
        """Where the residual is within reach of rounding and has not fallen for a while."""
        fell = residual < 0.99 * self.lowest
        self.fell = torch.where(fell, step, self.fell)
        self.lowest = torch.where(fell, residual, self.lowest)
        return (residual <= self.reach) & (step - self.fell >= PATIENCE)

    def select(self, index: Tensor) -> "Ledger":
        """The page of some of the samples."""
        fields = [field.name for field in dataclasses.fields(self) if isinstance(getattr(self, field.name), Tensor)]
        return dataclasses.replace(self, **{name: getattr(self, name)[index] for name in fields})


def gather(pages: list[Ledger], values: list[Tensor]) -> tuple[Ledger, Tensor]:
    """Pages and values of all samples, in the order of the batch."""
    if len(pages) == 1:
        return pages[0], values[0]
    names = [field.name for field in dataclasses.fields(Ledger) if isinstance(getattr(pages[0], field.name), Tensor)]
    whole: dict[str, Any] = {name: torch.cat([getattr(page, name) for page in pages]) for name in names}
    joined = dataclasses.replace(pages[0], **whole)
    order = joined.rows.argsort()
    return joined.select(order), take_samples(torch.cat(values), order.to(values[0].device))
