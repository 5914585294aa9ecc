"""The batches of an epoch, on the device, the same whoever asks for them and whenever."""

from collections.abc import Iterator
from typing import final

import numpy as np
import torch
from torch import Tensor

from .area import boxes, zoom
from .augment import Augment
from .folder import Folder
from .images import Images
from .mixing import mix
from .pipeline import augment as augment_pixels
from .pipeline import cut_out, normalise
from .randomness import Place, Purpose, stream
from .stream import open_stream
from .transfer import to_device


@final
class Batches:
    """Global batches of `batch_size` pictures, of which this rank yields its contiguous share.

    Everything random depends on (seed, epoch, batch, position in the global batch) only, so an epoch can
    be entered in the middle and any number of ranks together see what one process would see. Images live
    on the device; a Folder is decoded by `workers` processes while the model computes."""

    def __init__(
        self,
        images: Images | Folder,
        batch_size: int,
        augment: Augment | None = None,
        shuffle: bool = True,
        seed: int = 0,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
        rank: int = 0,
        world: int = 1,
        drop_last: bool = True,
        workers: int | None = None,
    ) -> None:
        self.batch_size = batch_size
        self.augment = augment if augment is not None else Augment()
        self.shuffle = shuffle
        self.seed = seed
        self.device = torch.device(device)
        self.images = images.to(self.device)
        self.dtype = dtype
        self.channels_last = channels_last
        self.rank = rank
        self.world = world
        self.drop_last = drop_last
        self.workers = workers
        self._check()
        self._mean, self._std = (
            torch.tensor(values, device=self.device)[:, None, None] for values in (images.mean, images.std)
        )

    def __len__(self) -> int:
        """Batches in an epoch."""
        whole, rest = divmod(len(self.images), self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    def epoch(self, n: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches (x, target) of epoch `n` from number `start` on.

        x is normalised, in `dtype`; target holds labels, or with mixup and cutmix a row of class
        probabilities for each picture."""
        if not 0 <= start <= len(self):
            raise ValueError(f"`start` must lie between 0 and {len(self)}, got {start}.")
        order = np.arange(len(self.images))
        if self.shuffle:
            order = stream(Purpose.ORDER, self.seed, n).permutation(order)
        places = [self._place(n, batch) for batch in range(start, len(self))]
        rows = [slice(p.batch * self.batch_size + p.first, p.batch * self.batch_size + p.last) for p in places]
        indices = to_device(order, self.device)
        if isinstance(self.images, Images):
            pictures = self._resident(self.images.pixels, [indices[row] for row in rows], places)
        else:
            pictures = self._streamed(self.images, [order[row] for row in rows], places)
        for place, row, pixels in zip(places, rows, pictures, strict=True):
            yield self._finish(pixels, self.images.labels[indices[row]], place)

    def _place(self, epoch: int, batch: int) -> Place:
        count = min(self.batch_size, len(self.images) - batch * self.batch_size)
        first, last = (rank * count // self.world for rank in (self.rank, self.rank + 1))
        return Place(self.seed, epoch, batch, count, first, last)

    def _resident(self, pixels: Tensor, indices: list[Tensor], places: list[Place]) -> Iterator[Tensor]:
        for index, place in zip(indices, places, strict=True):
            chosen = pixels[index]
            yield chosen if self.augment.area == 1 else zoom(chosen, boxes(place, self.augment.area))

    def _streamed(self, folder: Folder, indices: list[np.ndarray], places: list[Place]) -> Iterator[Tensor]:
        for pixels in open_stream(folder, indices, places, self.augment.area, self.workers):
            yield pixels.to(self.device, non_blocking=True)

    def _finish(self, pixels: Tensor, labels: Tensor, place: Place) -> tuple[Tensor, Tensor]:
        x = normalise(augment_pixels(pixels, self.augment, place), self._mean, self._std)
        if self.augment.cutout:
            x = cut_out(x, self.augment.cutout, place)
        target = labels
        if self.augment.mixes:
            x, target = mix(x, labels, len(self.images.classes), self.augment, place)
        x = x.to(self.dtype)
        return (x.contiguous(memory_format=torch.channels_last) if self.channels_last else x), target

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
        edge = min(self.images.shape[1:])
        if self.augment.crop >= edge:
            raise ValueError(f"`crop` must be below the pictures' side {edge}, got {self.augment.crop}.")
        if (self.augment.randaugment or self.augment.trivial) and self.images.shape[0] not in (1, 3):
            got = self.images.shape[0]
            raise ValueError(f"`randaugment` and `trivial` need 1 or 3 channels, these pictures have {got}.")
        if self.augment.mixes and not (self.drop_last and self.shuffle):
            raise ValueError("mixup and cutmix pair neighbours of a shuffled batch: set `shuffle` and `drop_last`.")
        if self.augment.mixes and self.batch_size // self.world % 2:
            share = self.batch_size // self.world
            raise ValueError(f"mixup and cutmix need an even batch on every rank, got {share}.")
