"""What is drawn of each command's results."""

from collections.abc import Callable, Sequence

from matplotlib import rc_context
from matplotlib.figure import Figure

from kerneq.bench.figures import STYLE, Panel, Series, bars, curves, stacked, svg
from kerneq.bench.profile import PARTS
from kerneq.bench.records import Record
from kerneq.bench.table import Result, text


def draw(record: Record) -> bytes | None:
    """The figure of a record, as SVG; None if it holds no table this version knows how to draw."""
    with rc_context(STYLE):
        figure = DRAWN[record.name](record)
        return None if figure is None else svg(figure, f"{record.key}, measured {record.environment['measured']}")


def _solvers(record: Record) -> Figure | None:
    tables = [table for table in record.tables("residual") if table.asked["tol"] == 1e-3]
    columns = {"÷ torchdeq's best": "one by one", "captured ÷ torchdeq's best": "as one CUDA graph"}
    titles = [f"{table.asked['map']} map, L = {table.asked['L']:g}" for table in tables]
    label = "time to a residual of 1e-3 ÷ torchdeq's best"
    return bars(_panels(tables, titles, columns), label, reference=1.0) if tables else None


def _layer(record: Record) -> Figure | None:
    tables = record.tables("layer")
    titles = [f"L = {table.asked['L']:g}" for table in tables]
    label = "forward + backward ÷ torchdeq's best"
    return bars(_panels(tables, titles, {"÷ torchdeq's best": label}), label, reference=1.0) if tables else None


def _train(record: Record) -> Figure | None:
    steps, tables = record.tables("step"), record.tables("parts")
    if not tables:
        titles = [f"batch {table.asked['batch']}" for table in steps]
        return bars(_panels(steps, titles, {"time (ms)": "ms"}), "training step (ms)") if steps else None
    titles = [f"batch {table.asked['batch']}" for table in tables]
    ends = [[f"{text(row['card time (ms)'])} ms, {row['kernels']} kernels" for row in table.rows] for table in tables]
    return stacked(_panels(tables, titles, {f"{part} %": part for part in PARTS}), "% of the card's time", ends)


def _inference(record: Record) -> Figure | None:
    tables = record.tables("prediction")
    titles = [f"batch {table.asked['batch']}" for table in tables]
    return bars(_panels(tables, titles, {"time (ms)": "ms"}), "prediction (ms)") if tables else None


def _scaling(record: Record) -> Figure | None:
    tables = record.tables("growth")
    if not tables:
        return None
    rows = (
        ({"time (ms)": "one by one", "captured (ms)": "as one CUDA graph"}, "time (ms)"),
        ({"peak (MiB)": "one by one"}, "peak (MiB)"),
    )
    panels = [
        panel for columns, _ in rows for panel in _panels(tables, [""] * len(tables), columns, labels_from="value")
    ]
    places = [str(table.asked["by"]) for table in tables]
    labels = [label for _, label in rows for _ in tables]
    return curves(panels, places * len(rows), labels, columns=len(tables))


def _panels(
    tables: Sequence[Result], titles: Sequence[str], columns: dict[str, str], labels_from: str = "name"
) -> list[Panel]:
    """A panel for each table; its first column labels the rows, and those of `columns` that it has are drawn."""
    panels = []
    for table, title in zip(tables, titles, strict=True):
        first = next(iter(table.rows[0]))
        labels = [str(row[first]) if labels_from == "name" else row[first] for row in table.rows]
        series = [
            Series(name, [row[column] for row in table.rows])
            for column, name in columns.items()
            if column in table.rows[0]
        ]
        panels.append(Panel(title, labels, series))
    return panels


DRAWN: dict[str, Callable[[Record], Figure | None]] = {
    "solvers": _solvers,
    "layer": _layer,
    "train": _train,
    "inference": _inference,
    "scaling": _scaling,
}
