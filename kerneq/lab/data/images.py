"""Images with their labels, in memory or in picture files, and the batches of an epoch.

Images in memory are moved to the device once, and batches are gathered, augmented and normalised there; the host draws
random numbers, runs ahead and never waits. Images in files are decoded by worker processes ahead of their batch.
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

from ...tensors import check_whole
from .augment import (
    Augment,
    Place,
    Purpose,
    crop_and_flip,
    cut_out,
    generator,
    mix,
    random_boxes,
    random_operations,
    resized_crop,
)
from .operations import to_device

# Formats that are opened, whatever the file's name; none whose reader starts another program, as EPS does.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
# Most pixels decoded of one file: more may be an attack on the memory. A JPEG, which decodes to a fraction of its sides
# without being whole in memory, may have twice as many, Pillow's own limit.
LARGEST = 89_000_000
CHUNK = 64  # files that a worker decodes at a time
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

    They are decoded when a batch needs them. Indexing with int64 (n) selects n files without opening them."""

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
    """Labelled images, in memory or in picture files; `to`, `select` and `split_validation` return new values.

    Pixels are bytes until a batch normalises them, (pixels / 255 − mean) / std. `mean` and `std` per channel, for
    pixels scaled to [0, 1], are those of the whole training split, or ImageNet's."""

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
        """The pixels, uint8; many files are decoded by processes, since Pillow decodes WebP under Python's lock."""
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
            warnings.simplefilter("ignore")  # about odd metadata
            with Image.open(path, formats=FORMATS) as picture:
                count = picture.width * picture.height
                if box == WHOLE or count > LARGEST:  # a JPEG decodes straight to the smallest sufficient size
                    enough = int(size / min(box[2] - box[0], box[3] - box[1]))
                    picture.draft("RGB", (enough, enough))
                if picture.width * picture.height > LARGEST:
                    raise DataError(_too_large(path, f"{count / 1e6:.1f}"))
                pixels = _upright(path, picture)
                side = min(pixels.size)
                corner = [(length - side) / 2 for length in pixels.size]
                left, top, right, bottom = np.add(np.multiply(box, side), corner * 2).tolist()
                part = pixels.resize((size, size), Image.Resampling.BILINEAR, (left, top, right, bottom))
    except DataError:
        raise
    except Image.DecompressionBombError:
        raise DataError(_too_large(path, "more than 178")) from None
    except Exception as error:  # Pillow's decoders raise errors of every kind on damaged files
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path} is not a readable picture ({reason}): replace or remove it.") from None
    return torch.from_numpy(np.array(part)).permute(2, 0, 1)


def _too_large(path: Path, megapixels: str) -> str:
    return f"{path} has {megapixels} megapixels, and at most 89 are read, of a JPEG 178: save it smaller."


def _upright(path: Path, picture: Image.Image) -> Image.Image:
    """The picture turned as its EXIF data say, in 8-bit colours, on white where it is transparent.

    A file of several pictures, or of which no value is known to be white, is a DataError.
    """
    frames = getattr(picture, "n_frames", 1)
    if frames > 1 and picture.format != "MPO":  # a camera's JPEG with a second view behind the first
        what = f"{frames} pictures, an animation or pages"
        raise DataError(f"{path} holds {what}: save the one you mean by itself, in its place, or remove the file.")
    if picture.mode in ("I", "F"):
        raise DataError(f"{path} opens with 32 bits a pixel, and nothing says which value is white: save it with 8.")
    picture.load()
    with suppress(Exception):  # damaged EXIF data raise errors of every kind, and the picture is readable without them
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


def split_validation(images: Images, count: int, seed: int) -> tuple[Images, Images]:
    """The training part and a validation part of `count` images, each class in proportion, in the original order.

    The choice depends on the labels, `count` and `seed` only."""
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
    """Whole numbers of images to take of each class, summing to `count`: the method of largest remainders."""
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

    Everything random depends on (seed, epoch, batch, position in the global batch) only, so an epoch can be resumed in
    the middle, and any number of ranks together see what one process would see."""

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
        check_whole("batch_size", self.batch_size)
        check_whole("seed", self.seed, 0)
        if not 0 <= self.rank < self.world:
            raise ValueError(f"`rank` must lie between 0 and {self.world - 1}, got {self.rank}.")
        if self.batch_size % self.world:
            raise ValueError(f"`batch_size` {self.batch_size} does not divide among {self.world} ranks.")
        if len(self) == 0:
            have = f"there are only {len(self.images)} pictures"
            raise ValueError(f"`batch_size` {self.batch_size} gives no whole batch, {have}: lower it.")
        if self.augment.mixes and not (self.drop_last and self.shuffle):
            raise ValueError("mixup and cutmix pair neighbours of a shuffled batch: set `shuffle` and `drop_last`.")
        self.augment.check_fits(self.images.shape, self.batch_size // self.world)
        self.images = self.images.to(self.device)
        self._mean = torch.tensor(self.images.mean, device=self.device)[:, None, None]
        self._std = torch.tensor(self.images.std, device=self.device)[:, None, None]

    def __len__(self) -> int:
        """Batches in an epoch."""
        whole, rest = divmod(len(self.images), self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    def epoch(self, n: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches (x, target) of epoch `n` from number `start` on.

        x is normalised, float32 (batch, channels, height, width). target is the labels, int64 (batch), or with mixup
        and cutmix the class probabilities of each image, float32 (batch, classes)."""
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
        """The batches at `indices` of picture files, in order; a random crop is taken at the file's own resolution."""
        area = self.augment.area
        boxes = [random_boxes(place, area) if area < 1 else None for place in places]
        workers = min(8, _cores()) if self.workers is None else self.workers
        for batch in _decode_ahead(files, list(zip(indices, boxes, strict=True)), workers):
            pinned = batch.pin_memory() if self._mean.is_cuda else batch  # or the copy would make the host wait
            yield pinned.to(self.device, non_blocking=True)

    def _finish(self, pixels: Tensor, labels: Tensor, place: Place) -> tuple[Tensor, Tensor]:
        """Augment and normalise the pixels of a batch; returns (x, target)."""
        augment = self.augment
        if augment.area < 1 and isinstance(self.images.pixels, Tensor):  # files were cropped when they were decoded
            pixels = resized_crop(pixels, random_boxes(place, augment.area))
        if augment.crop or augment.flip:
            pixels = crop_and_flip(pixels, augment, place)
        if augment.randaugment or augment.trivial:
            pixels = random_operations(pixels, augment, place)
        x, target = normalise(pixels, self._mean, self._std), labels
        if augment.cutout:
            x = cut_out(x, augment.cutout, place)
        if augment.mixes:
            x, target = mix(x, labels, len(self.images.classes), augment, place)
        return (x.contiguous(memory_format=torch.channels_last) if self.channels_last else x), target


def normalise(pixels: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(pixels / 255 − mean) / std in float32; mean and std are (channels, 1, 1)."""
    return pixels.to(torch.float32).div_(255).sub_(mean).div_(std)


def _decode_ahead(files: ImageFiles, requests: list[Request], workers: int) -> Iterator[Tensor]:
    """The files of each request, cut to their boxes, in order; decoded in this process where `workers` is 0."""
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
    """Make a worker process end with its parent and for no other reason.

    It ignores Ctrl-C and a SIGTERM to the whole group: the parent stops in its own time and still needs the batch. It
    watches the parent itself: with PyTorch's watch alone, a worker blocked on a full pipe would wait for ever.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _decode_batch(files: ImageFiles, request: Request) -> np.ndarray | str:
    """The pixels of one request, decoded inside a worker, or the sentence about a file that cannot be read.

    An array, which goes through a pipe: a tensor needs shared memory, and where that is full the batch is lost and the
    run waits for ever. A sentence: an exception would arrive wrapped in the worker's traceback."""
    index, boxes = request
    try:
        return files[index].decode(None if boxes is None else boxes.tolist()).numpy()
    except DataError as error:
        return str(error)


def _cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
