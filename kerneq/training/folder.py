"""A run's folder: its configuration, its origin, its metrics, its checkpoints, and who is using it."""

import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from kerneq.training import checkpoint
from kerneq.training.errors import CheckpointError, TrainingError
from kerneq.training.files import write_atomically


@final
@dataclasses.dataclass(frozen=True)
class Folder:
    """config.toml, environment.json, metrics.jsonl and checkpoints/{last,previous,best}.safetensors."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def checkpoint(self, which: str) -> Path:
        return self.path / "checkpoints" / f"{which}.safetensors"

    @contextmanager
    def locked(self, patience: float = 0.0) -> Iterator[None]:
        """Hold the folder for this process; the lock dies with it, however it dies."""
        try:
            (self.path / "checkpoints").mkdir(parents=True, exist_ok=True)
            file = open(self.path / "lock", "a+", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise TrainingError(f"The run folder {self.path} cannot be used: {error.strerror}.") from None
        with file:
            deadline = time.monotonic() + patience
            while not _lock(file.fileno()):
                if time.monotonic() > deadline:
                    file.seek(0)
                    owner = file.read().strip() or "another process"
                    raise TrainingError(
                        f"{self.path} is in use by process {owner}; wait for it, or choose another --name."
                    )
                time.sleep(0.1)
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield

    def save(self, tensors: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Make this the last checkpoint and keep the one before it."""
        fresh, last = self.checkpoint("fresh"), self.checkpoint("last")
        checkpoint.save(fresh, tensors, facts)
        if last.exists():
            os.replace(last, self.checkpoint("previous"))
        os.replace(fresh, last)

    def newest(self) -> Path | None:
        """The checkpoint to continue from: the last, or the previous if a kill fell between two renames."""
        return next((p for p in (self.checkpoint(w) for w in ("last", "fresh", "previous")) if p.exists()), None)

    def advice(self, damaged: Path) -> str:
        """What to do about a checkpoint that does not load."""
        for which in ("previous", "best"):
            try:
                facts = checkpoint.load(self.checkpoint(which))[1]
            except CheckpointError:
                continue
            if which == "previous" and damaged != self.checkpoint(which):
                whole = f"{self.checkpoint(which)}, which is whole (step {facts['step']})"
                return f"Remove it to continue from {whole}."
            return f"{self.checkpoint(which)} is whole and can be evaluated."
        return "No other checkpoint of this run is whole; start again under another --name."

    def rows(self) -> list[dict[str, Any]]:
        """The metrics of each completed epoch; a line cut short by a kill is left out."""
        if not self.metrics.exists():
            return []
        rows = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return rows

    def keep_rows(self, epochs: int) -> None:
        """Forget the metrics of epochs that will be trained again."""
        kept = [row for row in self.rows() if row["epoch"] <= epochs]
        write_atomically(self.metrics, "".join(json.dumps(row) + "\n" for row in kept).encode())

    def add_row(self, row: Mapping[str, Any]) -> None:
        try:
            with open(self.metrics, "a", encoding="utf-8") as file:
                file.write(json.dumps(dict(row)) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise TrainingError(
                f"{self.metrics} could not be written: {error.strerror}. Earlier checkpoints are intact; "
                "make room, then continue with --resume."
            ) from error


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
