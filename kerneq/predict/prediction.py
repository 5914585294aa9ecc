"""What a model says about one picture, and whether it may be trusted to mean it."""

import dataclasses
from pathlib import Path
from typing import final

from kerneq.solution import Status


@final
@dataclasses.dataclass(frozen=True)
class Prediction:
    """The likeliest classes, best first. With several equilibrium layers, the worst of each number.

    `status`, `steps` and `residual` are None for a model without an equilibrium.
    """

    path: Path
    classes: tuple[str, ...]
    probabilities: tuple[float, ...]
    status: Status | None
    steps: int | None  # of the layer that took the most
    residual: float | None  # ‖f(z) − z‖ / ‖f(z)‖ of the layer that is furthest from its equilibrium

    @property
    def converged(self) -> bool:
        """Whether the prediction comes from equilibria that were found (or from a model that has none)."""
        return self.status in (None, Status.CONVERGED)
