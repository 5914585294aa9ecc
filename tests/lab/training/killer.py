"""Train a run that is killed again and again; a process of its own, to fork before any thread runs.

usage: killer.py FOLDER KILLS SEED
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from toys import build_toy

from kerneq.lab.data import load
from kerneq.lab.run.config import Config, parse
from kerneq.lab.training import train

SETTINGS = [
    "training.epochs=12",
    "training.batch_size=64",
    "training.ema=0.9",
    "training.checkpoint_steps=3",
    "augment.crop=1",
    "optimizer.lr=0.05",
]


def config() -> Config:
    return parse("", SETTINGS)


def start(folder: Path) -> int:
    """Train (or resume) in a forked child; return its id."""
    child = os.fork()
    if child == 0:
        train(config(), folder, resume=True, build=build_toy)
        os._exit(0)
    return child


def changed(path: Path) -> int:
    """When a file was last written; 0 where there is none."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:  # not yet, or just being replaced
        return 0


def main(folder: Path, kills: int, seed: int) -> None:
    torch.set_num_threads(1)
    load("digits", "train")  # imports scikit-learn: once, before the forks
    began = time.monotonic()
    _, status = os.waitpid(start(folder / "whole"), 0)
    if status:
        sys.exit("The uninterrupted run failed.")
    length = time.monotonic() - began
    moments = random.Random(seed)
    for number in range(kills):
        last = folder / "killed" / "checkpoints" / "last.safetensors"
        before = changed(last)
        child = start(folder / "killed")
        while number % 2 and changed(last) == before:  # every second kill falls into an epoch, however slow the start
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.06) * length)  # a third in all: the machine may be less busy by then
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            sys.exit(f"The run ended by itself before the kill (status {status}).")
    _, status = os.waitpid(start(folder / "killed"), 0)
    if status:
        sys.exit("The last resumption failed.")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
