"""The processes that train together: one alone, or N under torchrun."""

import dataclasses
import os
from typing import final

import torch
from torch import Tensor, distributed, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from ...loading import TrainingError
from ...loading import choose_device as choose_device


@final
@dataclasses.dataclass(frozen=True)
class Process:
    """One of `world` processes that train a model together, each on its device and its share of every batch."""

    device: torch.device
    rank: int = 0
    world: int = 1
    restarts: int = 0  # how often torchrun has restarted the workers

    @property
    def leads(self) -> bool:
        """Whether this process writes files and talks to the terminal."""
        return self.rank == 0

    def autocast(self, amp: bool) -> torch.autocast:
        """bfloat16 where `amp` asks for it, on a GPU: most CPUs only imitate it, some 20 times slower than float32."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=amp and self.device.type == "cuda")

    def synchronise(self) -> None:
        """Wait until the device has finished its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def total(self, sums: Tensor) -> Tensor:
        """The sum over all processes; the argument is left alone."""
        return torch.stack(self.gather(sums)).sum(0)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The same-shaped tensor of every process, by rank."""
        if self.world == 1:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self.world)]
        distributed.all_gather(parts, tensor)
        return parts

    def share_buffers(self, model: nn.Module) -> None:
        """Give all processes the buffers of the one that saves them: batch norms on a CPU see their own images only."""
        if self.world > 1:
            for buffer in model.buffers():
                distributed.broadcast(buffer, 0)

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model whose backward pass averages gradients over the processes."""
        if self.world == 1:
            return model
        ids = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids)


def start(device: str) -> Process:
    """Join the processes that torchrun started, if it did, and choose this one's device."""
    world, rank, restarts = _variable("WORLD_SIZE", 1), _variable("RANK"), _variable("TORCHELASTIC_RESTART_COUNT")
    if rank >= world:
        raise TrainingError(f"RANK is {rank}, but WORLD_SIZE is {world}: start several processes with torchrun.")
    chosen = choose_device(device, _variable("LOCAL_RANK") if world > 1 else 0)
    if world > 1 and not distributed.is_initialized():
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        # torchrun's agent keeps one store for all lives of its workers. Without a prefix of its own, a restarted
        # worker may read the address of a dead one there, and fail to connect (seen with PyTorch 2.13 and gloo).
        try:
            store, _, _ = next(rendezvous("env://"))
        except ValueError as error:  # no MASTER_ADDR, say
            raise TrainingError(
                f"WORLD_SIZE is {world}, but: {error}. Start several processes with torchrun."
            ) from None
        store = PrefixStore(f"life {restarts}", store)
        backend = "nccl" if chosen.type == "cuda" else "gloo"
        distributed.init_process_group(backend, store=store, rank=rank, world_size=world)
    return Process(chosen, rank, world, restarts)


def _variable(name: str, default: int = 0) -> int:
    """A whole number that torchrun put into the environment."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise TrainingError(f"The environment variable {name} must be a whole number, got {text!r}: unset it.")
    return int(text)


def finish() -> None:
    """Leave the other processes."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
