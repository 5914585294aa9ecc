"""Table 1 from a denoising run: log test error at the best norm, and how many models failed."""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Row:
    epoch: int
    scheme: str
    mean: float  # of log MSE at the norm where it is least
    deviation: float
    norm: float  # that norm's average spectral norm
    failed: int  # models of the whole grid whose error is not finite


def table(result: dict[str, Any], epochs: list[int]) -> list[Row]:
    """As the paper counts: a failed model takes the largest finite error of its epoch and scheme."""
    errors = np.array(result["errors"], dtype=float)  # (epoch, scheme, norm, seed); null is NaN
    norms = np.array(result["norms"], dtype=float)
    rows = []
    for epoch in epochs:
        for number, scheme in enumerate(result["schemes"]):
            values = errors[epoch, number]
            failed = ~np.isfinite(values)
            if failed.all():
                rows.append(Row(epoch, scheme, float("nan"), float("nan"), float("nan"), int(failed.sum())))
                continue
            logs = np.log(np.where(failed, values[~failed].max(), values))
            best = int(logs.mean(1).argmin())
            spread = logs[best].std(ddof=1) if logs.shape[1] > 1 else 0.0
            rows.append(
                Row(epoch, scheme, logs[best].mean(), float(spread), norms[number, best].mean(), int(failed.sum()))
            )
    return rows
