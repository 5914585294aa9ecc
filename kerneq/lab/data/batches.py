"""The batches of an epoch: images are gathered, changed at random and normalised on the device.

The host draws the random numbers for the whole global batch, from a generator keyed by (purpose, seed, epoch, batch),
and each rank keeps its own rows: a resumed run, more processes and another device see the same pictures. By hand, since
torchvision draws from one global generator and changes all pictures of a batch alike.
"""

import dataclasses
import enum
from collections.abc import Iterator
from typing import Literal, final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ...settings import check_values, setting
from ...tensors import check_whole
from .images import ImageFiles, Images
from .operations import RANDAUGMENT, TRIVIAL_WIDE, Operation, fetch, operate, to_device


@final
@dataclasses.dataclass(frozen=True)
class Augment:
    """Random changes to every training picture, each picture with its own draws, in the order below.

    The changes up to `share` map bytes to bytes; cutout, mixup and CutMix change normalised pictures, whose mean is 0.
    Everything is off by default: `Augment()` changes nothing."""

    area: float = setting(1.0, "smallest share of a picture that a random resized crop keeps; 1: off", above=0, high=1)
    crop: int = setting(0, "shift by up to so many pixels each way (pad and crop); 0: off", low=0)
    padding: Literal["reflect", "zero"] = setting("reflect", "what a shift brings in: reflect or zero")
    flip: bool = setting(False, "mirror left to right, every second picture")
    randaugment: int = setting(0, "RandAugment operations a picture (Cubuk et al., 2020); 0: off", low=0, high=100)
    magnitude: float = setting(9.0, "of RandAugment, 0 … 30", low=0, high=30)
    trivial: bool = setting(False, "one TrivialAugmentWide operation (Müller and Hutter, 2021)")
    share: float = setting(1.0, "share of the pictures that get `randaugment` or `trivial`", low=0, high=1)
    cutout: int = setting(0, "side of a square set to the mean, anywhere (DeVries and Taylor, 2017); 0: off", low=0)
    mixup: float = setting(0.0, "α of mixup's Beta(α, α) (Zhang et al., 2018); 0: off", low=0)
    cutmix: float = setting(0.0, "α of CutMix's (Yun et al., 2019); with mixup, every second picture; 0: off", low=0)
    mixed: float = setting(1.0, "share of the pictures that `mixup` and `cutmix` change", low=0, high=1)

    def __post_init__(self) -> None:
        check_values(self)
        if self.randaugment and self.trivial:
            raise ValueError("`randaugment` and `trivial` exclude each other: set one of them.")

    @property
    def mixes(self) -> bool:
        """Whether targets become soft: a distribution over the classes for each picture."""
        return self.mixup > 0 or self.cutmix > 0

    def check_fits(self, shape: tuple[int, int, int], batch: int) -> None:
        """A ValueError if it does not suit pictures (channels, height, width), `batch` of them on each rank."""
        channels, *sides = shape
        if self.crop >= min(sides):
            raise ValueError(f"`crop` must be below the pictures' side {min(sides)}, got {self.crop}.")
        if self.cutout > 2 * max(sides):  # it covers every picture, wherever its centre is
            raise ValueError(f"`cutout` must be at most {2 * max(sides)} here, got {self.cutout}.")
        if (self.randaugment or self.trivial) and channels not in (1, 3):
            raise ValueError(f"`randaugment` and `trivial` need 1 or 3 channels, these pictures have {channels}.")
        if self.mixes and batch % 2:
            raise ValueError(f"mixup and cutmix need an even batch on every rank, got {batch}.")


@final
class Purpose(enum.IntEnum):
    """One stream of random numbers for each purpose: switching one augmentation on leaves the others' numbers alone."""

    VALIDATION = 1
    ORDER = 2
    CROP = 3
    CUTOUT = 4
    POLICY = 5
    MIX = 6
    MIXUP = 7
    CUTMIX = 8
    AREA = 9
    MIXED = 10


def generator(purpose: Purpose, seed: int, epoch: int = 0, batch: int = 0) -> np.random.Generator:
    """The generator of one purpose at one place of the run."""
    return np.random.default_rng([purpose, epoch, batch, seed])


@final
@dataclasses.dataclass(frozen=True)
class BatchRows:
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


@final
@dataclasses.dataclass(eq=False)
class Batches:
    """Global batches of `batch_size` images, of which this rank yields its contiguous share.

        batches = Batches(load("cifar10", "train"), 512, Augment(crop=4, flip=True), device="cuda")
        for x, labels in batches.epoch(0):
            ...

    An epoch can be resumed in the middle, and any number of ranks together see what one process would see."""

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
    workers: int | None = None  # processes that decode; None: one for each core, sixteen at most

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
            pictures = self._decode(source, [order[row] for row in rows], places)
        else:
            pictures = (source[indices[row]] for row in rows)
        for place, row, pixels in zip(places, rows, pictures, strict=True):
            yield self._finish(pixels, self.images.labels[indices[row]], place)

    def _place(self, epoch: int, batch: int) -> BatchRows:
        """Rank r of w works on the rows ⌊rn/w⌋ … ⌊(r + 1)n/w⌋ − 1 of a batch of n; only the last batch may be short."""
        count = min(self.batch_size, len(self.images) - batch * self.batch_size)
        first, last = (rank * count // self.world for rank in (self.rank, self.rank + 1))
        return BatchRows(self.seed, epoch, batch, count, first, last)

    def _decode(self, files: ImageFiles, indices: list[np.ndarray], places: list[BatchRows]) -> Iterator[Tensor]:
        """The batches at `indices` of picture files, in order; a random crop is taken at the file's own resolution."""
        area = self.augment.area
        boxes = [draw_boxes(place, area) if area < 1 else None for place in places]
        for batch in files.decode_ahead(list(zip(indices, boxes, strict=True)), self.workers):
            pinned = batch.pin_memory() if self._mean.is_cuda else batch  # or the copy would make the host wait
            yield pinned.to(self.device, non_blocking=True)

    def _finish(self, pixels: Tensor, labels: Tensor, place: BatchRows) -> tuple[Tensor, Tensor]:
        """Augment and normalise the pixels of a batch; returns (x, target)."""
        augment = self.augment
        if augment.area < 1 and isinstance(self.images.pixels, Tensor):  # files were cropped when they were decoded
            pixels = crop_and_resize(pixels, draw_boxes(place, augment.area))
        if augment.crop or augment.flip:
            pixels = crop_and_flip(pixels, augment, place)
        if augment.randaugment or augment.trivial:
            pixels = apply_policy(pixels, augment, place)
        x, target = normalise(pixels, self._mean, self._std), labels
        if augment.cutout:
            x = cut_out(x, augment.cutout, place)
        if augment.mixes:
            x, target = mix(x, labels, len(self.images.classes), augment, place)
        return (x.contiguous(memory_format=torch.channels_last) if self.channels_last else x), target


def normalise(pixels: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(pixels / 255 − mean) / std in float32; mean and std are (channels, 1, 1)."""
    return pixels.to(torch.float32).div_(255).sub_(mean).div_(std)


def draw_boxes(place: BatchRows, area: float) -> np.ndarray:
    """A random part of each picture: left, top, right, bottom as shares of its sides, (batch, 4).

    The part has `area` … 1 of the surface, and its proportions differ from the picture's by up to 4:3. A side longer
    than the picture's is cut to it, so that from an `area` of ¾ on a part may be smaller (at 0.9: 0.82)."""
    surface, ratio, y, x = place.uniform(Purpose.AREA, 4)
    side = np.sqrt(area + (1 - area) * surface)
    stretch = np.exp((ratio - 0.5) * np.log(4 / 3))  # (3/4)^½ … (4/3)^½, of width to √surface
    width, height = np.minimum(side * stretch, 1), np.minimum(side / stretch, 1)
    left, top = x * (1 - width), y * (1 - height)
    return np.stack([left, top, left + width, top + height], axis=1)


def crop_and_resize(pixels: Tensor, boxes: np.ndarray) -> Tensor:
    """Each picture's part in its box, by bilinear interpolation at the picture's own size."""
    left, top, right, bottom = 2 * boxes.T - 1  # grid_sample's corners are ±1
    zero = np.zeros_like(left)
    rows = [[(right - left) / 2, zero, (right + left) / 2], [zero, (bottom - top) / 2, (bottom + top) / 2]]
    theta = np.stack([np.stack(row, axis=1) for row in rows], axis=1).astype(np.float32)
    grid = functional.affine_grid(to_device(theta, pixels.device), list(pixels.shape), align_corners=False)
    found = functional.grid_sample(pixels.float(), grid, padding_mode="border", align_corners=False)
    return found.round_().to(torch.uint8)


def crop_and_flip(pixels: Tensor, settings: Augment, place: BatchRows) -> Tensor:
    """Shift each picture by up to `crop` whole pixels each way, as pad-and-crop does, and mirror every second one."""
    down, right, side = place.uniform(Purpose.CROP, 3)
    down, right = (np.floor(u * (2 * settings.crop + 1)) - settings.crop for u in (down, right))
    flip = (side < 0.5) & settings.flip
    height, width = pixels.shape[2:]
    moves = to_device(np.stack([down, right, flip]).astype(np.int64), pixels.device)[:, :, None]  # (3, batch, 1)
    rows = torch.arange(height, device=pixels.device) + moves[0]
    columns = torch.arange(width, device=pixels.device)
    columns = torch.where(moves[2] > 0, width - 1 - columns, columns) + moves[1]
    if settings.padding == "reflect":
        rows, columns = _reflect(rows, height), _reflect(columns, width)
    return fetch(pixels, rows[:, :, None], columns[:, None, :])


def _reflect(index: Tensor, size: int) -> Tensor:
    """Fold an index within one picture of the border back inside; the border pixel is not repeated."""
    return (size - 1) - (index.abs() - (size - 1)).abs()


def apply_policy(pixels: Tensor, settings: Augment, place: BatchRows) -> Tensor:
    """Apply the policy of `settings` to about `share` of the pictures.

    RandAugment: `randaugment` operations after one another, drawn for each picture, at level `magnitude` / 30.
    TrivialAugment: one operation at one of 31 levels, both drawn for each picture."""
    if settings.trivial:
        ranges = TRIVIAL_WIDE
        chosen, *draws, level = place.uniform(Purpose.POLICY, 4)
        level = np.floor(level * 31) / 30
    else:
        ranges = RANDAUGMENT
        chosen, *draws = place.uniform(Purpose.POLICY, 1 + 2 * settings.randaugment)
        level = np.full(len(chosen), settings.magnitude / 30)
    for which, side in zip(draws[::2], draws[1::2], strict=True):
        operation = np.floor(which * len(Operation)).astype(np.int64)
        operation[chosen >= settings.share] = Operation.IDENTITY
        sign = np.where(side < 0.5, -1.0, 1.0)
        pixels = operate(pixels, operation, ranges.amounts(operation, level, sign, (pixels.shape[2], pixels.shape[3])))
    return pixels


def cut_out(x: Tensor, side: int, place: BatchRows) -> Tensor:
    """Set a square of each normalised picture (batch, channels, height, width) to the mean, in place.

    Its centre may be any pixel, so that the square may cross the border."""
    height, width = x.shape[2:]
    y, z = place.uniform(Purpose.CUTOUT, 2)
    top, left = np.floor(y * height) - side // 2, np.floor(z * width) - side // 2
    return x.masked_fill_(_box_mask(x, top, top + side, left, left + side), 0.0)


def mix(x: Tensor, labels: Tensor, classes: int, settings: Augment, place: BatchRows) -> tuple[Tensor, Tensor]:
    """mixup's λx + (1 − λ)x′, or CutMix's x with a box of x′, and the class probabilities (batch, classes) to match.

    x is (batch, channels, height, width). x′ is the other picture of the pair 2k, 2k + 1 and λ ~ Beta(α, α) for each
    picture. CutMix's box has the share 1 − λ of the surface before it is clipped to the picture; its pixels count."""
    height, width = x.shape[2:]
    kind, y, z = place.uniform(Purpose.MIX, 3)
    boxed = kind < 0.5 if settings.mixup and settings.cutmix else np.full(len(kind), settings.cutmix > 0)
    chosen = place.uniform(Purpose.MIXED, 1)[0] < settings.mixed
    keep = np.ones(len(kind))  # λ of mixup
    if settings.mixup:
        keep = np.where(boxed | ~chosen, 1.0, place.beta(Purpose.MIXUP, settings.mixup))
    top, bottom, left, right = np.zeros((4, len(kind)))
    if settings.cutmix:
        side = np.where(boxed & chosen, np.sqrt(1 - place.beta(Purpose.CUTMIX, settings.cutmix)), 0.0)
        top, bottom = _span(y, side, height)
        left, right = _span(z, side, width)
    own = keep * (1 - (bottom - top) * (right - left) / (height * width))  # share of the picture itself
    shares = to_device(np.stack([keep, own]).astype(np.float32), x.device)
    weight = torch.where(_box_mask(x, top, bottom, left, right), 0.0, shares[0, :, None, None, None])
    target = functional.one_hot(labels, classes).to(torch.float32)
    return _mix_neighbours(x, weight), _mix_neighbours(target, shares[1, :, None])


def _mix_neighbours(x: Tensor, weight: Tensor) -> Tensor:
    """weight · x + (1 − weight) · x′, where x′ is the other picture of each pair."""
    neighbour = x.view(len(x) // 2, 2, *x.shape[1:]).flip(1).view_as(x)
    return x * weight + neighbour * (1 - weight)


def _span(centre: np.ndarray, share: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The pixels of an interval of `share` of the side around a uniform centre, clipped to the picture."""
    middle, half = np.floor(centre * size), np.floor(share * size) // 2
    return np.clip(middle - half, 0, size), np.clip(middle + half, 0, size)


def _box_mask(x: Tensor, top: np.ndarray, bottom: np.ndarray, left: np.ndarray, right: np.ndarray) -> Tensor:
    """Whether each pixel lies in its picture's box, top ≤ row < bottom, left ≤ column < right, (batch, 1, h, w)."""
    edges = to_device(np.stack([top, bottom, left, right]).astype(np.int64), x.device)[:, :, None]
    rows = torch.arange(x.shape[2], device=x.device)
    columns = torch.arange(x.shape[3], device=x.device)
    inside_rows = (rows >= edges[0]) & (rows < edges[1])
    inside_columns = (columns >= edges[2]) & (columns < edges[3])
    return inside_rows[:, None, :, None] & inside_columns[:, None, None, :]


def split_validation(images: Images, count: int, seed: int) -> tuple[Images, Images]:
    """The training part and a validation part of `count` images, each class in proportion, in the original order.

    The choice depends on the labels, `count` and `seed` only."""
    if not 0 < count < len(images):
        raise ValueError(f"`count` must lie between 1 and {len(images) - 1} for this data set, got {count}.")
    quotas = _quotas(np.bincount(images.labels.cpu().numpy()), count)
    return hold_out(images, rank_in_class(images, seed) < quotas[images.labels.cpu().numpy()])


def split_fold(images: Images, folds: int, fold: int, seed: int) -> tuple[Images, Images]:
    """All parts but number `fold` (from 1) of so many, and that part; each class is dealt out over the parts.

    Together the parts are all images, each once."""
    ranks, labels = rank_in_class(images, seed), images.labels.cpu().numpy()
    sizes = np.bincount(labels)
    if folds > len(images):
        raise ValueError(f"{len(images)} images cannot be cut into {folds} parts: lower `folds`.")
    return hold_out(images, (ranks + (np.cumsum(sizes) - sizes)[labels]) % folds == fold - 1)


def rank_in_class(images: Images, seed: int) -> np.ndarray:
    """The place of each image in a random order of its class, from 0."""
    rng, labels = generator(Purpose.VALIDATION, seed), images.labels.cpu().numpy()
    ranks = np.zeros(len(labels), dtype=np.int64)
    for label in range(labels.max() + 1):
        ranks[rng.permutation(np.flatnonzero(labels == label))] = np.arange((labels == label).sum())
    return ranks


def hold_out(images: Images, held: np.ndarray) -> tuple[Images, Images]:
    """The images that are not `held`, and those that are, in the original order."""
    train, validation = (torch.from_numpy(np.flatnonzero(mask)) for mask in (~held, held))
    return images.select(train), images.select(validation)


def _quotas(sizes: np.ndarray, count: int) -> np.ndarray:
    """Whole numbers of images to take of each class, summing to `count`: the method of largest remainders."""
    exact = sizes * (count / sizes.sum())
    quotas = np.floor(exact).astype(np.int64)
    order = np.argsort(quotas - exact, kind="stable")  # largest remainder first, the lower label on a tie
    quotas[order[: count - quotas.sum()]] += 1
    return quotas
