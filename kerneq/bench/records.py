"""Results of `kerneq bench` read back from their files."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from kerneq.bench.table import Result
from kerneq.run import TrainingError

NAMES = ("solvers", "layer", "train", "inference", "scaling")
DEVICES = ("cuda", "cpu")
FACTS = ("kerneq", "revision", "torch", "python", "device", "threads", "measured")


@dataclasses.dataclass(frozen=True)
class Record:
    """What one command wrote."""

    name: str
    device: str  # cpu or cuda
    environment: dict[str, Any]
    results: tuple[Result, ...]

    @property
    def key(self) -> str:
        return f"{self.name}-{self.device}"

    @property
    def command(self) -> str:
        return f"kerneq bench {self.name} --device {self.device}"

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


def read(folder: Path) -> dict[str, Record]:
    """The records in a folder, by NAME-DEVICE; those absent are left out."""
    if not folder.is_dir():
        raise TrainingError(f"{folder} is not a folder: give the one `kerneq bench` wrote to with --results.")
    records = {}
    for name in NAMES:
        for device in DEVICES:
            path = folder / f"{name}-{device}.json"
            if path.exists():
                records[f"{name}-{device}"] = _read(path, name, device)
    return records


def _read(path: Path, name: str, device: str) -> Record:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        environment = {fact: content["environment"][fact] for fact in FACTS}
        results = tuple(_result(entry) for entry in content["results"])
    except (ValueError, KeyError, TypeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise TrainingError(
            f"{path} is not a result of `kerneq bench` ({reason}): remove it, or measure again with "
            f"`kerneq bench {name} --device {device}`."
        ) from None
    return Record(name, device, environment, results)


def _result(entry: dict[str, Any]) -> Result:
    rows, asked = entry["rows"], entry.get("asked", {})
    if not rows or any(list(row) != list(rows[0]) for row in rows):
        raise ValueError(f"the rows of `{entry['title']}` differ in their columns")
    return Result(entry["name"], entry["title"], rows, tuple(entry["notes"]), asked)
