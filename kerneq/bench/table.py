"""A benchmark's result: rows of numbers with their environment, as a table and as JSON."""

import dataclasses
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table as RichTable

import kerneq
from kerneq.run.environment import revision
from kerneq.run import write_atomically


@dataclasses.dataclass(frozen=True)
class Result:
    """One table; every row has the same keys. Notes say what the columns mean.

    `asked` says what was measured in a form that programs read (the figures and the page do): which table of the
    command this is, and its settings.
    """

    name: str
    title: str
    rows: list[dict[str, Any]]
    notes: tuple[str, ...] = ()
    asked: dict[str, Any] = dataclasses.field(default_factory=dict)

    def show(self, console: Console) -> None:
        table = RichTable(title=self.title, title_justify="left")
        for column in self.rows[0]:
            name = isinstance(self.rows[0][column], str)
            table.add_column(column, justify="left" if name else "right", no_wrap=name)
        for row in self.rows:
            table.add_row(*[text(value) for value in row.values()])
        console.print(table)
        for note in self.notes:
            console.print(note, style="dim")


def text(value: Any) -> str:
    """Three digits of a number; large ones written out, an absent one as a dash."""
    if value is None:
        return "–"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if 100 <= abs(value) < 1e6 else f"{value:.3g}"


def save(results: list[Result], folder: Path, device: torch.device) -> Path:
    """Write the results of one command, with where they come from, to folder/NAME-DEVICE.json."""
    facts = {
        "kerneq": kerneq.__version__,
        "revision": revision(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})",
        "threads": torch.get_num_threads(),
        "measured": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    path = folder / f"{results[0].name}-{device.type}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"environment": facts, "results": [dataclasses.asdict(result) for result in results]}
    write_atomically(path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())
    return path
