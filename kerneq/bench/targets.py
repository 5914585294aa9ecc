"""The goals of the project's speed, each beside what was measured on a GPU."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from kerneq.bench.peers import OURS
from kerneq.bench.records import Record
from kerneq.bench.table import Result, text

MODEL = "geq-5m, implicit in features, 4 + 4"


@dataclasses.dataclass(frozen=True)
class Goal:
    what: str
    asked: str
    measured: float
    met: bool


def goals(records: dict[str, Record]) -> list[Goal]:
    """Every goal that the records say something about."""
    found: list[Goal] = []
    if "train-cuda" in records:
        found += _train(records["train-cuda"])
    if "solvers-cuda" in records:
        found += _solvers(records["solvers-cuda"])
    return found


def _train(record: Record) -> Iterator[Goal]:
    least = {512: 22_000, 128: 16_000}
    for table in record.tables("step"):
        batch, row = table.asked["batch"], _row(table, "model", MODEL)
        if row is not None and batch in least:
            speed = row["images/s"]
            what = f"training step, batch {batch}"
            yield Goal(f"{what}, images/s", f"≥ {least[batch]}", speed, speed >= least[batch])
            yield _at_most(f"{what}, ÷ ResNet-18's", 2, row["÷ resnet18"])
    for table in record.tables("parts"):
        row = _row(table, "model", MODEL)
        if row is not None and table.asked["batch"] == 512:
            yield _at_most("not in convolutions, batch 512, % of card time", 15, 100 - row["convolution %"])


def _solvers(record: Record) -> Iterator[Goal]:
    for table in record.tables("step"):
        row = _row(table, "solver", "Picard")
        if row is not None and row["captured ÷ bare f captured"]:
            what = f"a Picard step ÷ bare f, captured, {_map(table)}"
            yield _at_most(what, 1.05, row["captured ÷ bare f captured"])
    for table in record.tables("residual"):
        if table.asked["tol"] != 1e-3:
            continue
        columns = {"÷ torchdeq's best": "", "captured ÷ torchdeq's best": ", captured"}
        found = [(row[column], how, row) for column, how in columns.items() for row in table.rows if row[column]]
        ours = [(ratio, how, row) for ratio, how, row in found if row["solver"] in OURS]
        if ours:
            ratio, how, row = min(ours, key=lambda entry: entry[0])
            what = f"to a residual of 1e-3 ÷ torchdeq's best, {_map(table)} ({row['solver']}{how})"
            yield _at_most(f"time {what}", 0.125, ratio)
            yield _at_most(f"memory {what}", 1 / 3, row["peak ÷ torchdeq's best"])


def _at_most(what: str, most: float, measured: float) -> Goal:
    return Goal(what, f"≤ {text(float(most))}", measured, measured <= most)


def _map(table: Result) -> str:
    return f"{table.asked['map']} map, L = {table.asked['L']:g}"


def _row(table: Result, column: str, name: str) -> dict[str, Any] | None:
    return next((row for row in table.rows if row[column] == name), None)
