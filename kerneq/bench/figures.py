"""Bars, stacked bars and curves as SVG that reads on a light and on a dark page."""

import dataclasses
import io
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

GREY = "#7d828a"  # as far from white as from the usual dark backgrounds
# Okabe and Ito's colours, without black: told apart by colour-blind readers.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: small files
    "svg.hashsalt": "kerneq",  # and the same bytes every time
    "text.color": GREY,
    "axes.labelcolor": GREY,
    "axes.edgecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "grid.color": GREY,
    "grid.alpha": 0.3,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.labelsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "figure.labelsize": 8,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


@dataclasses.dataclass(frozen=True)
class Series:
    """Numbers under one name; None where there is none."""

    name: str
    values: Sequence[float | None]


@dataclasses.dataclass(frozen=True)
class Panel:
    title: str
    labels: Sequence[Any]  # of the bars, or the places of the points
    series: Sequence[Series]


def bars(panels: Sequence[Panel], label: str, reference: float | None = None) -> Figure:
    """A group of bars for every label, on a logarithmic scale; a dash where there is no number."""
    count = max(len(panel.labels) for panel in panels)
    figure, grid = _grid(panels, columns=2, height=0.6 + 0.24 * count)
    for axes, panel in zip(grid, panels, strict=True):
        thick = 0.8 / len(panel.series)
        known = [v for series in panel.series for v in series.values if v]
        least = min([*known, *([reference] if reference else [])], default=1.0) / 2
        for k, series in enumerate(panel.series):
            for i, value in enumerate(series.values):
                at = i + (k - (len(panel.series) - 1) / 2) * thick
                if value:
                    axes.barh(at, value - least, thick, left=least, color=COLOURS[k], label=series.name)
                axes.text(value or least, at, f" {value:.3g}" if value else " –", va="center", fontsize=7)
        axes.set_xscale("log")
        most = 3 * max([least, *known])
        axes.set_xlim(least, most)
        _few_ticks(axes.xaxis, most / least)
        if reference:
            axes.axvline(reference, color=GREY, linewidth=0.8, linestyle=":")
        _rows(axes, panel)
    figure.supxlabel(label)
    _legend(figure, grid)
    return figure


def stacked(panels: Sequence[Panel], label: str, ends: Sequence[Sequence[str]]) -> Figure:
    """One bar for every label, divided among the series; `ends` are written behind the bars."""
    count = max(len(panel.labels) for panel in panels)
    figure, grid = _grid(panels, columns=1, height=0.7 + 0.32 * count)
    for axes, panel, texts in zip(grid, panels, ends, strict=True):
        left = [0.0] * len(panel.labels)
        for k, series in enumerate(panel.series):
            values = [value or 0.0 for value in series.values]
            axes.barh(range(len(values)), values, 0.7, left=left, color=COLOURS[k], label=series.name)
            left = [a + b for a, b in zip(left, values, strict=True)]
        for i, text in enumerate(texts):
            axes.text(left[i], i, f" {text}", va="center", fontsize=7)
        axes.set_xlim(0, 1.25 * max(left))
        axes.set_xticks([tick for tick in axes.get_xticks() if tick <= 1.001 * max(left)])
        _rows(axes, panel)
    figure.supxlabel(label)
    _legend(figure, grid)
    return figure


def curves(panels: Sequence[Panel], places: Sequence[str], labels: Sequence[str], columns: int) -> Figure:
    """Lines on logarithmic axes, in rows of `columns` panels; an axis label for every panel."""
    figure, grid = _grid(panels, columns, height=2.1)
    for axes, panel, place, label in zip(grid, panels, places, labels, strict=True):
        for k, series in enumerate(panel.series):
            points = [(x, y) for x, y in zip(panel.labels, series.values, strict=True) if y]
            if points:
                axes.plot(*zip(*points, strict=True), color=COLOURS[k], label=series.name, marker=".")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(panel.labels, [str(x) for x in panel.labels])
        axes.xaxis.set_minor_locator(NullLocator())
        low, high = axes.get_ylim()
        if high / low < 10:  # at least a decade, or what hardly grows would look as if it did
            low, high = low / (10 * low / high) ** 0.5, high * (10 * low / high) ** 0.5
            axes.set_ylim(low, high)
        _few_ticks(axes.yaxis, high / low)
        axes.set_title(panel.title)
        axes.set_xlabel(place)
        axes.set_ylabel(label)
        axes.grid()
    _legend(figure, grid)
    return figure


def svg(figure: Figure, description: str) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Description": description})
    return buffer.getvalue()


def _grid(panels: Sequence[Panel], columns: int, height: float) -> tuple[Figure, list[Axes]]:
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(9, 0.4 + height * rows), layout="constrained")
    return figure, [figure.add_subplot(rows, columns, i + 1) for i in range(len(panels))]


def _rows(axes: Axes, panel: Panel) -> None:
    axes.set_yticks(range(len(panel.labels)), panel.labels)
    axes.set_ylim(len(panel.labels) - 0.5, -0.5)  # also of rows without a bar
    axes.set_title(panel.title)


def _few_ticks(axis: Axis, span: float) -> None:
    """Ticks of a logarithmic axis as plain numbers, more of them where it spans little."""
    axis.set_major_locator(LogLocator(subs=(1.0,) if span > 50 else (1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _legend(figure: Figure, grid: Sequence[Axes]) -> None:
    """One legend for all panels, if there is anything to tell apart."""
    named: dict[str, Any] = {}
    for axes in grid:
        handles, names = axes.get_legend_handles_labels()
        named |= dict(zip(names, handles, strict=True))
    if len(named) > 1:
        figure.legend(list(named.values()), list(named), loc="outside upper center", ncols=len(named))
