"""The page: results, curves and solver behaviour of some runs, in one file that needs nothing else."""

import importlib.resources
import io
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..run import Record, Run, TrainingError, best_accuracy, write_atomically
from ..training import metrics

# Okabe and Ito's colours: told apart by colour-blind readers, and in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")


def gather(folders: Sequence[Path]) -> list[Record]:
    """The runs in some folders, the best on the test images first, those not evaluated last."""
    records = [Run(folder).read() for folder in folders]
    return sorted(records, key=lambda record: record.test.get("accuracy", -1.0), reverse=True)


def render(folders: Sequence[Path], output: Path) -> None:
    """Write the page about the runs in `folders` to `output`."""
    records = gather(folders)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingError(f"{output} could not be written: {error.strerror}.") from None
    write_atomically(output, page(records).encode())


def page(records: Sequence[Record]) -> str:
    """The page as HTML: every metric is a column of its table, and a figure where it has a curve."""
    figures = [(metric.curve.caption, draw(records, metric)) for metric in metrics.METRICS if metric.curve is not None]
    template = importlib.resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return (
        Environment(autoescape=True, trim_blocks=True)
        .from_string(template)
        .render(
            runs=records,
            metrics=metrics.METRICS,
            best_accuracy=best_accuracy,
            figures=[(caption, drawing) for caption, drawing in figures if drawing is not None],
        )
    )


def draw(records: Sequence[Record], metric: metrics.Metric) -> str | None:
    """A metric over the epochs, one line per run, as an `<svg>` element; None if no run measured it."""
    if metric.curve is None:
        return None
    curves = [record.curve(metric.curve.group, metric.name) for record in records]
    measured = [value for _, values in curves for value in values]
    if not measured:
        return None
    figure = Figure(figsize=(5.2, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for place, (record, (epochs, values)) in enumerate(zip(records, curves, strict=True)):
        # A run keeps its colour from figure to figure, also where others have nothing to show.
        colour = COLOURS[place % len(COLOURS)]
        if epochs:
            axes.plot(epochs, values, color=colour, label=record.name, linewidth=1.8, marker=".", markersize=5)
    if metric.curve.log and min(measured) > 0:
        axes.set_yscale("log")
    axes.set_xlabel("epoch")
    axes.set_ylabel(metric.title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, fontsize=8)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()[buffer.getvalue().index("<svg") :]  # without the header of a file of its own
