"""A step of a layer of a function by DDP, by FSDP2 and in one process: `python sharded_step.py FOLDER`.

Two CPU processes, forked from one that has imported torch. Each writes its gradients of the whole batch.
"""

import multiprocessing
import pathlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import kerneq as kq


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, z, x):
        return torch.tanh(0.5 * self.linear(z) + x)


def build() -> nn.Module:
    torch.manual_seed(0)
    layer = kq.Equilibrium(Block(), tol=1e-10, gradient=kq.gradients.Implicit(tol=1e-11))
    return nn.Sequential(nn.Linear(6, 6), layer, kq.Value(), nn.Linear(6, 1))


def gradients(model: nn.Module, x: torch.Tensor, again: bool = False) -> torch.Tensor:
    found = checkpoint(model, x, use_reentrant=False) if again else model(x)
    found.square().mean().backward()
    grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    return torch.cat([g.flatten() for g in grads])


def step(rank: int, folder: pathlib.Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)) * torch.logspace(-2, 0, 8)[:, None]
    part = x[rank::2]  # the processes take different numbers of steps
    sharded = build()
    fully_shard(sharded, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    found = {
        "one": gradients(build(), x),
        "checkpointed": gradients(build(), x, again=True),
        "ddp": gradients(DistributedDataParallel(build()), part),
        "fsdp": gradients(sharded, part),
    }
    torch.save(found, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


def main(folder: pathlib.Path) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=step, args=(rank, folder)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    sys.exit(max(abs(process.exitcode if process.exitcode is not None else 1) for process in processes))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
