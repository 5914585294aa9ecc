"""The benchmarks page: figures and tables made from the results, so that none of them is typed."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kerneq.bench.plots import draw
from kerneq.bench.records import DEVICES, NAMES, Record, read
from kerneq.bench.table import text
from kerneq.bench.targets import goals
from kerneq.run import TrainingError
from kerneq.run import write_atomically

BLOCK = re.compile(r"<!-- begin (\S+) -->\n.*?<!-- end \1 -->", re.DOTALL)


def write(results: Path, page: Path) -> list[str]:
    """Fill the blocks of `page` and the folder of its name with what the records say; what was skipped, in words."""
    try:
        old = page.read_text(encoding="utf-8")
    except OSError as error:
        raise TrainingError(f"{page} could not be read ({error.strerror}): give the page with --page.") from None
    records = read(results)
    folder = page.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    skipped = []
    for record in records.values():
        write_atomically(folder / f"{record.key}.md", tables(record).encode())
        drawing = draw(record)
        if drawing is None:
            skipped.append(f"{record.key}: no figure, its tables are of an older kind; measure again: {record.command}")
        else:
            write_atomically(folder / f"{record.key}.svg", drawing)
    absent = [key for key in _keys() if key not in records]
    skipped += [f"{key}: no result yet; measure with: {_command(key)}" for key in absent]
    write_atomically(page, fill(old, blocks(records, folder.name), page).encode())
    return skipped


def fill(old: str, made: dict[str, str], page: Path) -> str:
    """The page with what stands between `<!-- begin KEY -->` and `<!-- end KEY -->` replaced."""
    unknown = [key for key in BLOCK.findall(old) if key not in made]
    if unknown:
        raise TrainingError(f"{page} has a block `{unknown[0]}`; there are only {', '.join(made)}.")
    return BLOCK.sub(lambda block: f"<!-- begin {block[1]} -->\n{made[block[1]]}\n<!-- end {block[1]} -->", old)


def blocks(records: dict[str, Record], folder: str) -> dict[str, str]:
    """By key: the goals, and for every command and device its figure and where its numbers are."""
    made = {"goals": _goals(records)}
    for key in _keys():
        record = records.get(key)
        if record is None:
            made[key] = f"Not measured yet: `{_command(key)}`."
            continue
        drawn = f"![{record.command}]({folder}/{key}.svg)\n\n" if draw(record) is not None else ""
        made[key] = f"{drawn}`{record.command}`: [tables]({folder}/{key}.md). {record.origin}."
    return made


def tables(record: Record) -> str:
    """All tables of a record, as a page of their own."""
    parts = [f"# {record.command}", f"{record.origin}. Made by `kerneq bench page`; do not edit."]
    for result in record.results:
        parts += [f"## {result.title}", markdown([list(row.values()) for row in result.rows], list(result.rows[0]))]
        parts += ["\n".join(f"- {note}" for note in result.notes)] if result.notes else []
    return "\n\n".join(parts) + "\n"


def markdown(rows: Sequence[Sequence[Any]], columns: Sequence[str]) -> str:
    lines = [
        columns,
        ["---" if i == 0 else "--:" for i in range(len(columns))],
        *[[text(v) for v in row] for row in rows],
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _goals(records: dict[str, Record]) -> str:
    found = goals(records)
    if not found:
        return "Not measured yet."
    rows = [[goal.what, goal.asked, goal.measured, "yes" if goal.met else "no"] for goal in found]
    return markdown(rows, ["goal", "asked", "measured", "met"])


def _keys() -> list[str]:
    return [f"{name}-{device}" for device in DEVICES for name in NAMES]


def _command(key: str) -> str:
    name, device = key.split("-")
    return f"kerneq bench {name} --device {device}"
