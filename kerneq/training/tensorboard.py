"""A run as TensorBoard scalars."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from torch.utils.tensorboard.writer import SummaryWriter

from kerneq.training.watch import AbstractWatcher, Moment


@final
class TensorBoard(AbstractWatcher):
    """Scalars `train/…`, `validation/…` and `diagnostics/…` per epoch, `now/…` in between; x is the step."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.writer: SummaryWriter | None = None  # opened by the first number, so that a refused run leaves no file

    def tick(self, moment: Moment) -> None:
        numbers = {"loss": moment.scores.loss, "accuracy": moment.scores.accuracy, "rate": moment.rate}
        self._write("now", numbers | {"images_per_second": moment.images_per_second}, moment.step)

    def epoch(self, row: Mapping[str, Any]) -> None:
        for group in ("train", "validation", "diagnostics"):
            self._write(group, row[group] or {}, row["step"])

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()

    def _write(self, group: str, numbers: Mapping[str, Any], step: int) -> None:
        if self.writer is None:
            self.writer = SummaryWriter(str(self.folder))
        for name, value in numbers.items():
            if value is not None:
                self.writer.add_scalar(f"{group}/{name}", value, step)
