"""A run in the terminal: one line per epoch, and under them a bar with the numbers of the moment."""

from collections.abc import Mapping
from typing import Any, final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kerneq.training.watch import AbstractWatcher, Moment


@final
class Terminal(AbstractWatcher):
    """Where the output is no terminal (a file, a pipe), only the lines of finished epochs are written."""

    def __init__(self, console: Console | None = None, title: str = ""):
        self.console = console if console is not None else Console()
        self.title = title
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(compact=True),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self.task = self.progress.add_task(title or "starting", total=None, numbers="")
        self.progress.start()

    def tick(self, moment: Moment) -> None:
        words = score_words(vars(moment.scores))
        if moment.images_per_second:
            words.insert(2, f"{moment.images_per_second:,.0f} images/s")
        self.progress.update(
            self.task,
            description=f"{self.title} epoch {moment.epoch}/{moment.epochs}".strip(),
            total=moment.steps,
            completed=moment.step,
            numbers=" · ".join(words),
        )

    def epoch(self, row: Mapping[str, Any]) -> None:
        self.console.print(epoch_line(row, self.title), highlight=False, soft_wrap=True)

    def close(self) -> None:
        self.progress.stop()


def epoch_line(row: Mapping[str, Any], title: str = "") -> str:
    """A finished epoch as one line; solver numbers are those on held-out images, where there are any."""
    parts = [f"{title} epoch {row['epoch']:>3}".strip()]
    for group in ("train", "validation"):
        if row[group] is not None:
            parts.append(f"{group} loss {row[group]['loss']:.4f} accuracy {row[group]['accuracy']:.2%}")
    solver = score_words(row["validation"] or row["train"])[2:]
    parts += [", ".join(solver)] if solver else []
    parts += [" ".join(f"{name} {value:.3g}" for name, value in largest(row["diagnostics"]).items())]
    return " | ".join(part for part in [*parts, f"{row['seconds']:.1f} s"] if part)


def largest(diagnostics: Mapping[str, float]) -> dict[str, float]:
    """The largest value of each kind of number over the branches: branch0/norm, branch1/norm → norm."""
    found: dict[str, float] = {}
    for name, value in diagnostics.items():
        kind = name.rpartition("/")[2]
        found[kind] = max(value, found.get(kind, value))
    return found


def score_words(scores: Mapping[str, Any]) -> list[str]:
    """loss, accuracy and, where there is an equilibrium, how its solves went."""
    words = [f"loss {scores['loss']:.4f}", f"accuracy {scores['accuracy']:.2%}"]
    if scores["steps"] is not None:
        words += [f"{scores['steps']:.1f} steps", f"residual {scores['residual']:.1e}"]
        words += [f"{scores['unconverged']:.1%} unconverged"]
    return words
