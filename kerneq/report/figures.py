"""Curves over epochs as inline SVG."""

import io
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kerneq.report.runs import Run

# Okabe and Ito's colours: told apart by colour-blind readers, and in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")


def curves(runs: Sequence[Run], group: str, number: str, label: str, log: bool = False) -> str | None:
    """One line per run; None if no run measured the number."""
    # A run keeps its colour from figure to figure, also where others have nothing to show.
    lines = [(COLOURS[i % len(COLOURS)], run.name, *run.curve(group, number)) for i, run in enumerate(runs)]
    lines = [line for line in lines if line[2]]
    if not lines:
        return None
    figure = Figure(figsize=(5.2, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for colour, name, epochs, values in lines:
        axes.plot(epochs, values, color=colour, label=name, linewidth=1.8, marker=".", markersize=5)
    if log and all(value > 0 for *_, values in lines for value in values):
        axes.set_yscale("log")
    axes.set_xlabel("epoch")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, fontsize=8)
    return svg(figure)


def svg(figure: Figure) -> str:
    """The figure as an `<svg>` element, without the date and the header of a file of its own."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
