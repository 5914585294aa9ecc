"""Which measurements a `kerneq bench` command makes."""

from collections.abc import Callable, Iterator

import torch

from kerneq.bench.inference import bench_inference
from kerneq.bench.layer import bench_layer
from kerneq.bench.scaling import bench_scaling
from kerneq.bench.solvers import bench_solvers
from kerneq.bench.table import Result
from kerneq.bench.timing import Bench
from kerneq.bench.train import bench_train

COMMANDS: dict[str, Callable[[Bench], Iterator[Result]]] = {
    "solvers": bench_solvers,
    "layer": bench_layer,
    "train": bench_train,
    "inference": bench_inference,
    "scaling": bench_scaling,
}


def measurements(name: str, bench: Bench) -> Iterator[Result]:
    """The tables of one command, each as soon as it is measured.

    float32 is what PyTorch makes of it by default, for every program compared: on a GPU convolutions may round to
    TF32, matrix products may not.
    """
    torch.backends.cudnn.benchmark = True
    yield from COMMANDS[name](bench)
