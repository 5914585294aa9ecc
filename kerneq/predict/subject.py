"""What a run was trained on, known without its data set: the size of the pictures, their scale, the classes' names."""

import torch

from kerneq.config import Config
from kerneq.data import DataError, Images, find
from kerneq.training.data import read


def subject(config: Config, outputs: int) -> tuple[Images, bool]:
    """No pictures, but the shape, scale and classes of those of the run; and whether the classes have their names.

    `outputs` is how many classes the run's model tells apart. A run does not store their names: where only its
    pictures' folder had them, and that is gone or has changed, they are numbered.
    """
    data_set = find(config.data.name)
    if data_set.class_names is not None:
        classes = _trained(data_set.class_names, config)
    else:
        classes = _found(config)
    named = len(classes) == outputs
    numbers = tuple(str(number) for number in range(outputs))
    side = config.data.size or data_set.size
    return _nothing(side, classes if named else numbers, data_set.mean, data_set.std), named


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
