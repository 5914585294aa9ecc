"""The folder of a run: how training writes it, so that a kill loses nothing, and how all others read it."""

import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from torch import Tensor

from . import checkpoint
from .checkpoint import CheckpointError, TrainingError, write_atomically
from .config import Config, ConfigError, differences, load, write

FREE = ("device", "training.checkpoint_epochs", "training.checkpoint_steps")  # may change between two starts


@final
@dataclasses.dataclass(frozen=True)
class Run:
    """A run by its folder, which need not exist yet.

    config.toml         every setting
    environment.json    where it came from, and every resumption
    metrics.jsonl       one line for each epoch
    checkpoints/        last, previous and best .safetensors
    evaluation.json     scores on the test images, once it has been evaluated
    tensorboard/, lock  curves, and which process is using the folder
    """

    path: Path

    @property
    def config_file(self) -> Path:
        """Every setting; a folder without this file is no run."""
        return self.path / "config.toml"

    @property
    def environment_file(self) -> Path:
        """Where the run came from, and its resumptions."""
        return self.path / "environment.json"

    @property
    def metrics_file(self) -> Path:
        """One line of JSON for each epoch."""
        return self.path / "metrics.jsonl"

    @property
    def evaluation_file(self) -> Path:
        """Scores on the test images."""
        return self.path / "evaluation.json"

    def checkpoint(self, which: str) -> Path:
        """The file of the `last`, `previous` or `best` checkpoint."""
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

    def config(self) -> Config:
        """The settings of an existing run; a folder that is none is a `TrainingError`."""
        if not self.config_file.exists():
            raise TrainingError(f"{self.path} is not a run folder: it has no config.toml.")
        return load(self.config_file)

    def read(self) -> "Record":
        """Everything an existing run wrote down about itself."""
        config = self.config()
        environment, evaluation = _json(self.environment_file), _json(self.evaluation_file)
        return Record(self.path.resolve().name, config, environment, tuple(self.rows()), evaluation)

    def save(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
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

    def check_same(self, config: Config) -> None:
        """A run that is continued with other settings would be neither the old one nor the new one: refuse."""
        try:
            before = load(self.config_file)
        except ConfigError as error:
            raise TrainingError(f"The run cannot be continued: {error}") from None
        changed = [key for key in differences(before, config) if key not in FREE]
        if changed:
            raise TrainingError(
                f"{self.path} was started with another value of {', '.join(f'`{key}`' for key in changed)}; "
                "resume it with the settings in its config.toml, or choose another --name."
            )

    def begin(self, config: Config, origin: Mapping[str, Any], epoch: int, step: int) -> None:
        """Write down this start of the run, from its beginning (step 0) or from where a checkpoint left it.

        The metrics of epochs past `epoch`, which will be trained again, are forgotten.
        """
        kept = [row for row in self.rows() if row["epoch"] <= epoch]
        write_atomically(self.metrics_file, "".join(json.dumps(row) + "\n" for row in kept).encode())
        write_atomically(self.config_file, write(config).encode())
        written = _json(self.environment_file)
        if written and step > 0:
            written["resumed"].append({**origin, "step": step})
        else:
            written = {**origin, "resumed": []}
        write_atomically(self.environment_file, (json.dumps(written, indent=2) + "\n").encode())

    def rows(self) -> list[dict[str, Any]]:
        """The metrics of each completed epoch; a line cut short by a kill is left out."""
        if not self.metrics_file.exists():
            return []
        rows = []
        for line in self.metrics_file.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return rows

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Append the metrics of an epoch; they are on the disk when this returns."""
        try:
            with open(self.metrics_file, "a", encoding="utf-8") as file:
                file.write(json.dumps(dict(row)) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise TrainingError(
                f"{self.metrics_file} could not be written: {error.strerror}. Earlier checkpoints are intact; "
                "make room, then continue with --resume."
            ) from error


@final
@dataclasses.dataclass(frozen=True)
class Record:
    """What a run wrote down: its settings, its origin, its metrics and, once evaluated, its scores.

    Scores map the names of `training.metrics` to numbers; one that was not measured is None or absent, as in the
    folders of earlier versions.
    """

    name: str
    config: Config
    environment: Mapping[str, Any]  # empty if it was not recorded
    rows: Sequence[Mapping[str, Any]]  # one per epoch, as in metrics.jsonl
    evaluation: Mapping[str, Any]  # as in evaluation.json; empty if the run was not evaluated

    @property
    def test(self) -> Mapping[str, Any]:
        """Scores on the test images; empty if the run was not evaluated."""
        return self.evaluation.get("scores", {}).get("test", {})

    @property
    def seconds(self) -> float:
        """Time spent training, validation left out."""
        return float(sum(row["seconds"] for row in self.rows))

    def curve(self, group: str, metric: str) -> tuple[list[int], list[float]]:
        """The epochs at which a metric was measured on `train` or `validation` images, and its values."""
        scores = [(row["epoch"], (row[group] or {}).get(metric)) for row in self.rows]
        points = [(epoch, value) for epoch, value in scores if value is not None]
        return [epoch for epoch, _ in points], [value for _, value in points]


def best_accuracy(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The best accuracy on held-out images among the epochs of a run; None if nothing was held out."""
    return max((row["validation"]["accuracy"] for row in rows if row["validation"]), default=None)


def _lock(descriptor: int) -> bool:
    """Whether the lock is now ours."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _json(path: Path) -> dict[str, Any]:
    """The table in a JSON file; empty if there is no such file."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TrainingError(f"{path} is damaged: {error}.") from None
    return found if isinstance(found, dict) else {}
