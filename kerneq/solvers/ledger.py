"""Per-sample bookkeeping of a solve: who has finished, how, and after how many steps."""

import torch
from torch import Tensor

from ..solution import Status

PATIENCE = 5  # steps without a lower residual before a sample near its dtype's rounding error is given up


class Ledger:
    """One row per sample of the batch; `rows` are those still in the computation.

    A tolerance the dtype cannot reach shows as a residual that has stopped falling within ε^¾ (ε: the dtype's
    rounding unit); bfloat16 stalls near 0.5 ε, float32 and float64 at 10 to 1000 ε, depending on the width.
    """

    def __init__(self, batch: int, tol: float, dtype: torch.dtype, device: torch.device):
        self.tol, self.reach = tol, torch.finfo(dtype).eps ** 0.75
        self.rows = torch.arange(batch, device=device)
        self.residual = torch.full((batch,), torch.inf, device=device, dtype=torch.promote_types(dtype, torch.float32))
        self.gap = self.residual.clone()  # ‖f(z) − z‖ that goes with the residual
        self.merit = self.residual.clone()  # lowest energy, or lowest residual
        self.lowest = self.residual.clone()
        self.fell = torch.zeros_like(self.rows)  # the step at which `lowest` last fell
        self.steps = torch.zeros_like(self.rows)
        self.codes = torch.full_like(self.rows, Status.MAX_STEPS.code)
        self.finished = torch.zeros_like(self.rows, dtype=torch.bool)

    def observe(self, step: int, residual: Tensor, gap: Tensor, merit: Tensor, slack: Tensor) -> Tensor:
        """Enter one measurement of the samples in `rows`; True where it is the best so far."""
        rows, waiting = self.rows, ~self.finished[self.rows]
        residual, gap, merit, slack = (t.to(self.residual) for t in (residual, gap, merit, slack))
        finite = residual.isfinite()
        better = waiting & finite & (merit <= self.merit[rows] + slack)
        converged = better & (residual <= self.tol)
        fell = residual < 0.99 * self.lowest[rows]
        last = torch.where(fell, step, self.fell[rows])
        stalled = waiting & finite & ~converged & (residual <= self.reach) & (step - last >= PATIENCE)
        broken = waiting & ~finite

        self.residual[rows] = torch.where(better, residual, self.residual[rows])
        self.gap[rows] = torch.where(better, gap, self.gap[rows])
        self.merit[rows] = torch.where(better, merit, self.merit[rows])
        self.lowest[rows] = torch.where(fell, residual, self.lowest[rows])
        self.fell[rows] = last
        self.steps[rows] = torch.where(waiting, step, self.steps[rows])
        codes = self.codes[rows]
        for mask, status in (
            (converged, Status.CONVERGED),
            (stalled, Status.PRECISION),
            (broken, Status.NONFINITE),
        ):
            codes = torch.where(mask, status.code, codes)
        self.codes[rows] = codes
        self.finished[rows] |= converged | stalled | broken
        return better
