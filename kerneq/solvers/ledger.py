"""Per-sample bookkeeping of a solve: who has finished, how, and after how many steps."""

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..solution import Status, take_samples

Numbers = npt.NDArray[Any]

PATIENCE = 5  # steps without a lower residual before a sample near its dtype's rounding error is given up

_CONVERGED, _PRECISION, _NONFINITE = Status.CONVERGED.code, Status.PRECISION.code, Status.NONFINITE.code


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
        missed = torch.where(residual.isfinite(), Status.MAX_STEPS.code, _NONFINITE)
        codes = torch.where(residual <= tol, _CONVERGED, missed)
        steps = torch.full_like(rows, step)
        return cls(tol, 0.0, rows, residual, gap, residual, residual, steps, steps, codes, codes >= 0)

    @classmethod
    def open(cls, batch: int, tol: float, dtype: torch.dtype) -> "Ledger":
        """An empty page, on the host; every column has memory of its own, since `observe` writes in place."""
        rows = torch.arange(batch)
        residual, gap, merit, lowest = torch.full(
            (4, batch), torch.inf, dtype=torch.promote_types(dtype, torch.float32)
        )
        fell, steps = torch.zeros(2, batch, dtype=torch.int64)
        codes = torch.full_like(rows, Status.MAX_STEPS.code)
        reach = torch.finfo(dtype).eps ** 0.75
        finished = torch.zeros(batch, dtype=torch.bool)
        return cls(tol, reach, rows, residual, gap, merit, lowest, fell, steps, codes, finished)

    def observe(
        self, step: int, residual: Tensor, gap: Tensor, merit: Tensor | None = None, slack: Tensor | None = None
    ) -> Tensor:
        """Enter one measurement; True where it is the best so far: by `merit`, give or take `slack`, or by residual."""
        # Dynamo would take the NumPy for its own. As a decorator, `disable` would import it for everybody.
        if not torch.compiler.is_compiling():
            return self._enter(step, residual, gap, merit, slack)
        enter = torch.compiler.disable(self._enter)  # type: ignore[no-untyped-call]
        better: Tensor = enter(step, residual, gap, merit, slack)
        return better

    def _enter(self, step: int, residual: Tensor, gap: Tensor, merit: Tensor | None, slack: Tensor | None) -> Tensor:
        """In NumPy, on the memory of the tensors: on a CPU this runs at every step, and on so few numbers an operation
        of PyTorch costs several of NumPy's."""
        dtype, finished = self.residual.dtype, self.finished.numpy()
        if merit is None or slack is None:
            r, g = _on_host((residual, gap), dtype)
            e, limit = r, self.merit.numpy()
        else:
            r, g, e, margin = _on_host((residual, gap, merit, slack), dtype)
            with np.errstate(over="ignore"):  # an energy near the largest number
                limit = self.merit.numpy() + margin
        running, finite = ~finished, np.isfinite(r)
        better = running & finite & (e <= limit)
        np.copyto(self.steps.numpy(), step, where=running)
        for column, found in ((self.residual, r), (self.gap, g), (self.merit, e)):
            np.copyto(column.numpy(), found, where=better)
        ends = ((~finite, _NONFINITE), (self._stalled(step, r), _PRECISION), (better & (r <= self.tol), _CONVERGED))
        for mask, code in ends:
            if np.count_nonzero(mask):
                np.copyto(self.codes.numpy(), code, where=mask & running)
                finished |= mask
        return torch.from_numpy(better)

    def _stalled(self, step: int, residual: Numbers) -> Numbers:
        """Where the residual is within reach of rounding and has not fallen for a while."""
        lowest, fell = self.lowest.numpy(), self.fell.numpy()
        falls = residual < 0.99 * lowest
        np.copyto(fell, step, where=falls)
        np.copyto(lowest, residual, where=falls)
        stalled: Numbers = (residual <= self.reach) & (step - fell >= PATIENCE)
        return stalled

    def select(self, index: Tensor) -> "Ledger":
        """The page of some of the samples."""
        fields = [field.name for field in dataclasses.fields(self) if isinstance(getattr(self, field.name), Tensor)]
        return dataclasses.replace(self, **{name: getattr(self, name)[index] for name in fields})


def _on_host(measured: tuple[Tensor, ...], dtype: torch.dtype) -> Numbers | list[Numbers]:
    """Measurements as arrays; from another device in one transfer, since each would wait for it."""
    if measured[0].device.type != "cpu":
        together: Numbers = torch.stack([t.to(dtype) for t in measured]).cpu().numpy()
        return together
    return [t.to(dtype).numpy() for t in measured]


def gather(pages: list[Ledger], values: list[Tensor]) -> tuple[Ledger, Tensor]:
    """Pages and values of all samples, in the order of the batch."""
    if len(pages) == 1:
        return pages[0], values[0]
    names = [field.name for field in dataclasses.fields(Ledger) if isinstance(getattr(pages[0], field.name), Tensor)]
    whole: dict[str, Any] = {name: torch.cat([getattr(page, name) for page in pages]) for name in names}
    joined = dataclasses.replace(pages[0], **whole)
    order = joined.rows.argsort()
    return joined.select(order), take_samples(torch.cat(values), order.to(values[0].device))
