"""Which of the processes this is, and how they talk: alone, or one of N that torchrun started."""

import dataclasses
import os
from typing import final

import torch
from torch import Tensor, distributed, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from kerneq.fused.norm import synchronised
from kerneq.training.errors import TrainingError


@final
@dataclasses.dataclass(frozen=True)
class Process:
    rank: int
    world: int
    device: torch.device
    restarts: int = 0  # how often torchrun has restarted the workers

    @property
    def leads(self) -> bool:
        """Whether this process writes files and talks to the terminal."""
        return self.rank == 0

    def total(self, sums: Tensor) -> Tensor:
        """The sum over all processes; the argument is left alone."""
        sums = sums.clone()
        if self.world > 1:
            distributed.all_reduce(sums)
        return sums

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The same-shaped tensor of every process, by rank."""
        if self.world == 1:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self.world)]
        distributed.all_gather(parts, tensor)
        return parts

    def wait(self) -> None:
        if self.world > 1:
            distributed.barrier()

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model whose backward pass averages gradients over the processes.

        On GPUs batch norms take their statistics over all processes. PyTorch has no such norm on CPU: there
        each process uses its share of the batch, and the first one's running statistics are kept.
        """
        if self.world == 1:
            return model
        ids = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids)

    def synchronise_norms(self, model: nn.Module) -> nn.Module:
        """Batch norms over all processes, where PyTorch has them (GPUs)."""
        if self.world == 1 or self.device.type != "cuda":
            return model
        return synchronised(model)


def start(device: str) -> Process:
    """Join the processes that torchrun started, if it did, and choose this one's device."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    chosen = choose(device, int(os.environ.get("LOCAL_RANK", "0")) if world > 1 else 0)
    if world > 1 and not distributed.is_initialized():
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        # torchrun's agent keeps one store for all lives of its workers. Without a prefix of its own, a restarted
        # worker may read the address of a dead one there, and fail to connect (seen with PyTorch 2.13 and gloo).
        store, _, _ = next(rendezvous("env://"))
        store = PrefixStore(f"life {restarts}", store)
        backend = "nccl" if chosen.type == "cuda" else "gloo"
        distributed.init_process_group(backend, store=store, rank=rank, world_size=world)
    return Process(rank, world, chosen, restarts)


def finish() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()


def choose(device: str, local_rank: int = 0) -> torch.device:
    """The device named by a setting; `auto` and `cuda` take the GPU of this process's local rank."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise TrainingError(f"`device` must be auto, cpu, cuda or cuda:N, got `{device}`.") from None
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise TrainingError(f"`device` is {device}, but PyTorch sees no GPU here; use device=cpu.")
        index = local_rank if chosen.index is None else chosen.index
        if index >= torch.cuda.device_count():
            raise TrainingError(f"`device` asks for GPU {index}, but there are {torch.cuda.device_count()}.")
        return torch.device("cuda", index)
    if chosen.type != "cpu":
        raise TrainingError(f"`device` must be auto, cpu, cuda or cuda:N, got `{device}`.")
    return chosen
