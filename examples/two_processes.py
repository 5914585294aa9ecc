"""Train on two processes: each takes half of every batch, and the gradients are those of one process with all of it.

On several machines, or with a GPU for each process, `torchrun` starts them; here the program does so itself.
"""

import argparse
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

import kerneq as kq


def train(steps: int, rank: int, processes: int) -> tuple[list[float], list[torch.Tensor]]:
    """Return the loss of this process and the gradient of each step."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    digits = kq.data.load("digits", "train")
    x, y = torch.as_tensor(digits.pixels).flatten(1) / 255.0, digits.labels
    cell = kq.cells.DenseCell(kq.kernels.Gaussian(split=4, hidden=8), inputs=64, state=32, features=16, norm=0.9)
    layer = kq.Equilibrium(cell, tol=1e-9, max_steps=100, gradient=kq.gradients.Implicit(tol=1e-9))
    model = nn.Sequential(layer, kq.Value(), nn.Linear(32, 10))
    model = DistributedDataParallel(model) if processes > 1 else model  # the one line that is needed
    optimizer, losses, gradients = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), [], []
    for batch in torch.randint(len(x), (steps, 64), generator=torch.Generator().manual_seed(1)):
        rows = batch[rank::processes]
        optimizer.zero_grad()
        losses.append(nn.functional.cross_entropy(model(x[rows].double()), y[rows]))
        losses[-1].backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        optimizer.step()
    return [loss.item() for loss in losses], gradients


def work(rank: int, steps: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    torch.save(train(steps, rank, processes=2), folder / f"{rank}.pt")
    dist.destroy_process_group()


def main(steps: int) -> None:
    alone, wanted = train(steps, rank=0, processes=1)
    with tempfile.TemporaryDirectory() as folder:
        # A fork is faster, since it imports nothing again; autograd does not allow it where there is a GPU.
        start = "spawn" if torch.cuda.is_available() else "fork"
        multiprocessing.start_processes(work, (steps, Path(folder)), nprocs=2, start_method=start)
        halves = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(2)]
    together = [sum(losses) / 2 for losses in zip(*(losses for losses, _ in halves), strict=True)]
    errors = [float((g - right).norm() / right.norm()) for g, right in zip(halves[0][1], wanted, strict=True)]
    print("step  loss of one process  of two  relative distance of the gradients")
    for step in sorted({0, steps // 2, steps - 1}):
        print(f"{step + 1:4d}  {alone[step]:19.4f}  {together[step]:6.4f}  {errors[step]:.1e}")
    figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
    axes.plot(alone, color="#E69F00", linewidth=6, label="one process")
    axes.plot(together, color="black", linestyle="--", label="two, on average")
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    figure.savefig("two_processes.png", dpi=80)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    main(**vars(parser.parse_args()))
