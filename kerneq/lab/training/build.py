"""Build what a configuration describes: the images, their batches, the model."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, cast

import torch

from ... import models
from ...models import AbstractModel
from ...models.layers import synchronise_norms
from ..data import (
    OWN,
    Augment,
    Batches,
    DataError,
    ImageFiles,
    Images,
    load,
    split_fold,
    split_validation,
)
from ..run import TrainingError
from ..run.config import Config, ConfigError
from .process import Process

LISTED = 20  # broken files that one message names
MANY = 500  # pictures that take a moment to check
Builder = Callable[[Config, Images], AbstractModel]


def build_model(config: Config, images: Images) -> AbstractModel:
    """The configured model of the zoo, for pictures and classes like these."""
    try:
        model = models.from_config(config.model.settings, classes=len(images.classes), channels=images.shape[0])
        model.check_shape((len(images), *images.shape))
    except ValueError as error:
        raise ConfigError(f"[model] {error}") from None
    return model


def place(model: AbstractModel, config: Config, process: Process) -> AbstractModel:
    """The model on its device, in its memory format; on GPUs batch norms take their statistics over all processes.

    PyTorch has no such norm on a CPU: each process uses its share of the batch, and the first one's are kept.
    """
    model = model.to(process.device)
    if config.training.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if process.world > 1 and process.device.type == "cuda":
        model = cast(AbstractModel, synchronise_norms(model))
    return model


def make_training_batches(
    config: Config, process: Process, announce: Callable[[str], None] = lambda text: None
) -> tuple[Batches, Batches | None]:
    """The batches of the training images, and of the held-out images (None if nothing is held out).

    Pictures of one's own are all decoded before, those to test on too: one that is broken would be found hours later.
    """
    if config.data.name.startswith(OWN):
        check_pictures(config, announce)
    images = read_images(config, "train").to(process.device)
    if config.data.memory and not isinstance(images.pixels, torch.Tensor):
        announce(f"decoding {len(images):,} pictures into memory, {math.prod(images.pixels.shape) / 1e9:.2f} GB")
    images, held_out = split(images, config)  # fast, since the images are on the device
    batches = make_batches(hold(images, config, process), config, process, train=True)
    if held_out is None:
        return batches, None
    return batches, make_batches(hold(held_out, config, process), config, process, train=False)


def check_pictures(config: Config, announce: Callable[[str], None]) -> None:
    """Refuse a folder of one's own with files that are no readable pictures, or say which are left out."""
    parts = [load(config.data.name, "train", size=config.data.size or None)]
    with suppress(DataError):  # there may be none to test on
        parts.append(load(config.data.name, "test", size=config.data.size or None))
    if (count := sum(map(len, parts))) > MANY:
        announce(f"checking that all {count:,} pictures can be read")
    broken = list_broken(config, *parts)
    if broken and not config.data.skip_broken:
        raise DataError(describe_broken(broken))
    if broken:
        announce(f"left out, {len(broken)} in all: {', '.join(str(path) for path in [*broken][:LISTED])}")


def split(images: Images, config: Config) -> tuple[Images, Images | None]:
    """The images to train on, and those held out to validate on (None if nothing is)."""
    if config.data.folds:
        return split_fold(images, config.data.folds, config.data.fold, config.seed)
    count = round(config.data.validation * len(images))
    if count == len(images):
        raise TrainingError(f"`data.validation` = {config.data.validation} of {count} images leaves none to train on.")
    return split_validation(images, count, config.seed) if count > 0 else (images, None)


def class_counts(*parts: Images) -> list[int]:
    """How many images of each class, by label, some parts of a data set have together."""
    labels = torch.cat([part.labels.cpu() for part in parts])
    return labels.bincount(minlength=len(parts[0].classes)).tolist()


def list_broken(config: Config, *parts: Images) -> dict[Path, str]:
    """The files of one's own that are no readable pictures, with a sentence about each; other sets are not decoded."""
    files = [part.pixels for part in parts if isinstance(part.pixels, ImageFiles) and config.data.name.startswith(OWN)]
    return {path: why for part in files for path, why in part.find_broken().items()}


def describe_broken(broken: Mapping[Path, str]) -> str:
    """A sentence about each of the files, and what to do about all."""
    lines = [*broken.values()][:LISTED]
    if len(broken) > LISTED:
        lines.append(f"And {len(broken) - LISTED} more.")
    if len(broken) > 1:
        lines.append("`kerneq train … --skip-broken` leaves them all out.")
    return "\n".join(lines)


def leave_out(images: Images, broken: Mapping[Path, str]) -> Images:
    """The images but for those in these files; a class of which none is left is a `DataError`."""
    if not broken or not isinstance(images.pixels, ImageFiles):
        return images
    kept = images.select(torch.tensor([n for n, path in enumerate(images.pixels.paths) if path not in broken]))
    for name, before, after in zip(images.classes, class_counts(images), class_counts(kept), strict=True):
        if before and not after:
            raise DataError(f"None of the {before} pictures of the class {name} can be read: replace them.")
    return kept


def hold(images: Images, config: Config, process: Process) -> Images:
    """Decode picture files into memory if `data.memory` says so; otherwise every batch decodes its own."""
    if not config.data.memory or isinstance(images.pixels, torch.Tensor):
        return images
    needed, free = math.prod(images.pixels.shape), free_memory(process.device)
    if needed > free:
        pictures = f"{len(images):,} pictures of {images.shape[1]} × {images.shape[2]}"
        raise TrainingError(
            f"{pictures} take {needed / 1e9:.1f} GB of memory and {free / 1e9:.1f} GB are free: set data.memory=false, "
            "which decodes them for every batch, or a smaller data.size."
        )
    return dataclasses.replace(images, pixels=images.in_memory())


def free_memory(device: torch.device) -> float:
    """Bytes that are free both here and on the device; infinite where the system does not say."""
    free = math.inf
    with suppress(OSError):  # Linux alone has it
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = 1024.0 * int(lines["MemAvailable"].split()[0])
    return free if device.type == "cpu" else min(free, torch.cuda.mem_get_info(device)[0])


def make_batches(images: Images, config: Config, process: Process, train: bool) -> Batches:
    """Shuffled and augmented whole batches to train on, or every image once, in order and as it is."""
    try:
        return Batches(
            images,
            config.training.batch_size,
            augment=config.augment if train else Augment(),
            shuffle=train,
            seed=config.seed,
            device=process.device,
            channels_last=config.training.channels_last,
            rank=process.rank,
            world=process.world,
            drop_last=train,
        )
    except ValueError as error:
        raise TrainingError(f"The images cannot be put into batches: {error}") from None


def read_images(config: Config, split: Literal["train", "test"], known: bool = True) -> Images:
    """The configured images of a split; `known=False`: those whose classes are kept out of training.

    Files of one's own that are no readable pictures are left out if `data.skip_broken`; else those to test on are named
    in a `DataError`, all at once, as `make_training_batches` does for those to train on.
    """
    images = load(config.data.name, split, size=config.data.size or None)
    if config.data.skip_broken:
        images = leave_out(images, list_broken(config, images))
    elif split == "test" and (broken := list_broken(config, images)):
        raise DataError(describe_broken(broken))
    subset = config.data.subset
    if subset == "all":
        return images
    if subset == "first-five-classes":
        trained = images.labels < 5
        if known:
            images = dataclasses.replace(images, classes=images.classes[:5])
    elif config.data.name != "cifar100-coarse":
        raise TrainingError("`data.subset` = four-of-five-subclasses needs `data.name` = cifar100-coarse.")
    else:  # by label, the first four of the five fine classes in a super-class
        fine = load("cifar100", split).labels
        fifth = torch.stack([fine[images.labels == label].max() for label in range(20)])
        trained = ~torch.isin(fine, fifth)
    return images.select(torch.nonzero(trained if known else ~trained).flatten())
