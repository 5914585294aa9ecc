"""The figure of each benchmark, as SVG that reads on a light and on a dark page.

Times and ratios are dots on a logarithmic axis (a bar would need a zero, which such an axis does not have): ours in
blue, what they are compared with in orange. Shares of a whole are stacked bars, growth is curves.
"""

import dataclasses
import io
from collections.abc import Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from .layer import CLOSE
from .measure import PARTS
from .results import Record, Result, format_cell

GREY = "#7d828a"  # as far from white as from the usual dark backgrounds
# Okabe and Ito's colours, without black: colour-blind readers can distinguish them.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
LIBRARIES = {"kerneq": COLOURS[0], "torchdeq": COLOURS[1], "ResNet-18": COLOURS[1]}
EAGER, GRAPH = "one by one", "as one CUDA graph"  # how kernels are launched
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: small files
    "svg.hashsalt": "kerneq",  # and the same bytes every time
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "figure.labelsize": 8,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": GREY,
    "axes.labelcolor": GREY,
    "axes.edgecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "grid.color": GREY,
}
# The benchmarks drawn as dots: kind of table, column, label of the axis.
DOTS = {
    "solvers": ("residual", "÷ torchdeq's best", "time to a residual of 1e-3 ÷ torchdeq's best"),
    "layer": ("layer", "÷ torchdeq's best", "forward + backward ÷ torchdeq's best"),
    "inference": ("prediction", "time (ms)", "prediction (ms), with the 90th percentile"),
    "train": ("step", "time (ms)", "training step (ms)"),
    "compiled": ("compiled", "compiled ÷ eager", "prediction by fixed steps, compiled ÷ eager"),
}


def draw(record: Record) -> bytes | None:
    """Draw the figure of a record, as SVG; None if the record has no table that can be drawn."""
    with rc_context(STYLE):
        figure = draw_figure(record)
        if figure is None:
            return None
        description = f"{record.key}, measured {record.environment['measured']}"
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Description": description})
        return buffer.getvalue()


def draw_figure(record: Record) -> Figure | None:
    """Draw the growth of a benchmark as curves, the parts of a step as stacked bars, everything else as dots."""
    growth, parts, processes = (record.tables(kind) for kind in ("growth", "parts", "processes"))
    if growth:
        return draw_curves(growth)
    if processes:
        return draw_processes(processes)
    if parts:
        return draw_bars(parts)
    if record.name not in DOTS:
        return None
    kind, column, label = DOTS[record.name]
    tables = [table for table in record.tables(kind) if table.asked.get("tol", 1e-3) == 1e-3]
    return draw_dots(tables, column, label) if tables else None


# Dots


@dataclasses.dataclass(frozen=True)
class Dot:
    """One measurement: hollow if its kernels were launched as one CUDA graph."""

    value: float
    low: float  # the ends of its spread; the value itself where none was recorded
    high: float
    launch: str  # EAGER or GRAPH


@dataclasses.dataclass(frozen=True)
class Row:
    """The dots of one solver, layer or model."""

    label: str
    dots: Sequence[Dot]
    remark: str  # written behind the dots, or in their place

    @property
    def library(self) -> str:
        if self.label.startswith("torchdeq"):
            return "torchdeq"
        return "ResNet-18" if self.label.startswith("resnet18") else "kerneq"


def _rows(table: Result, column: str) -> list[Row]:
    """The dots of `column` and of its captured form, and a remark where a gradient is too inaccurate to compare."""
    rows = []
    for row in table.rows:
        label, value, captured = _label(row), row[column], row.get(f"captured {column}")
        found = []
        if value:
            low, high = _spread(row, value)
            launch = GRAPH if label.endswith("captured") else EAGER
            found.append(Dot(value, low, row.get("late (ms)", high), launch))
        if captured:
            found.append(Dot(captured, *_spread(row, captured, "captured "), GRAPH))
        remark, error = "", row.get("gradient off by", 0.0)
        if not found:
            remark = "nothing to compare with" if row.get("time (ms)") else "not reached"
        elif error > CLOSE:
            remark = f"gradient off {error:.2g}"
        rows.append(Row(label, found, remark))
    return rows


def _title(asked: dict[str, Any]) -> str:
    """The title of a table of dots: what it was measured on."""
    title = f"L = {asked['L']:g}" if "L" in asked else f"batch {asked['batch']}"
    return f"{asked['map']} map, {title}" if "map" in asked else title


def _spread(row: dict[str, Any], value: float, launch: str = "") -> tuple[float, float]:
    """The ends of the spread, centred on the value; the value itself where no spread is recorded."""
    half = (row.get(f"{launch}spread (%)") or 0.0) / 200
    return value * (1 - half), value * (1 + half)


def draw_dots(tables: Sequence[Result], column: str, label: str) -> Figure:
    """Draw a row of dots for every label, or its remark, on a logarithmic axis; for ratios with a line at 1."""
    figure, grid = _grid(len(tables), columns=2, height=0.6 + 0.3 * max(len(table.rows) for table in tables))
    panels = [_rows(table, column) for table in tables]
    for axes, table, rows in zip(grid, tables, panels, strict=True):
        ends = [end for row in rows for dot in row.dots for end in (dot.low, dot.high)]
        if "÷" in column:
            ends.append(1.0)
            axes.axvline(1.0, color=GREY, linewidth=0.8, linestyle=":")
        margin = 60 if any(row.dots and row.remark for row in rows) else 4  # space for the text behind the dots
        low, high = min(ends, default=1.0) / 1.5, max(ends, default=1.0) * margin
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        _few_ticks(axes.xaxis, high / low)
        for i, row in enumerate(rows):
            _draw_row(axes, i, row, low)
        axes.set_yticks(range(len(rows)), [row.label for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_title(_title(table.asked))
    figure.supxlabel(label)
    every = [row for rows in panels for row in rows]
    handles = [_handle(name, colour) for name, colour in LIBRARIES.items() if name in {row.library for row in every}]
    if any(dot.launch == GRAPH for row in every for dot in row.dots):
        handles += [_handle(EAGER, GREY), _handle(GRAPH, GREY, hollow=True)]
    if len(handles) > 1:
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    return figure


def _draw_row(axes: Axes, at: int, row: Row, left: float) -> None:
    colour = LIBRARIES[row.library]
    if not row.dots:
        axes.text(left, at, f" {row.remark}", va="center", fontsize=7, style="italic")
    else:
        axes.plot([left, max(dot.high for dot in row.dots)], [at, at], color=GREY, alpha=0.3, linewidth=0.8, zorder=0)
    for k, dot in enumerate(row.dots):
        y = at + 0.4 * (k - (len(row.dots) - 1) / 2)  # two in a row one above the other, each beside its number
        if dot.high > dot.low:
            axes.plot([dot.low, dot.high], [y, y], color=colour, linewidth=1.2)
        fill = "none" if dot.launch == GRAPH else colour
        axes.plot(dot.value, y, "o", markersize=5, markeredgecolor=colour, markerfacecolor=fill)
        words = format_cell(dot.value) + (f", {row.remark}" if row.remark else "")
        axes.annotate(words, (dot.high, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=7)


def _handle(label: str, colour: str, hollow: bool = False) -> Line2D:
    fill = "none" if hollow else colour
    return Line2D([], [], linestyle="", marker="o", markeredgecolor=colour, markerfacecolor=fill, label=label)


# Stacked bars and curves


def draw_bars(tables: Sequence[Result]) -> Figure:
    """Draw one bar for every model, divided among the parts of its step, in % of the card's time."""
    figure, grid = _grid(len(tables), columns=1, height=0.7 + 0.32 * max(len(table.rows) for table in tables))
    for axes, table in zip(grid, tables, strict=True):
        places, left = range(len(table.rows)), [0.0] * len(table.rows)
        for part, colour in zip(PARTS, COLOURS, strict=False):
            shares = [row[f"{part} %"] for row in table.rows]
            axes.barh(places, shares, 0.7, left=left, color=colour, label=part)
            left = [a + b for a, b in zip(left, shares, strict=True)]
        for i, row in enumerate(table.rows):
            words = f" {format_cell(row['card time (ms)'])} ms, {row['kernels']} kernels"
            axes.text(left[i], i, words, va="center", fontsize=7)
        axes.set_xlim(0, 125)
        axes.set_xticks(range(0, 101, 20))
        axes.set_yticks(places, [_label(row) for row in table.rows])
        axes.set_ylim(len(table.rows) - 0.5, -0.5)
        axes.set_title(f"batch {table.asked['batch']}")
    figure.supxlabel("% of the card's time")
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(PARTS))
    return figure


def draw_curves(tables: Sequence[Result]) -> Figure:
    """Draw time above and memory below, a column for each quantity that grows, on logarithmic axes."""
    figure, grid = _grid(2 * len(tables), columns=len(tables), height=2.1)
    lines = [{"time (ms)": EAGER, "captured (ms)": GRAPH}] * len(tables) + [{"peak (MiB)": EAGER}] * len(tables)
    for axes, table, columns in zip(grid, [*tables, *tables], lines, strict=True):
        by = str(table.asked["by"])
        for (column, name), colour in zip(columns.items(), COLOURS, strict=False):
            rows = [row for row in table.rows if row.get(column)]
            if rows:
                axes.plot(
                    [row[by] for row in rows], [row[column] for row in rows], color=colour, label=name, marker="."
                )
            launch = "captured " if name == GRAPH else ""
            for row in rows:
                if row.get(f"{launch}spread (%)") and column != "peak (MiB)":
                    axes.vlines(row[by], *_spread(row, row[column], launch), color=colour, linewidth=4, alpha=0.4)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([row[by] for row in table.rows], [str(row[by]) for row in table.rows])
        axes.xaxis.set_minor_locator(NullLocator())
        low, high = axes.get_ylim()
        if high / low < 10:  # at least a decade, so that small growth does not look large
            low, high = low / (10 * low / high) ** 0.5, high * (10 * low / high) ** 0.5
            axes.set_ylim(low, high)
        _few_ticks(axes.yaxis, high / low)
        axes.set_xlabel(by)
        axes.set_ylabel(next(iter(columns)))
        axes.grid()
    handles, names = grid[0].get_legend_handles_labels()
    if len(names) > 1:
        figure.legend(handles, names, loc="outside upper center", ncols=len(names))
    return figure


def draw_processes(tables: Sequence[Result]) -> Figure:
    """Draw images a second by the number of processes, beside the ideal: so many times those of one process."""
    figure, grid = _grid(len(tables), columns=2, height=2.1)
    for axes, table in zip(grid, tables, strict=True):
        counts = [row["processes"] for row in table.rows]
        ideal = [count * table.rows[0]["images/s"] for count in counts]
        axes.plot(counts, ideal, color=GREY, linestyle=":", label="ideal")
        axes.plot(counts, [row["images/s"] for row in table.rows], color=COLOURS[0], marker="o", label="measured")
        axes.set(xticks=counts, xlabel="processes", ylabel="images/s", title=f"{table.asked['kind']} scaling")
        axes.set_ylim(bottom=0)
        axes.grid()
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def _label(row: dict[str, Any]) -> str:
    """The label of a row: its first column."""
    return str(next(iter(row.values())))


def _grid(panels: int, columns: int, height: float) -> tuple[Figure, list[Axes]]:
    columns = min(columns, panels)
    rows = -(-panels // columns)
    figure = Figure(figsize=(9, 0.4 + height * rows), layout="constrained")
    return figure, [figure.add_subplot(rows, columns, i + 1) for i in range(panels)]


def _few_ticks(axis: Axis, span: float) -> None:
    """Ticks of a logarithmic axis as plain numbers, more of them where it spans little."""
    axis.set_major_locator(LogLocator(subs=(1.0,) if span > 150 else (1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
