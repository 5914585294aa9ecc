"""Run folders → one HTML page: results, curves and solver behaviour, in one file that needs nothing else."""

import importlib.resources
import io
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .run import Run, TrainingError, write_atomically
from .training import metrics

# Okabe and Ito's colours: told apart by colour-blind readers, and in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")


def gather(folders: Sequence[Path]) -> list[Run]:
    """The runs in some folders, the best on the test images first, those not evaluated last."""
    return sorted(map(Run, folders), key=lambda run: run.test().get("accuracy", -1.0), reverse=True)


def render(folders: Sequence[Path], output: Path) -> None:
    """Write the page about the runs in `folders` to `output`: every metric is a column, and a figure if it is drawn."""
    runs = gather(folders)
    figures = {metric.caption: draw(runs, metric) for metric in metrics.METRICS if metric.caption}
    template = importlib.resources.files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    page = Environment(autoescape=True, trim_blocks=True).from_string(template)
    shown = [metric for metric in metrics.METRICS if metric.over != "adjoints"]  # those are of training
    text = page.render(runs=runs, metrics=shown, figures=figures)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingError(f"{output} could not be written: {error.strerror}.") from None
    write_atomically(output, text.encode())


def draw(runs: Sequence[Run], metric: metrics.Metric) -> str:
    """A metric over the epochs, one line per run, as an `<svg>` element; empty if no run measured it."""
    figure = Figure(figsize=(5.2, 3.2), layout="constrained")
    axes = figure.add_subplot()
    measured: list[float] = []
    for place, run in enumerate(runs):
        scores = {row["epoch"]: (row[metric.drawn] or {}).get(metric.name) for row in run.rows()}
        curve = {epoch: value for epoch, value in scores.items() if value is not None}
        # A run keeps its colour from figure to figure, also where others have nothing to show.
        colour = COLOURS[place % len(COLOURS)]
        if curve:
            values = list(curve.values())
            name = "".join(c if c.isprintable() else "\ufffd" for c in run.name)
            label = name.replace("$", r"\$")  # which begins a formula
            axes.plot(list(curve), values, color=colour, label=label, linewidth=1.8, marker=".", markersize=5)
        measured += curve.values()
    if not measured:
        return ""
    if metric.log and min(measured) > 0:
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
