"""The folder of a run: how training writes it, so that a kill loses nothing, and how all others read it."""

import dataclasses
import fcntl
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from .. import __version__
from . import checkpoint
from .checkpoint import CheckpointError, TrainingError, write_atomically
from .config import Config, ConfigError, differences, load, write

FREE = ("device", "training.checkpoint_epochs", "training.checkpoint_steps")  # may change between two starts


@final
@dataclasses.dataclass(frozen=True)
class Run:
    """A run by its folder, which need not exist yet.

    config.toml         every setting; a folder without this file is no run
    environment.json    where it came from, and every resumption
    metrics.jsonl       one line for each epoch
    checkpoints/        last, previous and best .safetensors
    evaluation.json     scores on the test images, once it has been evaluated
    tensorboard/, lock  curves, and which process is using the folder

    Scores map the names of `training.metrics` to numbers; one that was not measured is None or absent, as in the
    folders of earlier versions.
    """

    path: Path

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.path.resolve().name

    @property
    def exists(self) -> bool:
        """Whether a run has been started in this folder."""
        return (self.path / "config.toml").exists()

    def config(self) -> Config:
        """The settings of an existing run; a folder that is none is a `TrainingError`."""
        if not self.exists:
            raise TrainingError(f"{self.path} is not a run folder: it has no config.toml.")
        return load(self.path / "config.toml")

    def environment(self) -> dict[str, Any]:
        """Where the run came from, as in environment.json; empty if it was not recorded."""
        return _json(self.path / "environment.json")

    def evaluation(self) -> dict[str, Any]:
        """The scores on the test images and what they belong to, as in evaluation.json; empty before an evaluation."""
        return _json(self.path / "evaluation.json")

    def test(self) -> Mapping[str, Any]:
        """Scores on the test images; empty if the run was not evaluated."""
        return self.evaluation().get("scores", {}).get("test", {})

    def rows(self) -> list[dict[str, Any]]:
        """The metrics of each completed epoch, as in metrics.jsonl; a line cut short by a kill is left out."""
        rows = []
        if (self.path / "metrics.jsonl").exists():
            for line in (self.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
                with suppress(json.JSONDecodeError):
                    rows.append(json.loads(line))
        return rows

    def seconds(self) -> float:
        """Time spent training, validation left out."""
        return float(sum(row["seconds"] for row in self.rows()))

    def best_accuracy(self) -> float | None:
        """The best accuracy on held-out images among the epochs of the run; None if nothing was held out."""
        return max((row["validation"]["accuracy"] for row in self.rows() if row["validation"]), default=None)

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
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        file.seek(0)
                        used = f"{self.path} is in use by process {file.read().strip() or 'another process'}"
                        raise TrainingError(f"{used}; wait for it, or choose another --name.") from None
                time.sleep(0.1)
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield

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
            file = self.checkpoint(which)
            with suppress(CheckpointError):
                step = checkpoint.load(file)[1]["step"]
                if which == "previous" and damaged != file:
                    return f"Remove it to continue from {file}, which is whole (step {step})."
                return f"{file} is whole and can be evaluated."
        return "No other checkpoint of this run is whole; start again under another --name."

    def check_same(self, config: Config) -> None:
        """A run that is continued with other settings would be neither the old one nor the new one: refuse."""
        try:
            before = self.config()
        except ConfigError as error:
            raise TrainingError(f"The run cannot be continued: {error}") from None
        changed = [key for key in differences(before, config) if key not in FREE]
        if changed:
            raise TrainingError(
                f"{self.path} was started with another value of {', '.join(f'`{key}`' for key in changed)}; "
                "resume it with the settings in its config.toml, or choose another --name."
            )

    def begin(self, config: Config, device: torch.device, processes: int, epoch: int, step: int) -> None:
        """Write down this start of the run, from its beginning (step 0) or from where a checkpoint left it.

        The metrics of epochs past `epoch`, which will be trained again, are forgotten.
        """
        self._write_rows([row for row in self.rows() if row["epoch"] <= epoch])
        write_atomically(self.path / "config.toml", write(config).encode())
        origin = {
            "kerneq": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "revision": revision(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})",
            "threads": torch.get_num_threads(),
            "processes": processes,
            "seed": config.seed,
            "command": sys.argv,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        written = self.environment()
        if written and step > 0:
            written["resumed"].append({**origin, "step": step})
        else:
            written = {**origin, "resumed": []}
        write_atomically(self.path / "environment.json", (json.dumps(written, indent=2) + "\n").encode())

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Add the metrics of an epoch; they are on the disk when this returns."""
        self._write_rows([*self.rows(), row])

    def _write_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        write_atomically(self.path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())


def revision() -> str | None:
    """The git revision of the package's source, with `+changes` if files differ; None outside a checkout."""
    source = Path(__file__).resolve().parents[2]
    head = _git(source, "rev-parse", "HEAD")
    if head is None or not (source / "pyproject.toml").exists():
        return None
    return head + ("+changes" if _git(source, "status", "--porcelain", "--untracked-files=no", "kerneq") else "")


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints, None where there is no git or it refuses."""
    try:
        result = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _json(path: Path) -> dict[str, Any]:
    """The table in a JSON file; empty if there is no such file."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TrainingError(f"{path} is damaged: {error}.") from None
    return found if isinstance(found, dict) else {}
