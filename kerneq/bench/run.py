"""Which measurements a `kerneq bench` command makes."""

from collections.abc import Iterator

import torch

from kerneq.bench.inference import bench_inference
from kerneq.bench.layer import bench_layer
from kerneq.bench.scaling import bench_scaling
from kerneq.bench.solvers import bench_solvers
from kerneq.bench.table import Result
from kerneq.bench.train import bench_train

COMMANDS = {
    "solvers": bench_solvers,
    "layer": bench_layer,
    "train": bench_train,
    "inference": bench_inference,
    "scaling": bench_scaling,
}


def measurements(name: str, device: torch.device, quick: bool) -> Iterator[Result]:
    """The tables of one command, each as soon as it is measured."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False  # float32 means float32 wherever two programs are compared
    yield from COMMANDS[name](device, quick)
