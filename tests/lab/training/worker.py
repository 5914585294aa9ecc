"""One of the processes that torchrun starts in the tests: trains the toy in FOLDER.

usage: worker.py FOLDER KILL_AT; process 1 kills itself at that training step of its first life (0: never).
"""

import functools
import os
import signal
import sys
import time
from pathlib import Path

import torch
from toys import build_toy

from kerneq.lab.data import Images
from kerneq.lab.run.config import Config, parse
from kerneq.lab.training import train

SETTINGS = [
    "training.epochs=3",
    "training.batch_size=128",
    "training.ema=0.9",
    "training.checkpoint_steps=4",
    "training.clip=1.0",
    "augment.crop=1",
    "augment.mixup=0.2",
]

# Batch norm has no statistics over processes on a CPU, and dropout draws differ: without both, N processes compute
# what one does.
build_plain = functools.partial(build_toy, dropout=0.0, norm=False)


def build(config: Config, images: Images) -> torch.nn.Module:
    model = build_plain(config, images)
    kill_at, steps = int(sys.argv[2]), 0

    def count(module: torch.nn.Module, arguments: object) -> None:
        nonlocal steps
        steps += module.training
        first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if steps == kill_at and first_life and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    model.register_forward_pre_hook(count)
    return model


if __name__ == "__main__":
    torch.set_num_threads(1)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "1" and os.environ.get("RANK") == "1":
        time.sleep(3)  # late, so that the other one could meet the address of this one's first life
    train(parse("", SETTINGS), Path(sys.argv[1]), build=build)
