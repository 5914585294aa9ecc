"""The drawings of a report, as SVG that is readable on light and on dark ground: numbers in, a file's bytes out."""

import contextlib
import dataclasses
import io
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, final

import matplotlib
import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK = "#010203"  # stands for the colour of the text around, which SVG calls currentColor
STYLE = "<style>svg{color:#1b1d21}@media(prefers-color-scheme:dark){svg{color:#e6e6e6}}</style>"
# Okabe and Ito's colours: told apart by colour-blind readers, and in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", INK, "#8c8c8c")
GREY = COLOURS[-1]
LINES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D")
SETTINGS: Any = {  # every name is one of matplotlib's
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "font.size": 9,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "kerneq",  # the same numbers give the same file
    "text.parse_math": False,  # a dollar in a run's name begins no formula
}


@final
@dataclasses.dataclass(frozen=True)
class Style:
    """How a figure shows a run; those of one label are one entry of its legend."""

    label: str
    place: int  # of its colour
    counts: bool = True  # or its line is thin, its point hollow

    @property
    def colour(self) -> str:
        return COLOURS[self.place % len(COLOURS)]


Trace = Sequence[float | None]  # None where there is no number
Curve = tuple[Style, Sequence[float], Trace]  # x and y
Point = tuple[Style, float, float, tuple[float, float] | None]  # x, accuracy, and the ends of its bar


@final
@dataclasses.dataclass
class Canvas:
    """A figure with its axes side by side, and the SVG it becomes."""

    figure: Figure
    axes: list[Axes]
    svg: bytes = b""


@contextlib.contextmanager
def open_canvas(height: float = 2.7, columns: int = 1, width: float = 4.4) -> Iterator[Canvas]:
    """Yield a canvas to draw on; its legend and its SVG are made when the block ends.

    The legend is below the axes, as many labels beside each other as there is room for, and makes the figure so much
    higher. Letters that no font has become boxes.
    """
    with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")
        figure = Figure(figsize=(columns * width, height), layout="constrained")
        canvas = Canvas(figure, list(np.atleast_1d(figure.subplots(1, columns))))
        for axes in canvas.axes:
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", alpha=0.25)
        yield canvas
        found = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in canvas.axes]
        handles = {text: handle for pairs in found for handle, text in pairs}
        if handles:
            beside = max(1, min(4, int(columns * width / (0.075 * max(map(len, handles)) + 0.45))))
            figure.set_size_inches(columns * width, height + 0.19 * math.ceil(len(handles) / beside))
            figure.legend(handles.values(), handles, loc="outside lower left", ncols=beside)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue()
    head, _, rest = text[text.index("<svg") :].partition(">")  # without the header of a document
    canvas.svg = f"{head}>{STYLE}{rest.replace(INK, 'currentColor')}".encode()


def clean(label: str) -> str:
    """Return a name as a figure can show it."""
    text = "".join(c if c.isprintable() else "\ufffd" for c in label)
    return f"\u200b{text}" if text.startswith("_") else text  # matplotlib leaves out of its legends what begins with _


def plot(axes: Axes, curves: Sequence[Curve], *, log: bool = False, marker: str = ".") -> None:
    """Plot a line for each curve, a dot for one of a single point; those that count above the others, and thicker."""
    for style, xs, ys in sorted(curves, key=lambda curve: curve[0].counts):
        pairs = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None and (y > 0 or not log)]
        if pairs:
            line = LINES[style.place // len(COLOURS) % len(LINES)]
            width, dots = (1.7, marker) if style.counts else (0.6, "")
            (drawn,) = axes.plot(*zip(*pairs, strict=True), line, color=style.colour, linewidth=width)
            drawn.set(label=clean(style.label), marker=dots if len(pairs) > 1 else "o")
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(ticker.LogFormatter())  # matplotlib's usual one writes formulas
        axes.yaxis.set_minor_formatter(ticker.LogFormatter(minor_thresholds=(1.3, 0.7)))


def draw_curves(curves: Sequence[Curve], *, x: str, y: str, log: bool = False, percent: bool = False) -> bytes:
    """Draw curves over whole numbers, epochs or steps, one line a run."""
    log = log and min(value for *_, ys in curves for value in ys if value is not None) > 0
    most = max(len(xs) for _, xs, _ in curves)
    with open_canvas() as canvas:
        axes = canvas.axes[0]
        plot(axes, curves, log=log, marker="." if most <= 30 else "")
        axes.set(xlabel=x, ylabel=y)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, min_n_ticks=1))
        if percent:
            axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=None))
    return canvas.svg


def draw_accuracy(curves: Sequence[Curve], x: str, y: str) -> bytes:
    """Draw accuracy against the radius of a ball, one line a run."""
    with open_canvas() as canvas:
        axes = canvas.axes[0]
        plot(axes, curves, marker="o")
        axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0))
        axes.set(xlabel=x, ylabel=y, ylim=(0, 1.02))
    return canvas.svg


def draw_points(points: Sequence[Point], x: str, y: str) -> bytes:
    """Draw accuracy against what a model costs, one point a run or a group of seeds, with a bar as long as its noise.

    Up is as far as the error is halved, and below the figure are errors of more than four times the median, so that 95
    and 96 % are told apart where another run has 60.
    """
    errors = [1 - accuracy for *_, accuracy, _ in points]
    worst = max([0.01, *(error for error in errors if error <= 0.02 + 4 * median(errors))])
    with open_canvas(2.8, width=4.4 if len(points) <= len(COLOURS) else 8) as canvas:
        axes = canvas.axes[0]
        for style, cost, accuracy, bar in sorted(points, key=lambda point: point[0].counts):
            if 1 - accuracy > worst:
                label = clean(f"{style.label} ({accuracy:.1%}, below)")
                axes.plot(cost, 1 - 1.1 * worst, "v", color=style.colour, markersize=7, label=label)
                continue
            marker, fill = MARKERS[style.place // len(COLOURS) % len(MARKERS)], "full" if style.counts else "none"
            label = clean(style.label)
            axes.plot(cost, accuracy, marker, color=style.colour, markersize=7, fillstyle=fill, label=label)
            if bar:
                axes.vlines(cost, bar[0], min(bar[1], 1), color=style.colour, linewidth=1, alpha=0.6)
        axes.margins(0.12)
        scale_by_error(axes)
        thousands = ticker.EngFormatter()  # which would also write 0.8 seconds as 800 m
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda n, _: thousands(n) if n >= 1 else f"{n:g}"))
        axes.xaxis.set_major_locator(ticker.MaxNLocator(6))
        axes.set(xlabel=x, ylabel=y)
    return canvas.svg


def scale_by_error(axes: Axes) -> None:
    """Make a y axis of accuracies logarithmic in the error."""
    axes.set_yscale("function", functions=(lambda a: -np.log(np.maximum(1 - a, 1e-3)), lambda y: 1 - np.exp(-y)))
    low, high = axes.get_ylim()
    ticks = [0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.94, 0.96, 0.97, 0.98, 0.99, 0.995]
    ticks += [0.91, 0.93, 0.95, 0.955, 0.965] if 1 - low < 4 * (1 - high) else []
    inside = [tick for tick in ticks if low <= tick <= high]
    axes.set_yticks(inside if len(inside) > 1 else axes.get_yticks(), minor=False)
    axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=1))


def draw_reliability(steps: Mapping[str, Sequence[Mapping[str, Any]]]) -> bytes:
    """Draw accuracy against confidence, bin by bin, and below how many predictions are in each."""
    with open_canvas(3.0, width=3.8) as canvas:
        axes = canvas.axes[0]
        axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=":")
        for place, (label, bins) in enumerate(steps.items()):
            filled = [b for b in bins if b["count"]]
            total = sum(b["count"] for b in filled)
            sizes = [12 + 160 * b["count"] / total for b in filled]
            xs, ys = [b["confidence"] for b in filled], [b["accuracy"] for b in filled]
            axes.plot(xs, ys, color=COLOURS[place], linewidth=1.2, alpha=0.7, label=clean(label))
            axes.scatter(xs, ys, sizes, color=COLOURS[place], alpha=0.75, linewidths=0)
        axes.xaxis.set_major_formatter(ticker.PercentFormatter(1.0))
        axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0))
        axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1.03), ylim=(0, 1.05))
    return canvas.svg


def draw_confusion(classes: Sequence[str], confusion: Sequence[Sequence[int]]) -> bytes:
    """Draw labels in rows, predictions in columns: blue on the diagonal, orange off it, deeper for more of the row."""
    counts = np.asarray(confusion, dtype=float)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    colours = np.zeros((*shares.shape, 4))
    right = np.eye(len(shares), dtype=bool)
    colours[right, :3], colours[~right, :3] = matplotlib.colors.to_rgb(COLOURS[0]), matplotlib.colors.to_rgb(COLOURS[1])
    colours[..., 3] = np.where(right, 0.65 * shares, np.where(shares > 0, np.minimum(0.12 + 2.5 * shares, 0.9), 0))
    few = len(classes) <= 20
    with open_canvas(3.8, width=4.2) as canvas:
        axes = canvas.axes[0]
        axes.imshow(colours, interpolation="none")
        axes.grid(False)
        axes.set(xlabel="prediction", ylabel="label")
        if few:
            names = [clean(name if len(name) <= 12 else name[:11] + "…") for name in classes]
            long = max(map(len, names)) > 2
            axes.set_xticks(range(len(names)), names, rotation=45 if long else 0, ha="right" if long else "center")
            axes.set_yticks(range(len(names)), names)
            for row, column in zip(*np.nonzero(counts), strict=True):
                axes.text(column, row, f"{counts[row, column]:.0f}", ha="center", va="center", fontsize=7)
    return canvas.svg


def draw_bars(bars: Mapping[str, Mapping[str, float]], marks: Mapping[str, float], colours: Mapping[str, str]) -> bytes:
    """Draw a group of bars for each kind, one a run, and a dotted line at each run's mark: its clean accuracy."""
    kinds = list(dict.fromkeys(kind for values in bars.values() for kind in values))
    with open_canvas(0.9 + len(kinds) * (0.1 + 0.11 * len(bars)), width=8) as canvas:
        axes = canvas.axes[0]
        height = 0.8 / len(bars)
        for place, (label, values) in enumerate(bars.items()):
            colour = colours[label]
            where = [i + (place - (len(bars) - 1) / 2) * height for i, kind in enumerate(kinds) if kind in values]
            axes.barh(where, [values[k] for k in kinds if k in values], height * 0.92, color=colour, label=clean(label))
            axes.axvline(marks[label], color=colour, linestyle=":", linewidth=1.2)
        axes.set_yticks(range(len(kinds)), [kind.replace("_", " ") for kind in kinds])
        axes.margins(y=0.01)
        axes.invert_yaxis()
        axes.grid(False)
        axes.grid(axis="x", alpha=0.25)
        axes.set(xlabel="accuracy, mean over the five severities; dotted: pictures as they are", xlim=(0, 1))
        axes.xaxis.set_major_formatter(ticker.PercentFormatter(1.0))
    return canvas.svg


def draw_traces(layers: Sequence[Mapping[str, Any]], tol: float) -> bytes:
    """Draw residual and energy at every step of a solve: thick the mean over pictures, thin some of them.

    Of E, which has another scale in every layer, the share of its fall that is still to come.
    """
    titles = {"residuals": "residual (dotted: tolerance)"}
    if any(layer["energies"] for layer in layers):
        titles["energies"] = "(E − E*) / (E₁ − E*)"
    with open_canvas(2.9, len(titles)) as canvas:
        for axes, (name, title) in zip(canvas.axes, titles.items(), strict=True):
            curves: list[Curve] = []
            for place, layer in enumerate(layers):
                samples = (layer[f"sample_{name}"] or []) if len(layers) <= 2 else []  # more would hide the means
                for counts, trace in ((True, layer[name] or []), *((False, sample) for sample in samples)):
                    ys = scale_fall(trace) if name == "energies" else trace
                    curves.append((Style(layer["name"], place, counts), range(1, len(ys) + 1), ys))
            plot(axes, curves, log=True)
            axes.set(xlabel="step", ylabel=title)
            axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        canvas.axes[0].axhline(tol, color=GREY, linestyle=":", linewidth=1)
    return canvas.svg


def scale_fall(energies: Trace) -> list[float | None]:
    """Return (E − E*) / (E₁ − E*), E* the lowest; None where it is of the size of rounding errors, or E never fell."""
    known = [value for value in energies if value is not None]
    low = min(known, default=0.0)
    fall = known[0] - low if known else 0.0
    return [None if e is None or fall == 0 or e - low < 1e-6 * fall else (e - low) / fall for e in energies]
