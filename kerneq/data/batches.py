"""The batches of an epoch, on the device, the same whoever asks for them and whenever.

Images in memory are moved to the device once, and a batch is gathered, augmented and normalised there; the host only
draws random numbers, runs ahead and never waits. Images in files are decoded ahead by worker processes.
"""

import dataclasses
import os
import sys
from collections.abc import Iterator
from typing import final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .augment import (
    Augment,
    Place,
    Purpose,
    crop_and_flip,
    cut_out,
    generator,
    mix,
    normalise,
    random_boxes,
    resized_crop,
    to_device,
)
from .images import DataError, ImageFiles, Images
from .operations import random_operations


@final
@dataclasses.dataclass(eq=False)
class Batches:
    """Global batches of `batch_size` images, of which this rank yields its contiguous share.

        batches = Batches(load("cifar10", "train"), 512, Augment(crop=4, flip=True), device="cuda")
        for x, labels in batches.epoch(0):
            ...

    Everything random depends on (seed, epoch, batch, position in the global batch) only, so an epoch can be entered in
    the middle and any number of ranks together see what one process would see. Pixels in memory live on the device;
    files are decoded by worker processes while the model computes."""

    images: Images
    batch_size: int
    augment: Augment = Augment()
    shuffle: bool = True
    seed: int = 0
    device: str | torch.device = "cpu"
    dtype: torch.dtype = torch.float32
    channels_last: bool = False
    rank: int = 0
    world: int = 1
    drop_last: bool = True  # leave out the incomplete batch at the end of an epoch
    workers: int | None = None  # processes that decode; None: one for each core, eight at most

    def __post_init__(self) -> None:
        self._check()
        self.device = self._device = torch.device(self.device)
        self.images = self.images.to(self._device)
        self._mean = torch.tensor(self.images.mean, device=self._device)[:, None, None]
        self._std = torch.tensor(self.images.std, device=self._device)[:, None, None]

    def _check(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"`batch_size` must be at least 1, got {self.batch_size}.")
        if not 0 <= self.rank < self.world:
            raise ValueError(f"`rank` must lie between 0 and {self.world - 1}, got {self.rank}.")
        if self.batch_size % self.world:
            raise ValueError(f"`batch_size` {self.batch_size} does not divide among {self.world} ranks.")
        if len(self) == 0:
            have = f"there are only {len(self.images)} pictures"
            raise ValueError(f"`batch_size` {self.batch_size} gives no whole batch, {have}: lower it.")
        if self.seed < 0:
            raise ValueError(f"`seed` must not be negative, got {self.seed}.")
        channels, *sides = self.images.shape
        if self.augment.crop >= min(sides):
            raise ValueError(f"`crop` must be below the pictures' side {min(sides)}, got {self.augment.crop}.")
        if (self.augment.randaugment or self.augment.trivial) and channels not in (1, 3):
            raise ValueError(f"`randaugment` and `trivial` need 1 or 3 channels, these pictures have {channels}.")
        if self.augment.mixes and not (self.drop_last and self.shuffle):
            raise ValueError("mixup and cutmix pair neighbours of a shuffled batch: set `shuffle` and `drop_last`.")
        if self.augment.mixes and self.batch_size // self.world % 2:
            share = self.batch_size // self.world
            raise ValueError(f"mixup and cutmix need an even batch on every rank, got {share}.")

    def __len__(self) -> int:
        """Batches in an epoch."""
        whole, rest = divmod(len(self.images), self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    def epoch(self, n: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches (x, target) of epoch `n` from number `start` on.

        x is normalised, in `dtype`, (batch, channels, height, width); target holds labels, int64 (batch), or with
        mixup and cutmix a row of class probabilities for each image, float32 (batch, classes)."""
        if not 0 <= start <= len(self):
            raise ValueError(f"`start` must lie between 0 and {len(self)}, got {start}.")
        order = np.arange(len(self.images))
        if self.shuffle:
            order = generator(Purpose.ORDER, self.seed, n).permutation(order)
        indices = to_device(order, self._device)  # one copy for the whole epoch
        places = [self._place(n, batch) for batch in range(start, len(self))]
        rows = [slice(p.batch * self.batch_size + p.first, p.batch * self.batch_size + p.last) for p in places]
        if isinstance(self.images.pixels, ImageFiles):
            pictures = self._decoded(self.images.pixels, [order[row] for row in rows], places)
        else:
            pictures = self._resident(self.images.pixels, [indices[row] for row in rows], places)
        for place, row, pixels in zip(places, rows, pictures, strict=True):
            yield self._finish(pixels, self.images.labels[indices[row]], place)

    def _place(self, epoch: int, batch: int) -> Place:
        """Rank r of w works on the rows ⌊rn/w⌋ … ⌊(r + 1)n/w⌋ − 1 of a batch of n; only the last batch may be short."""
        count = min(self.batch_size, len(self.images) - batch * self.batch_size)
        first, last = (rank * count // self.world for rank in (self.rank, self.rank + 1))
        return Place(self.seed, epoch, batch, count, first, last)

    def _resident(self, pixels: Tensor, indices: list[Tensor], places: list[Place]) -> Iterator[Tensor]:
        """The batches at `indices` of pixels that are on the device."""
        for index, place in zip(indices, places, strict=True):
            chosen = pixels[index]
            if self.augment.area < 1:
                chosen = resized_crop(chosen, random_boxes(place, self.augment.area))
            yield chosen

    def _decoded(self, files: ImageFiles, indices: list[np.ndarray], places: list[Place]) -> Iterator[Tensor]:
        """The batches at `indices` of pixels in files, decoded in worker processes, in order.

        A random resized crop is taken here from the picture in its own resolution, before it becomes small."""
        loader = DataLoader(
            _Decoder(files),
            batch_size=None,
            sampler=[
                (index, None if self.augment.area == 1 else random_boxes(place, self.augment.area))
                for index, place in zip(indices, places, strict=True)
            ],
            num_workers=_default_workers() if self.workers is None else self.workers,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator().manual_seed(0),  # or it would take a number from torch's global one
        )
        for batch in loader:
            if isinstance(batch, str):
                raise DataError(batch)
            yield batch.to(self._device, non_blocking=True)

    def _finish(self, pixels: Tensor, labels: Tensor, place: Place) -> tuple[Tensor, Tensor]:
        """From bytes to what a model trains on: augment, normalise, cut out, mix."""
        if self.augment.crop or self.augment.flip:
            pixels = crop_and_flip(pixels, self.augment, place)
        if self.augment.randaugment or self.augment.trivial:
            pixels = random_operations(pixels, self.augment, place)
        x = normalise(pixels, self._mean, self._std)
        if self.augment.cutout:
            x = cut_out(x, self.augment.cutout, place)
        target = labels
        if self.augment.mixes:
            x, target = mix(x, labels, len(self.images.classes), self.augment, place)
        x = x.to(self.dtype)
        return (x.contiguous(memory_format=torch.channels_last) if self.channels_last else x), target


@final
class _Decoder(Dataset[Tensor | str]):
    """Runs inside the workers; an item is a whole batch, so that nothing is collated twice.

    A file that cannot be read gives the sentence that says so instead: an exception would come out of a worker process
    wrapped in that process's traceback."""

    def __init__(self, files: ImageFiles) -> None:
        self.files = files

    def __getitem__(self, request: tuple[np.ndarray, np.ndarray | None]) -> Tensor | str:
        index, boxes = request
        try:
            return self.files[index].decode(None if boxes is None else boxes.tolist())
        except DataError as error:
            return str(error)


def _default_workers() -> int:
    """One process for each core this process may use, eight at most."""
    return min(8, len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1)
