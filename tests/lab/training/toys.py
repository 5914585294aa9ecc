"""A model small enough to train hundreds of steps a second, and runs of it that are stopped on the way."""

import json
import os
import signal
from pathlib import Path

import torch
from torch import Tensor, nn

from kerneq.lab.data import Images
from kerneq.lab.run.config import Config
from kerneq.lab.training import AbstractLogger
from kerneq.loading import read_checkpoint
from kerneq.models import AbstractModel
from kerneq.solution import Solution, Status


class Toy(AbstractModel):
    """All that a checkpoint must not lose: buffers, random state, and a `Solution` whose numbers are known."""

    def __init__(self, channels: int, classes: int, width: int = 8, dropout: float = 0.1, norm: bool = True):
        super().__init__(channels)
        self.stem = nn.Conv2d(channels, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(4 * width, classes)
        self.compiled = False

    def classify(self, x: Tensor) -> tuple[Tensor, dict[str, Solution]]:
        h = torch.relu(self.norm(self.stem(x)))
        h = nn.functional.adaptive_avg_pool2d(h, 2).flatten(1)
        return self.head(self.dropout(h)), {"branch": solution(len(x))}

    def compile_map(self) -> None:
        self.compiled = True

    def diagnostics(self) -> dict[str, float]:
        return {"bound": float(self.stem.weight.detach().norm())}


def solution(samples: int) -> Solution:
    """Four steps each, and every sample but the first converged."""
    codes = torch.full((samples,), Status.CONVERGED.code)
    codes[0] = Status.MAX_STEPS.code
    residual, steps = torch.full((samples,), 1e-3), torch.full((samples,), 4)
    return Solution(torch.zeros(samples, 1), residual, steps, codes, tol=1e-2)


def build_toy(config: Config, images: Images, dropout: float = 0.1, norm: bool = True) -> Toy:
    return Toy(images.shape[0], len(images.classes), dropout=dropout, norm=norm)


def same_state(first: Path, second: Path) -> bool:
    """Whether two run folders hold the same tensors (weights, average, momentum, ...), bit for bit."""
    for which in ("last", "best"):
        a, b = (read_checkpoint(folder / "checkpoints" / f"{which}.safetensors")[0] for folder in (first, second))
        if a.keys() != b.keys() or not all(torch.equal(a[name], b[name]) for name in a):
            return False
    return True


def metrics(folder: Path) -> list[dict]:
    """The rows of metrics.jsonl without wall-clock times."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def resumptions(folder: Path) -> list[int]:
    """The steps from which a run went on."""
    return [start["step"] for start in json.loads((folder / "environment.json").read_text())["resumed"]]


class Said(AbstractLogger):
    """Keeps what the run says."""

    def __init__(self):
        self.texts = []

    def log_epoch(self, row):
        pass

    def log_message(self, text):
        self.texts.append(text)


class StopAt(AbstractLogger):
    """Presses Ctrl-C when an epoch ends."""

    def __init__(self, epoch: int):
        self.at = epoch

    def log_epoch(self, row):
        if row["epoch"] == self.at:
            os.kill(os.getpid(), signal.SIGINT)
