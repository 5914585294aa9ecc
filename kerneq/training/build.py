"""From a configuration to what a run is made of: its images, their batches, its model."""

import dataclasses
from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from .. import models
from ..data import Augment, Batches, Images, load, split_validation
from ..fused.layers import synchronised
from ..run import TrainingError
from ..run.config import Config, ConfigError
from .process import Process

Builder = Callable[[Config, Images], nn.Module]
WIDER = 2  # times the images in a batch that keeps nothing for gradients: half the launches


class Trainable(Protocol):
    """Beyond `model(x) -> logits` and `model(x, solutions=True) -> (logits, {name: Solution})`."""

    def compile_map(self) -> None:
        """torch.compile the part that a solve evaluates again and again."""

    def diagnostics(self) -> dict[str, float]:
        """Numbers to follow over a run: norm bounds, E at the last equilibrium, γ."""


def build_model(config: Config, images: Images) -> nn.Module:
    """The configured model of the zoo, for pictures and classes like these."""
    try:
        return models.from_config(config.model.settings, classes=len(images.classes), channels=images.shape[0])
    except ValueError as error:
        raise ConfigError(f"[model] {error}") from None


def place(model: nn.Module, config: Config, process: Process) -> nn.Module:
    """The model on its device, in its memory format, its norms joined over the processes.

    On GPUs batch norms take their statistics over all processes. PyTorch has no such norm on CPU: there
    each process uses its share of the batch, and the first one's running statistics are kept.
    """
    model = model.to(process.device)
    if config.training.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return synchronised(model) if process.world > 1 and process.device.type == "cuda" else model


def for_inference(config: Config, process: Process) -> Config:
    """On a CPU channels-last whatever the training used: oneDNN's convolutions then need no reordering."""
    if process.device.type != "cpu":
        return config
    return dataclasses.replace(config, training=dataclasses.replace(config.training, channels_last=True))


def training_batches(config: Config, process: Process) -> tuple[Images, Batches, Batches | None]:
    """The training images, their batches, and the held-out batches (None if nothing is held out).

    Incomplete batches of training images are left out, so that every step sees `batch_size` images and every
    process the same number of them; which images those are changes from epoch to epoch.
    """
    images = read_images(config, "train")
    held_out = None
    count = round(config.data.validation * len(images))
    if count:
        images, held_out = split_validation(images, count, config.seed)
    batches = _batches(images, config, process, config.augment)
    return images, batches, plain_batches(held_out, config, process) if held_out is not None else None


def plain_batches(images: Images, config: Config, process: Process) -> Batches:
    """Batches in order, without augmentation, every image once."""
    return _batches(images, config, process, None)


def _batches(images: Images, config: Config, process: Process, augment: Augment | None) -> Batches:
    """Shuffled batches with `augment`, plain ones without it."""
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


def read_images(config: Config, split: Literal["train", "test"], known: bool = True) -> Images:
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
