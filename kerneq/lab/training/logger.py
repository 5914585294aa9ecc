"""What is told of a run while it happens, and its loggers: the terminal, TensorBoard, or a class of your own."""

import abc
import dataclasses
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, final

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from . import metrics

BAR = 12
TAKEN = BAR + 16  # columns of the bar, the share done, the time left, and the spaces between them


@final
@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a run is, and how the present epoch has gone so far."""

    epoch: int  # from 1
    epochs: int
    step: int  # of the whole run
    steps: int
    rate: float  # learning rate
    images_per_second: float  # in this epoch so far
    scores: metrics.Scores


class AbstractLogger(abc.ABC):
    """Told about a run while it happens; must not change it. To write one: `log_epoch`, and what else it listens to."""

    @abc.abstractmethod
    def log_epoch(self, row: Mapping[str, Any]) -> None:
        """Called with each line of metrics.jsonl."""

    def log_progress(self, progress: Progress) -> None:  # noqa: B027
        """Called a few times a second."""

    def log_message(self, text: str) -> None:  # noqa: B027
        """Called with a sentence: how long the run will take, that it is about to stop."""

    def close(self) -> None:  # noqa: B027
        """Called once, however the run ended."""


def announce(loggers: Sequence[AbstractLogger], text: str) -> None:
    """Send a sentence to every logger."""
    for logger in loggers:
        logger.log_message(text)


@final
class Clock:
    """Where the time of a run goes: every second since `began` (of `time.monotonic`) belongs to one phase."""

    START: ClassVar = ("imports", "device", "data", "model", "first steps")

    def __init__(self, began: float):
        self.last = began
        self.seconds: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """Count what has passed since the last call as time of this phase."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last
        self.last = now

    def __str__(self) -> str:
        start = {phase: spent for phase, spent in self.seconds.items() if phase in self.START}
        others = {phase: spent for phase, spent in self.seconds.items() if phase not in self.START}
        texts = [", ".join(f"{phase} {spent:.1f}" for phase, spent in some.items()) for some in (start, others)]
        return f"{sum(self.seconds.values()):.1f} s: start {sum(start.values()):.1f} ({texts[0]}), {texts[1]}"


@final
class TerminalLogger(AbstractLogger):
    """One line per epoch, and under them a bar with the numbers of the moment.

    Where the output is no terminal (a file, a pipe), there is no bar, only lines.
    """

    def __init__(self, console: Console | None = None, title: str = ""):
        self.console = console if console is not None else Console()
        self.title = title
        self.bar = ProgressBar(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=BAR),
            TaskProgressColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self.task = self.bar.add_task(title or "starting", total=None, numbers="")
        self.bar.start()

    def log_progress(self, progress: Progress) -> None:
        # Those over solves wait for the end of the epoch: with a fixed number of steps none may have reached `tol` at
        # first, which sounds worse than it is.
        words = [*metrics.format_scores(progress.scores, "images"), f"{progress.images_per_second:,.0f} images/s"]
        description = f"{self.title} epoch {progress.epoch}/{progress.epochs}".strip()
        self.bar.update(
            self.task,
            description=description,
            total=progress.steps,
            completed=progress.step,
            numbers=join_fitting(words, " · ", self.console.width - len(description) - TAKEN, least=0),
        )

    def log_epoch(self, row: Mapping[str, Any]) -> None:
        width = self.console.width if self.console.is_terminal else math.inf
        self.console.print(format_epoch(row, self.title, width), highlight=False, soft_wrap=True, markup=False)

    def log_message(self, text: str) -> None:
        self.console.print(f"{self.title} {text}".strip(), highlight=False, soft_wrap=True, markup=False)

    def close(self) -> None:
        self.bar.stop()


def join_fitting(parts: Sequence[str], separator: str, width: float, least: int) -> str:
    """As many of the parts, and at least so many, as a line of `width` columns has room for."""
    lines = [separator.join(parts[:count]) for count in range(least, len(parts) + 1)]
    return max((line for line in lines if len(line) <= width), key=len, default=lines[0])


def format_epoch(row: Mapping[str, Any], title: str = "", width: float = math.inf) -> str:
    """A finished epoch as one line, of as many parts as fit into `width` columns.

    Solver numbers are those on held-out images, where there are any. The solves "above tol" are all in early epochs
    where their number of steps is fixed: training needs no better ones.
    """
    groups = [("", row["train"]), ("held out ", row["validation"])]
    parts = [f"{title} epoch {row['epoch']:>3}".strip()]
    parts += [word + " ".join(metrics.format_scores(scores, "images")) for word, scores in groups if scores is not None]
    parts.append(f"{row['seconds']:.1f} s")
    parts += metrics.format_scores(row["validation"] or row["train"], "solves")
    parts += metrics.format_scores(row["train"], "adjoints")
    parts.append(" ".join(f"{name} {value:.3g}" for name, value in take_largest(row["diagnostics"]).items()))
    return join_fitting([part for part in parts if part], " | ", width, least=2)


def take_largest(diagnostics: Mapping[str, float]) -> dict[str, float]:
    """The largest value of each kind of number over the branches: branch0/norm, branch1/norm → norm."""
    found: dict[str, float] = {}
    for name, value in diagnostics.items():
        kind = name.rpartition("/")[2]
        found[kind] = max(value, found.get(kind, value))
    return found


@final
class TensorBoardLogger(AbstractLogger):
    """Scalars `train/…`, `validation/…` and `diagnostics/…` per epoch, `now/…` in between; x is the step."""

    def __init__(self, folder: Path):
        # Slow to import: here, so that neither a run without it nor the first step of one with it has to wait.
        from torch.utils.tensorboard.writer import SummaryWriter

        self.open = partial(SummaryWriter, str(folder))
        self.lost = False
        self.writer: SummaryWriter | None = None  # opened by the first number, so that a refused run leaves no file

    def log_progress(self, progress: Progress) -> None:
        numbers = {m.name: progress.scores[m.name] for m in metrics.METRICS if m.over == "images"}
        speed = {"rate": progress.rate, "images_per_second": progress.images_per_second}
        self._write("now", numbers | speed, progress.step)

    def log_epoch(self, row: Mapping[str, Any]) -> None:
        for group in ("train", "validation", "diagnostics"):
            self._write(group, row[group] or {}, row["step"])

    def close(self) -> None:
        if self.writer is not None:
            with suppress(OSError):
                self.writer.close()

    def _write(self, group: str, numbers: Mapping[str, float | None], step: int) -> None:
        if self.lost:
            return
        try:
            if self.writer is None:
                self.writer = self.open()
            for name, value in numbers.items():
                if value is not None:
                    self.writer.add_scalar(f"{group}/{name}", value, step)
        except OSError as error:  # a full disk, say: a logger must not end the run
            self.lost = True
            warnings.warn(f"TensorBoard's curves end here: {error.strerror}. The run goes on.", stacklevel=1)
