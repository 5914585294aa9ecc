"""How a training step grows with the number of processes that share it, and what that says of larger ones."""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import kerneq as kq

from .measure import Setup
from .results import BenchmarkError, Result

COUNTS = (1, 2, 4)
MODEL, SIDE = "geq-tiny", 8
IMAGES = 64  # of one process, or of all
STEPS, WARM = 12, 3


def bench_processes(setup: Setup) -> Iterator[Result]:
    """A training step by 1, 2 and 4 processes on this machine (gloo, one thread each)."""
    if setup.cuda:
        raise BenchmarkError("processes are measured on a CPU, where gloo connects them: give --device cpu.")
    if not dist.is_available():
        raise BenchmarkError("this build of PyTorch has no torch.distributed.")
    cores = os.cpu_count()
    for kind, of in (("strong", "the batch is shared"), ("weak", "each process has a batch of its own")):
        rows = []
        for count in COUNTS:
            setup.progress(f"{kind} scaling: {count} processes")
            images = IMAGES // count if kind == "strong" else IMAGES
            seconds = _run(count, images, 2 if setup.quick else STEPS)
            speed = count * images / seconds
            rows.append({"processes": count, "images each": images, "step (ms)": 1e3 * seconds, "images/s": speed})
        alone = rows[0]["images/s"]
        rows = [row | {"÷ ideal": row["images/s"] / (row["processes"] * alone)} for row in rows]
        notes = (
            f"{MODEL} by SGD on random pictures, one thread a process, gradients averaged by gloo; the median of "
            f"{STEPS} steps after {WARM}.",
            "÷ ideal: images a second over those of one process times the processes.",
            f"This machine has {cores} cores: more processes than that share them, and cannot be faster.",
        )
        yield Result("processes", f"{kind} scaling: {of}", rows, notes, {"table": "processes", "kind": kind})


def _run(count: int, images: int, steps: int) -> float:
    """Return the seconds of a step, as the slowest process sees it."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_work, (count, images, steps, Path(folder)), nprocs=count)  # type: ignore[no-untyped-call]
        return max(float(torch.load(Path(folder) / f"{rank}.pt")) for rank in range(count))


def _work(rank: int, count: int, images: int, steps: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=count)
    model = DistributedDataParallel(kq.models.build(MODEL, classes=10, channels=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.rand(images, 1, SIDE, SIDE), torch.randint(10, (images,))
    times = []
    for _ in range(WARM + steps):
        dist.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        times.append(time.perf_counter() - begin)
    torch.save(torch.tensor(statistics.median(times[WARM:])), folder / f"{rank}.pt")
    dist.destroy_process_group()
