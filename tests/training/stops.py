"""Runs that are stopped on the way, and what they must have in common with those that are not."""

import json
import os
import signal
from pathlib import Path

import torch

from kerneq.run import checkpoint
from kerneq.training import AbstractLogger


def same_state(first: Path, second: Path) -> bool:
    """Whether two run folders hold the same tensors (weights, average, momentum, ...), bit for bit."""
    for which in ("last", "best"):
        a, b = (checkpoint.load(folder / "checkpoints" / f"{which}.safetensors")[0] for folder in (first, second))
        if a.keys() != b.keys() or not all(torch.equal(a[name], b[name]) for name in a):
            return False
    return True


def metrics(folder: Path) -> list[dict]:
    """The rows of metrics.jsonl without wall-clock times."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


class StopAt(AbstractLogger):
    """Presses Ctrl-C when an epoch ends."""

    def __init__(self, epoch: int):
        self.at = epoch

    def log_progress(self, progress):
        pass

    def log_epoch(self, row):
        if row["epoch"] == self.at:
            os.kill(os.getpid(), signal.SIGINT)

    def close(self):
        pass
