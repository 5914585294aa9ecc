"""Runs of an epoch or a few."""

from pathlib import Path

from kerneq.run.config import parse
from kerneq.training import train


def trained(path: Path, *settings: str) -> Path:
    train(parse("", ["training.epochs=1", "training.batch_size=64", "device=cpu", *settings]), path)
    return path
