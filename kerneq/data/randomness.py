"""Where every random number of the data comes from: a place in the run, never a hidden state.

All numbers are drawn on the host, for the whole global batch, from a generator keyed by (purpose, seed, epoch, batch);
a rank then keeps its own rows. So a resumed run and a run on more processes see the same pictures, and the CPU and the
GPU too; and the host knows which picture gets which operation, so that no device has to be asked.
"""

import dataclasses
import enum
from typing import final

import numpy as np
import torch
from torch import Tensor


@final
class Purpose(enum.IntEnum):
    """Separate streams, so that switching one augmentation on leaves the others' numbers alone."""

    VALIDATION = 1
    ORDER = 2
    CROP = 3
    CUTOUT = 4
    POLICY = 5
    MIX = 6
    MIXUP = 7
    CUTMIX = 8
    AREA = 9


def generator(purpose: Purpose, seed: int, epoch: int = 0, batch: int = 0) -> np.random.Generator:
    """The generator of one purpose at one place of the run."""
    if min(seed, epoch, batch) < 0:
        raise ValueError(f"`seed`, epoch and batch must not be negative, got {seed}, {epoch} and {batch}.")
    return np.random.default_rng([purpose, epoch, batch, seed])


@final
@dataclasses.dataclass(frozen=True)
class Place:
    """A batch of a run, and the rows of it (first … last − 1 of `count`) that this rank works on.

    Numbers are drawn for all `count` rows and cut afterwards, so that they do not depend on the number of ranks."""

    seed: int
    epoch: int
    batch: int
    count: int  # pictures in the global batch
    first: int
    last: int

    def uniform(self, purpose: Purpose, columns: int) -> np.ndarray:
        """Numbers in [0, 1), (columns, rows of this rank)."""
        numbers = generator(purpose, self.seed, self.epoch, self.batch).random((columns, self.count))
        return numbers[:, self.first : self.last]

    def beta(self, purpose: Purpose, alpha: float) -> np.ndarray:
        """Beta(α, α) numbers, (rows of this rank)."""
        numbers = generator(purpose, self.seed, self.epoch, self.batch).beta(alpha, alpha, self.count)
        return numbers[self.first : self.last]


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor on `device`; the host does not wait for the copy."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":  # from pinned memory the copy is asynchronous
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
