"""Three DDP steps of two CPU processes: `python ddp_step.py FOLDER`. Each writes what the test compares.

The two are forked from one process that has imported torch, which takes longer than the steps.
"""

import multiprocessing
import pathlib
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import kerneq


def steps(rank: int, folder: pathlib.Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    torch.manual_seed(rank)  # DDP itself must bring the two copies together
    cell = kerneq.cells.ConvCell(kerneq.kernels.Gaussian(split=2), inputs=2, state=3, features=4, norm=0.9)
    layer = DistributedDataParallel(kerneq.Equilibrium(cell, tol=1e-10, max_steps=100))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(3):
        x = torch.randn(2, 2, 4, 4, generator=generator)
        layer(x).value.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    numbers = [*cell.parameters(), cell.operator.tracker.vector]
    text = " ".join(f"{float(t.detach().double().sum()):.12f}" for t in numbers)
    (folder / f"rank{rank}").write_text(text)
    dist.destroy_process_group()


def main(folder: pathlib.Path) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=steps, args=(rank, folder)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in processes))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
