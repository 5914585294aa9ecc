"""The images a run trains on, those it holds out, and those it is evaluated on."""

import dataclasses
from typing import Literal, cast

import torch
from torch import Tensor

from kerneq.data import Augment, Batches, Folder, Images, load, split_validation
from kerneq.run.config import Config
from kerneq.training.errors import TrainingError
from kerneq.training.process import Process

Pictures = Images | Folder
WIDER = 2  # times the images in a batch that keeps nothing for gradients: half the launches


def prepare(config: Config, process: Process) -> tuple[Pictures, Batches, Batches | None]:
    """The training images, their batches, and the held-out batches (None if nothing is held out).

    Incomplete batches of training images are left out, so that every step sees `batch_size` images and every
    process the same number of them; which images those are changes from epoch to epoch.
    """
    images = read(config, "train")
    held_out = None
    count = round(config.data.validation * len(images))
    if count:
        images, held_out = split_validation(cast(Images, images), count, config.seed)  # or Folder: both go
    batches = _batches(images, config, process, config.augment)
    return images, batches, plain_batches(held_out, config, process) if held_out is not None else None


def read(config: Config, split: Literal["train", "test"], known: bool = True) -> Pictures:
    """The configured images of a split; `known=False`: those whose classes are kept out of training."""
    images = load(config.data.name, split, size=config.data.size or None)
    subset = config.data.subset
    if subset == "all":
        return images
    if subset == "first-five-classes":
        trained = images.labels < 5
        if known:
            images = dataclasses.replace(images, classes=images.classes[:5])
    else:
        trained = _first_four(config, split, images.labels)
    return images.select(torch.nonzero(trained if known else ~trained).flatten())


def _first_four(config: Config, split: Literal["train", "test"], coarse: Tensor) -> Tensor:
    """Whether each image's fine class is among the first four (by label) of the five in its super-class."""
    if config.data.name != "cifar100-coarse":
        raise TrainingError("`data.subset` = four-of-five-subclasses needs `data.name` = cifar100-coarse.")
    fine = load("cifar100", split).labels
    fifth = {int(fine[coarse == label].max()) for label in range(20)}
    return torch.tensor([int(label) not in fifth for label in fine])


def plain_batches(images: Pictures, config: Config, process: Process) -> Batches:
    """Batches in order, without augmentation, every image once."""
    return _batches(images, config, process, None)


def _batches(images: Pictures, config: Config, process: Process, augment: Augment | None) -> Batches:
    try:
        return Batches(
            images,
            config.training.batch_size * (1 if augment is not None else WIDER),
            augment=augment if augment is not None else Augment(),
            shuffle=augment is not None,
            seed=config.seed,
            device=process.device,
            channels_last=config.training.channels_last,
            rank=process.rank,
            world=process.world,
            drop_last=augment is not None,
        )
    except ValueError as error:
        raise TrainingError(f"The images cannot be put into batches: {error}") from None
