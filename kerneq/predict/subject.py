"""What a run was trained on, known without its data set: the size of the pictures, their scale, the classes' names."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from kerneq.data import DataError, Images
from kerneq.data.catalogue import user_folder
from kerneq.data.load import find
from kerneq.data.packed import Packed
from kerneq.data.pictures import IMAGENET_MEAN, IMAGENET_STD, Pictures
from kerneq.run.config import Config
from kerneq.training.data import read
from kerneq.training.errors import TrainingError

SIDES: Mapping[str, int] = MappingProxyType(  # of the pictures of the sets that come packed
    {"digits": 8, "mnist": 28, "fashion-mnist": 28, "cifar10": 32, "cifar100": 32, "cifar100-coarse": 32}
)


def subject(config: Config, outputs: int) -> tuple[Images, bool]:
    """No pictures, but the shape, scale and classes of those of the run; and whether the classes have their names.

    `outputs` is how many classes the run's model tells apart. A run does not store their names: where only its
    pictures' folder had them, and that is gone or has changed, they are numbered.
    """
    name = config.data.name
    data_set = user_folder(Path()) if name.startswith("folder:") else find(name)
    if isinstance(data_set, Packed):
        return _nothing(SIDES[name], _trained(data_set.classes, config), data_set.mean, data_set.std), True
    if not isinstance(data_set, Pictures):
        raise TrainingError(
            f"Pictures cannot be made to look like those of {name}: its reader states no size for them."
        )
    side = config.data.size or data_set.size
    if data_set.classes is not None:
        classes = _trained(tuple(data_set.classes.values()), config)
    else:
        classes = _found(config)
    named = len(classes) == outputs
    numbers = tuple(str(number) for number in range(outputs))
    return _nothing(side, classes if named else numbers, IMAGENET_MEAN, IMAGENET_STD), named


def _trained(classes: tuple[str, ...], config: Config) -> tuple[str, ...]:
    return classes[:5] if config.data.subset == "first-five-classes" else classes


def _found(config: Config) -> tuple[str, ...]:
    """The classes as the folder of pictures has them now; none if it is not there."""
    try:
        return read(config, "train").classes
    except DataError:
        return ()


def _nothing(side: int, classes: tuple[str, ...], mean: tuple[float, ...], std: tuple[float, ...]) -> Images:
    pixels = torch.empty((0, len(mean), side, side), dtype=torch.uint8)
    return Images(pixels, torch.empty(0, dtype=torch.int64), classes, mean, std)
