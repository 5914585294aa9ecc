"""Images with their labels, in memory or in files, and the batches of an epoch that are made of them.

Images are values that can be selected, moved, decoded and split. Batches are the same whoever asks for them and
whenever: images in memory are moved to the device once, and a batch is gathered, augmented and normalised there; the
host only draws random numbers, runs ahead and never waits. Images in files are decoded by worker processes, ahead of
the batch that needs them or, where they fit into memory, once.
"""

import dataclasses
import functools
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import final

import numpy as np
import torch
from PIL import Image, ImageOps
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION
from torch import Tensor
from torch.utils.data import DataLoader

from .augment import Augment, Place, Purpose, augment_bytes, cut_out, generator, mix, random_boxes, resized_crop
from .operations import to_device

# What is opened, whatever the file's name says: no format whose reader starts another program, as EPS does.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
# Pixels that are decoded of one file: more may be an attack on the memory. A JPEG may have twice as many, Pillow's own
# limit, since it decodes to a half, a quarter or an eighth of its sides without ever being whole.
LARGEST = 89_000_000
CHUNK = 64  # files that a worker decodes at a time, if all are to be in memory
Box = tuple[float, float, float, float]  # left, top, right, bottom, as shares of a picture's largest central square
WHOLE: Box = (0.0, 0.0, 1.0, 1.0)
Request = tuple[np.ndarray, np.ndarray | None]  # which files, int64 (n), and their boxes, (n, 4)


@final
class DataError(Exception):
    """Data could not be read; the message says which file, what was wrong and what to do."""


@final
@dataclasses.dataclass(frozen=True, eq=False)
class ImageFiles:
    """Pixels that lie in picture files and stand for a tensor uint8 (count, 3, size, size).

    They are decoded when a batch needs them. Indexing with int64 (n) selects n files and opens none."""

    paths: tuple[Path, ...]
    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the decoded pixels will have."""
        return len(self.paths), 3, self.size, self.size

    def __getitem__(self, index: Tensor | np.ndarray) -> "ImageFiles":
        return ImageFiles(tuple(self.paths[i] for i in index.tolist()), self.size)

    def decode(self, boxes: Sequence[Box] | None = None) -> Tensor:
        """All of them in memory, each cut to its largest central square, or to its box in that square."""
        pixels = torch.empty(self.shape, dtype=torch.uint8)
        for i, path in enumerate(self.paths):
            pixels[i] = decode(path, self.size, WHOLE if boxes is None else boxes[i])
        return pixels


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Images:
    """Labelled images, in memory or, if they are too many or too large for it, in files.

    A value: `to`, `select` and `split_validation` give new ones, and copy no picture file. Pixels are bytes until a
    batch normalises them, (pixels / 255 − mean) / std.

    `mean` and `std` per channel, for pixels scaled to [0, 1], are those of the whole training split, or ImageNet's."""

    pixels: Tensor | ImageFiles  # uint8 (count, channels, height, width)
    labels: Tensor  # int64 (count)
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if isinstance(self.pixels, Tensor) and (self.pixels.dtype != torch.uint8 or self.pixels.ndim != 4):
            got = f"{self.pixels.dtype} {tuple(self.pixels.shape)}"
            raise ValueError(f"`pixels` must be uint8 (count, channels, height, width), got {got}.")
        count, channels = self.pixels.shape[:2]
        if self.labels.dtype != torch.int64 or self.labels.shape != (count,):
            got = f"{self.labels.dtype} {tuple(self.labels.shape)}"
            raise ValueError(f"`labels` must be int64 ({count},), got {got}.")
        if not len(self.mean) == len(self.std) == channels:
            got = f"{len(self.mean)} and {len(self.std)}"
            raise ValueError(f"`mean` and `std` must have {channels} entries, got {got}.")

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        where = "in memory" if isinstance(self.pixels, Tensor) else "in files"
        return f"Images({len(self)} of shape {self.shape} {where}, {len(self.classes)} classes)"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every image."""
        _, channels, height, width = self.pixels.shape
        return channels, height, width

    def to(self, device: str | torch.device) -> "Images":
        """The same on `device`; pixels in files get there when they are decoded."""
        pixels = self.pixels.to(device) if isinstance(self.pixels, Tensor) else self.pixels
        return dataclasses.replace(self, pixels=pixels, labels=self.labels.to(device))

    def in_memory(self) -> Tensor:
        """The pixels, uint8; those in files are decoded, where they are many by a process on every core.

        Not by threads: Pillow keeps Python's lock while it decodes WebP."""
        files = self.pixels
        if isinstance(files, Tensor):
            return files
        pixels = torch.empty(files.shape, dtype=torch.uint8)
        rows = [np.arange(first, min(first + CHUNK, len(self))) for first in range(0, len(self), CHUNK)]
        workers = min(_cores(), len(self) // CHUNK)
        for index, part in zip(rows, _decode_ahead(files, [(index, None) for index in rows], workers), strict=True):
            pixels[index[0] : index[-1] + 1] = part
        return pixels

    def select(self, index: Tensor) -> "Images":
        """The images at `index`, int64, in that order."""
        return dataclasses.replace(self, pixels=self.pixels[index], labels=self.labels[index])

    def sample(self, count: int) -> "Images":
        """At most `count` of the images, in a random order that is always the same."""
        return self.select(torch.randperm(len(self), generator=torch.Generator().manual_seed(0))[:count])


def decode(path: Path, size: int, box: Box = WHOLE) -> Tensor:
    """One picture file as uint8 (3, size, size): its largest central square, or the part of that square in `box`.

    It is turned as its EXIF data say, on white where it is transparent, and resized by bilinear interpolation. A file
    that is not one readable picture, or one of more than 89 megapixels (a JPEG: 178), is a DataError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd metadata, say, which do not matter here
            with Image.open(path, formats=FORMATS) as picture:
                count = picture.width * picture.height
                if box == WHOLE or count > LARGEST:  # a JPEG decodes straight to the smallest sufficient size
                    enough = int(size / min(box[2] - box[0], box[3] - box[1]))
                    picture.draft("RGB", (enough, enough))
                if picture.width * picture.height > LARGEST:
                    raise DataError(_too_large(path, count))
                pixels = _upright(path, picture)
                side = min(pixels.size)
                corner = [(length - side) / 2 for length in pixels.size]
                left, top, right, bottom = np.add(np.multiply(box, side), corner * 2).tolist()
                part = pixels.resize((size, size), Image.Resampling.BILINEAR, (left, top, right, bottom))
    except DataError:
        raise
    except Image.DecompressionBombError:
        raise DataError(_too_large(path, None)) from None
    except Exception as error:  # Pillow's decoders raise errors of every kind on damaged files
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path} is not a readable picture ({reason}): replace or remove it.") from None
    return torch.from_numpy(np.array(part)).permute(2, 0, 1)


def _upright(path: Path, picture: Image.Image) -> Image.Image:
    """The picture turned as its EXIF data say, in 8-bit colours, on white where one could see through it.

    A file whose picture or whose brightness is ambiguous is refused.
    """
    frames = getattr(picture, "n_frames", 1)
    if frames > 1 and picture.format != "MPO":  # a camera's JPEG with a second view behind the first
        what = f"{frames} pictures, an animation or pages"
        raise DataError(f"{path} holds {what}: save the one you mean by itself, in its place, or remove the file.")
    if picture.mode in ("I", "F"):
        raise DataError(f"{path} opens with 32 bits a pixel, and nothing says which value is white: save it with 8.")
    picture.load()
    with suppress(Exception):  # of every kind, about damaged EXIF data: they turn nothing, and the picture is sound
        ImageOps.exif_transpose(picture, in_place=True)
    if picture.mode.startswith("I;16"):  # Pillow would cut off whatever is brighter than 255
        values, tags = np.array(picture).astype(np.int32), getattr(picture, "tag_v2", {})
        white = 2 ** tags.get(BITSPERSAMPLE, (16,))[0] - 1  # of a TIFF, which may also count from white
        levels = (white - values if tags.get(PHOTOMETRIC_INTERPRETATION) == 0 else values) * 255 // white
        grey = np.where(values == picture.info.get("transparency", -1), 255, levels)
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if picture.mode not in ("RGBA", "RGBa", "LA", "La", "PA") and "transparency" not in picture.info:
        return picture.convert("RGB")
    white = Image.new("RGBA", picture.size, "white")
    white.alpha_composite(picture.convert("RGBA"))
    return white.convert("RGB")


def _too_large(path: Path, count: int | None) -> str:
    has = f"{count / 1e6:.1f}" if count is not None else "more than 178"
    return f"{path} has {has} megapixels, and at most 89 are read, of a JPEG 178: save it smaller."


def split_validation(images: Images, count: int, seed: int) -> tuple[Images, Images]:
    """The training and the validation part, the latter of `count` images, class by class in proportion.

    Which images go where depends on the labels, `count` and `seed` alone. Both parts keep the order of the
    original."""
    labels = images.labels.cpu().numpy()
    if not 0 < count < len(labels):
        raise ValueError(f"`count` must lie between 1 and {len(labels) - 1} for this data set, got {count}.")
    rng = generator(Purpose.VALIDATION, seed)
    held = np.zeros(len(labels), dtype=bool)
    for label, quota in enumerate(_quotas(np.bincount(labels), count)):
        held[rng.permutation(np.flatnonzero(labels == label))[:quota]] = True
    train, validation = (torch.from_numpy(np.flatnonzero(mask)) for mask in (~held, held))
    return images.select(train), images.select(validation)


def _quotas(sizes: np.ndarray, count: int) -> np.ndarray:
    """Images to take of each class: proportional to its size, whole, summing to `count`.

    The method of largest remainders: every quota is within 1 of the exact share."""
    exact = sizes * (count / sizes.sum())
    quotas = np.floor(exact).astype(np.int64)
    order = np.argsort(quotas - exact, kind="stable")  # largest remainder first, the lower label on a tie
    quotas[order[: count - quotas.sum()]] += 1
    return quotas


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
    channels_last: bool = False
    rank: int = 0
    world: int = 1
    drop_last: bool = True  # leave out the incomplete batch at the end of an epoch
    workers: int | None = None  # processes that decode; None: one for each core, eight at most

    def __post_init__(self) -> None:
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
        if self.augment.cutout > 2 * max(sides):  # it covers every picture, wherever its centre is
            raise ValueError(f"`cutout` must be at most {2 * max(sides)} here, got {self.augment.cutout}.")
        if (self.augment.randaugment or self.augment.trivial) and channels not in (1, 3):
            raise ValueError(f"`randaugment` and `trivial` need 1 or 3 channels, these pictures have {channels}.")
        if self.augment.mixes and not (self.drop_last and self.shuffle):
            raise ValueError("mixup and cutmix pair neighbours of a shuffled batch: set `shuffle` and `drop_last`.")
        if self.augment.mixes and self.batch_size // self.world % 2:
            share = self.batch_size // self.world
            raise ValueError(f"mixup and cutmix need an even batch on every rank, got {share}.")
        self.images = self.images.to(self.device)
        self._mean = torch.tensor(self.images.mean, device=self.device)[:, None, None]
        self._std = torch.tensor(self.images.std, device=self.device)[:, None, None]

    def __len__(self) -> int:
        """Batches in an epoch."""
        whole, rest = divmod(len(self.images), self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    def epoch(self, n: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches (x, target) of epoch `n` from number `start` on.

        x is normalised, float32 (batch, channels, height, width); target holds labels, int64 (batch), or with
        mixup and cutmix a row of class probabilities for each image, float32 (batch, classes)."""
        if not 0 <= start <= len(self):
            raise ValueError(f"`start` must lie between 0 and {len(self)}, got {start}.")
        order = np.arange(len(self.images))
        if self.shuffle:
            order = generator(Purpose.ORDER, self.seed, n).permutation(order)
        indices = to_device(order, self.images.labels.device)  # one copy for the whole epoch
        places = [self._place(n, batch) for batch in range(start, len(self))]
        rows = [slice(p.batch * self.batch_size + p.first, p.batch * self.batch_size + p.last) for p in places]
        source = self.images.pixels
        if isinstance(source, ImageFiles):
            pictures = self._decoded(source, [order[row] for row in rows], places)
        else:
            pictures = (source[indices[row]] for row in rows)
        for place, row, pixels in zip(places, rows, pictures, strict=True):
            yield self._finish(pixels, self.images.labels[indices[row]], place)

    def _place(self, epoch: int, batch: int) -> Place:
        """Rank r of w works on the rows ⌊rn/w⌋ … ⌊(r + 1)n/w⌋ − 1 of a batch of n; only the last batch may be short."""
        count = min(self.batch_size, len(self.images) - batch * self.batch_size)
        first, last = (rank * count // self.world for rank in (self.rank, self.rank + 1))
        return Place(self.seed, epoch, batch, count, first, last)

    def _decoded(self, files: ImageFiles, indices: list[np.ndarray], places: list[Place]) -> Iterator[Tensor]:
        """The batches at `indices` of pixels in files, decoded in worker processes, in order.

        A random resized crop is taken here from the picture in its own resolution, before it becomes small."""
        area = self.augment.area
        boxes = [random_boxes(place, area) if area < 1 else None for place in places]
        workers = min(8, _cores()) if self.workers is None else self.workers
        for batch in _decode_ahead(files, list(zip(indices, boxes, strict=True)), workers):
            pinned = batch.pin_memory() if self._mean.is_cuda else batch  # or the copy would make the host wait
            yield pinned.to(self.device, non_blocking=True)

    def _finish(self, pixels: Tensor, labels: Tensor, place: Place) -> tuple[Tensor, Tensor]:
        """From bytes to what a model trains on: crop, augment, normalise, cut out, mix."""
        if self.augment.area < 1 and isinstance(self.images.pixels, Tensor):  # of a file it has been decoded
            pixels = resized_crop(pixels, random_boxes(place, self.augment.area))
        x = normalise(augment_bytes(pixels, self.augment, place), self._mean, self._std)
        target = labels
        if self.augment.cutout:
            x = cut_out(x, self.augment.cutout, place)
        if self.augment.mixes:
            x, target = mix(x, labels, len(self.images.classes), self.augment, place)
        return (x.contiguous(memory_format=torch.channels_last) if self.channels_last else x), target


def normalise(pixels: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(pixels / 255 − mean) / std in float32; mean and std are (channels, 1, 1)."""
    return pixels.to(torch.float32).div_(255).sub_(mean).div_(std)


def _decode_ahead(files: ImageFiles, requests: list[Request], workers: int) -> Iterator[Tensor]:
    """The files at each index, cut to their boxes, decoded in worker processes (none: here), in order."""
    loader: DataLoader[np.ndarray | str] = DataLoader(
        requests,  # type: ignore[arg-type]
        batch_size=None,
        collate_fn=functools.partial(_decode_batch, files),
        num_workers=workers,
        worker_init_fn=_serve,
        generator=torch.Generator().manual_seed(0),  # or it would take a number from torch's global one
    )
    for batch in loader:
        if isinstance(batch, str):
            raise DataError(batch)
        yield torch.from_numpy(batch)


def _serve(worker: int) -> None:
    """Make a worker process end with the process that it decodes for, and for no other reason.

    Ctrl-C, or a SIGTERM to the whole group, asks that process to stop, which still needs the batch in hand.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """PyTorch's own watch is not enough: a worker whose batch nobody takes out of the pipe would wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _decode_batch(files: ImageFiles, request: Request) -> np.ndarray | str:
    """The files at an index, each cut to its box: a whole batch, decoded inside a worker.

    An array, since it travels through a pipe: a tensor needs shared memory, and where that is full the worker loses the
    batch, for which the run would wait for ever. A file that cannot be read gives the sentence that says so instead: an
    exception would come out of a worker process wrapped in that process's traceback."""
    index, boxes = request
    try:
        return files[index].decode(None if boxes is None else boxes.tolist()).numpy()
    except DataError as error:
        return str(error)


def _cores() -> int:
    """Those this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
