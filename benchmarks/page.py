"""The benchmarks page of the docs: goals, figures and tables made from the records, so that none of them is typed."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kerneq.lab.run import Run

from .figures import draw
from .layer import DEFAULT
from .results import DEVICES, NAMES, BenchmarkError, Record, Result, command, format_cell, read
from .solvers import OURS

BLOCK = re.compile(r"<!-- begin (\S+) -->\n.*?<!-- end \1 -->", re.DOTALL)


def write_page(results: Path, page: Path) -> list[str]:
    """Draw the figures and fill the tables of the benchmarks page from the records; return what was skipped."""
    try:
        old = page.read_text(encoding="utf-8")
    except OSError as error:
        raise BenchmarkError(f"{page} could not be read ({error.strerror}): give the page with --page.") from None
    records = read(results)
    drawings = {key: draw(record) for key, record in records.items()}
    folder = page.with_suffix("")
    runs = results.absolute().parents[1] / "docs" / "results"
    made = {
        "goals": _make_goal_table(
            [*find_goals(records), *(goal for name in FAST for goal in find_time_goals(Run(runs / name)))]
        )
    }
    skipped = []
    for key in [f"{name}-{device}" for device in DEVICES for name in NAMES]:
        if key not in records:
            to_measure = command(*key.split("-"))
            made[key] = f"Not measured yet: `{to_measure}`."
            skipped.append(f"{key}: no result yet; measure with: {to_measure}")
            continue
        record = records[key]
        made[key] = f"`{record.command}`: [tables]({folder.name}/{key}.md). {record.origin}."
        if drawings[key] is not None:
            made[key] = f"![{record.command}]({folder.name}/{key}.svg)\n\n{made[key]}"
        else:
            skipped.append(f"{key}: no figure, its tables are of an older kind; measure again: {record.command}")
    new = fill(old, made, page)
    folder.mkdir(parents=True, exist_ok=True)
    for key, record in records.items():
        (folder / f"{key}.md").write_text(_tables(record), encoding="utf-8")
        drawing = drawings[key]
        if drawing is not None:
            (folder / f"{key}.svg").write_bytes(drawing)
    page.write_text(new, encoding="utf-8")
    return skipped


def fill(old: str, made: dict[str, str], page: Path) -> str:
    """The page with what stands between `<!-- begin KEY -->` and `<!-- end KEY -->` replaced."""
    unknown = [key for key in BLOCK.findall(old) if key not in made]
    if unknown:
        raise BenchmarkError(f"{page} has a block `{unknown[0]}`; there are only {', '.join(made)}.")
    return BLOCK.sub(lambda block: f"<!-- begin {block[1]} -->\n{made[block[1]]}\n<!-- end {block[1]} -->", old)


def _tables(record: Record) -> str:
    """The page with all tables of a record."""
    parts = [f"# {record.command}", f"{record.origin}. Made by `python -m benchmarks page`; do not edit."]
    for result in record.results:
        parts += [f"## {result.title}", format_table([list(row.values()) for row in result.rows], list(result.rows[0]))]
        parts += ["\n".join(f"- {note}" for note in result.notes)] if result.notes else []
    return "\n\n".join(parts) + "\n"


def format_table(rows: Sequence[Sequence[Any]], columns: Sequence[str]) -> str:
    """A Markdown table, numbers to the right."""
    rule = ["---" if i == 0 else "--:" for i in range(len(columns))]
    lines = [columns, rule, *[[format_cell(value) for value in row] for row in rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# The goals for speed, each beside the measurement on a GPU

# With the GPU programs compiled before, twice, and without.
FAST = ("geq-5m-cifar10-fast-alone", "geq-5m-cifar10-fast-warm", "geq-5m-cifar10-fast-cold")
MODEL = "geq-5m, implicit in features, 4 + 4"
IMAGES_PER_SECOND = {512: 22_000, 128: 16_000}  # at least, by batch


@dataclasses.dataclass(frozen=True)
class Goal:
    """A goal, what was measured, and whether it is met."""

    what: str
    asked: str
    measured: float
    met: bool


def find_goals(records: dict[str, Record]) -> list[Goal]:
    """The goals that the records have numbers for."""
    found: list[Goal] = []
    if "train-cuda" in records:
        found += _find_training_goals(records["train-cuda"])
    if "solvers-cuda" in records:
        found += _find_solver_goals(records["solvers-cuda"])
    for device in DEVICES:
        if f"layer-{device}" in records:
            found += _find_layer_goals(records[f"layer-{device}"])
    return found


def find_time_goals(run: Run) -> Iterator[Goal]:
    """The goals of time to accuracy, from the record of a run; none where the run or its seconds are missing."""
    seconds, rows = run.environment().get("seconds"), run.rows()
    if seconds and rows and rows[-1]["validation"]:
        accuracy, total = 100 * rows[-1]["validation"]["accuracy"], sum(seconds.values())
        yield Goal(f"`{run.name}`, accuracy on held-out images, %", "≥ 94", accuracy, accuracy >= 94)
        yield _at_most(f"`{run.name}`, seconds from start to end", 60, total)
        yield _at_most(f"`{run.name}`, seconds not spent on training", 10, total - seconds["training"])


def _make_goal_table(found: Sequence[Goal]) -> str:
    if not found:
        return "Not measured yet."
    rows = [[goal.what, goal.asked, goal.measured, "yes" if goal.met else "no"] for goal in found]
    return format_table(rows, ["goal", "asked", "measured", "met"])


def _find_training_goals(record: Record) -> Iterator[Goal]:
    for table in record.tables("step"):
        batch, row = table.asked["batch"], _row(table, "model", MODEL)
        if row is not None and batch in IMAGES_PER_SECOND:
            least, speed = IMAGES_PER_SECOND[batch], row["images/s"]
            what = f"training step, batch {batch}"
            yield Goal(f"{what}, images/s", f"≥ {least}", speed, speed >= least)
            yield _at_most(f"{what}, ÷ ResNet-18's", 2, row["÷ resnet18"])
    for table in record.tables("parts"):
        row = _row(table, "model", MODEL)
        if row is not None and table.asked["batch"] == 512:
            yield _at_most("not in convolutions, batch 512, % of card time", 15, 100 - row["convolution %"])


def _find_solver_goals(record: Record) -> Iterator[Goal]:
    for table in record.tables("step"):
        steps = {"Picard": 1.05, "Proximal": 1.3 if table.asked["L"] <= 1 else 2.0}  # past L = 1 it evaluates E
        for solver, most in steps.items():
            row = _row(table, "solver", solver)
            if row is not None and row["captured ÷ bare f captured"]:
                what = f"a {solver} step ÷ bare f, captured, {_map(table)}"
                yield _at_most(what, most, row["captured ÷ bare f captured"])
    launches = {"÷ torchdeq's best": "", "captured ÷ torchdeq's best": ", captured"}
    for table in record.tables("residual"):
        if table.asked["tol"] != 1e-3:
            continue
        ours = [row for row in table.rows if row["solver"] in OURS]
        found = [(row[column], launch, row) for column, launch in launches.items() for row in ours if row[column]]
        if found:
            ratio, launch, row = min(found, key=lambda entry: entry[0])
            what = f"to a residual of 1e-3 ÷ torchdeq's best, {_map(table)} ({row['solver']}"
            yield _at_most(f"time {what}{launch})", 0.125, ratio)
            yield _at_most(f"memory {what})", 1 / 3, row["peak ÷ torchdeq's best"])  # of the call that is not captured


def _find_layer_goals(record: Record) -> Iterator[Goal]:
    where = "" if record.device == "cuda" else ", on a CPU"
    for table in record.tables("layer"):
        row = _row(table, "layer", DEFAULT)
        if row is not None and row["÷ torchdeq's best"]:
            what = f"the default layer, forward + backward, ÷ torchdeq's best, L = {table.asked['L']:g}{where}"
            yield _at_most(what, 0.5, row["÷ torchdeq's best"])


def _at_most(what: str, most: float, measured: float) -> Goal:
    return Goal(what, f"≤ {format_cell(float(most))}", measured, measured <= most)


def _map(table: Result) -> str:
    return f"{table.asked['map']} map, L = {table.asked['L']:g}"


def _row(table: Result, column: str, name: str) -> dict[str, Any] | None:
    return next((row for row in table.rows if row[column] == name), None)
