"""Results: tables of numbers with their environment, shown in a terminal, written as JSON and read back."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

# Internal to kerneq: what runs record too of the machine, and files that are never half written.
from kerneq.lab.run import machine, write_atomically

NAMES = ("solvers", "layer", "train", "inference", "scaling", "compiled", "processes")  # what the docs page shows
DEVICES = ("cuda", "cpu")
FACTS = ("kerneq", "revision", "torch", "python", "device", "threads", "measured")


class BenchmarkError(RuntimeError):
    """A benchmark cannot run, or a page cannot be made; the message is one sentence with the reason."""


@dataclasses.dataclass(frozen=True)
class Result:
    """One table; every row has the same keys. Notes explain the columns.

    `asked` holds which table of the benchmark this is (`table`) and its settings, for the figures and the page.
    """

    name: str  # of the benchmark
    title: str
    rows: list[dict[str, Any]]
    notes: tuple[str, ...] = ()
    asked: dict[str, Any] = dataclasses.field(default_factory=dict)

    def show(self, console: Console) -> None:
        """Print the table and its notes."""
        table = Table(title=self.title, title_justify="left")
        for column, value in self.rows[0].items():
            is_name = isinstance(value, str)
            table.add_column(column, justify="left" if is_name else "right", no_wrap=is_name)
        for row in self.rows:
            table.add_row(*[format_cell(value) for value in row.values()])
        console.print(table)
        for note in self.notes:
            console.print(note, style="dim")


def format_cell(value: Any) -> str:
    """Three digits of a number; large ones written out, an absent one as a dash."""
    if value is None:
        return "–"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if 100 <= abs(value) < 1e6 else f"{value:.3g}"


def ratio(a: float | None, b: float | None) -> float | None:
    """a / b; None if either is absent."""
    return a / b if a is not None and b else None


def command(name: str, device: str) -> str:
    """What to type to measure this."""
    return f"python -m benchmarks {name} --device {device}"


@dataclasses.dataclass(frozen=True)
class Record:
    """The results of one benchmark on one device, with where they come from."""

    name: str
    device: str  # cpu or cuda
    environment: dict[str, Any]
    results: tuple[Result, ...]

    @property
    def key(self) -> str:
        return f"{self.name}-{self.device}"

    @property
    def command(self) -> str:
        return command(self.name, self.device)

    def tables(self, table: str) -> list[Result]:
        """The tables of one kind."""
        return [result for result in self.results if result.asked.get("table") == table]

    @property
    def origin(self) -> str:
        """Where the numbers come from, in one line."""
        facts = self.environment
        where = facts["device"] if self.device == "cuda" else f"{facts['device']}, {facts['threads']} threads"
        revision = (facts["revision"] or "unknown")[:7] + ("+changes" if "+" in (facts["revision"] or "") else "")
        return f"{where}; PyTorch {facts['torch']}; kerneq {facts['kerneq']}, revision {revision}; {facts['measured']}"


def save(results: list[Result], folder: Path, device: torch.device) -> Path:
    """Write the results of one benchmark, with where they come from, to folder/NAME-DEVICE.json."""
    facts = machine(device) | {"measured": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    content = {"environment": facts, "results": [dataclasses.asdict(result) for result in results]}
    path = folder / f"{results[0].name}-{device.type}.json"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())
    return path


def read(folder: Path) -> dict[str, Record]:
    """The records in a folder, by NAME-DEVICE; those absent are left out."""
    if not folder.is_dir():
        raise BenchmarkError(f"{folder} is not a folder: give the one with the JSON files with --results.")
    records = {}
    for name in NAMES:
        for device in DEVICES:
            path = folder / f"{name}-{device}.json"
            if path.exists():
                records[f"{name}-{device}"] = _read_record(path, name, device)
    return records


def _read_record(path: Path, name: str, device: str) -> Record:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        environment = {fact: content["environment"][fact] for fact in FACTS}
        results = tuple(_read_result(entry) for entry in content["results"])
    except (ValueError, KeyError, TypeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise BenchmarkError(
            f"{path} is not a result of a benchmark ({reason}): remove it, or measure again with "
            f"`{command(name, device)}`."
        ) from None
    return Record(name, device, environment, results)


def _read_result(entry: dict[str, Any]) -> Result:
    rows = entry["rows"]
    if not rows or any(list(row) != list(rows[0]) for row in rows):
        raise ValueError(f"the rows of `{entry['title']}` differ in their columns")
    return Result(entry["name"], entry["title"], rows, tuple(entry["notes"]), entry.get("asked", {}))
