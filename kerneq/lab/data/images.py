"""Images with their labels, in memory or in picture files, which worker processes decode ahead of their use."""

import dataclasses
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import final

import numpy as np
import torch
from PIL import Image, ImageOps
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION
from torch import Tensor
from torch.utils.data import DataLoader

# Formats that are opened, whatever the file's name; none whose reader starts another program, as EPS does.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
# Most pixels decoded of one file: more may be an attack on the memory. A JPEG, which decodes to a fraction of its sides
# without being whole in memory, may have twice as many, Pillow's own limit.
LARGEST = 89_000_000
CHUNK = 64  # files that a worker decodes at a time
Box = tuple[float, float, float, float]  # left, top, right, bottom, as shares of a picture's largest central square
WHOLE: Box = (0.0, 0.0, 1.0, 1.0)
Request = tuple[np.ndarray, np.ndarray | None]  # which files, int64 (n), and their boxes, (n, 4)
Decoded = tuple[np.ndarray, dict[Path, str]]  # uint8 (n, 3, size, size), and what is wrong with the broken ones


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

    def decode_ahead(self, requests: list[Request], workers: int | None = None) -> Iterator[Tensor]:
        """The pixels of each request, in order, by so many processes.

        By default sixteen, if there are as many cores and enough files. Decoded in this process where it is 0."""
        for pixels, broken in self._decode_all(requests, workers):
            if broken:
                raise DataError(next(iter(broken.values())))
            yield torch.from_numpy(pixels)

    def find_broken(self) -> dict[Path, str]:
        """The files that are not readable pictures, with a sentence about each; decodes every one."""
        parts = ImageFiles(self.paths, 1)._decode_all(self.requests())  # a pixel each is all that comes back
        return {path: why for _, broken in parts for path, why in broken.items()}

    def requests(self) -> list[Request]:
        """Requests for every file, in order."""
        numbers = np.arange(len(self.paths))
        return [(numbers[start : start + CHUNK], None) for start in range(0, len(numbers), CHUNK)]

    def _decode_all(self, requests: list[Request], workers: int | None = None) -> Iterator[Decoded]:
        """The pixels and the broken files of each request, in order."""
        if workers is None:
            workers = min(16, _count_cores(), sum(len(index) for index, _ in requests) // CHUNK)
        loader: DataLoader[Decoded] = DataLoader(
            requests,  # type: ignore[arg-type]
            batch_size=None,
            collate_fn=self._decode_request,  # type: ignore[arg-type]
            num_workers=workers,
            worker_init_fn=_serve,
            generator=torch.Generator().manual_seed(0),  # or it would take a number from torch's global one
        )
        try:
            yield from loader
        except RuntimeError as error:
            raise (explain_killed_worker(error) or error) from None

    def _decode_request(self, request: Request) -> Decoded:
        """The pixels of one request, decoded inside a worker, and the files that cannot be read, each with a sentence.

        An array goes through a pipe: a tensor would need shared memory, and wait for ever where that is full. An
        exception would arrive wrapped in the worker's traceback."""
        index, boxes = request
        pixels, broken = np.empty((len(index), *self.shape[1:]), np.uint8), {}
        for row, path in enumerate(self.paths[number] for number in index):
            try:
                pixels[row] = decode(path, self.size, WHOLE if boxes is None else boxes[row].tolist())
            except DataError as error:
                broken[path] = str(error)
        return pixels, broken


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Images:
    """Labelled images, in memory or in picture files; a batch normalises them, (pixels / 255 − mean) / std.

    `mean` and `std` per channel are those of the whole training split scaled to [0, 1], or ImageNet's."""

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
        for number, part in enumerate(files.decode_ahead(files.requests())):
            pixels[number * CHUNK :][: len(part)] = part
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
        reason = str(error).splitlines()[0].replace(f" {str(path)!r}", "") if str(error) else type(error).__name__
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


def explain_killed_worker(error: RuntimeError) -> DataError | None:
    """What to say where PyTorch reports, wherever the program is just then, that such a process died; else None."""
    if "DataLoader worker" not in str(error):
        return None
    return DataError(
        "A process that decodes pictures was killed, perhaps because the memory was full: close other programs, or "
        "lower training.batch_size; a training goes on with --resume."
    )


def _serve(worker: int) -> None:
    """Make a worker process end with its parent, or when the parent says so, and for no other reason.

    It ignores Ctrl-C and a SIGTERM to the whole group: the parent stops in its own time and still needs the batch. One
    that the parent sends ends it, or a worker that waits for a dead one would keep the program from ending. It watches
    the parent itself: with PyTorch's watch alone, a worker blocked on a full pipe would wait for ever.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # for the thread to take, which sees who sent it
        threading.Thread(target=_end_when_told, daemon=True).start()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _end_when_told() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(1)


def _count_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
