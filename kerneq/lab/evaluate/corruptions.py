"""Accuracy of a trained run under the 19 corruptions of CIFAR-10-C at 5 severities (Figure 2 of GEQ and KerDEQ)."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import final

from torch import Tensor

from ..data import data_root
from ..data.corruptions import NAMES, STANDARD, corrupt, read_frost, read_published
from .scores import score
from .trained import TrainedRun

PUBLISHED = {"cifar10": "CIFAR-10-C", "cifar100": "CIFAR-100-C"}  # folders under the data root
SEVERITIES = (1, 2, 3, 4, 5)


@final
@dataclasses.dataclass(frozen=True)
class CorruptionResult:
    """Accuracy on the test images, clean and corrupted; errors are shares of wrong predictions."""

    source: str  # where the corrupted pictures come from
    images: int
    clean: float  # accuracy on the pictures without corruption
    accuracy: Mapping[str, Sequence[float]]  # by corruption, then by severity
    mean_accuracy: float  # over all corruptions and severities: Figure 2's average
    mean_error: float  # the mean corruption error, not normalised: over the 15 standard corruptions

    def summary(self) -> list[tuple[str, str]]:
        """The means, then each corruption with its five severities."""
        lines = [
            ("corrupted pictures", self.source),
            ("accuracy, clean", f"{self.clean:.2%}"),
            (f"accuracy, mean of {len(self.accuracy)} corruptions", f"{self.mean_accuracy:.2%}"),
            ("mean corruption error (not normalised)", f"{self.mean_error:.2%}"),
        ]
        for name, values in self.accuracy.items():
            severities = " ".join(f"{100 * value:.1f}" for value in values)
            lines.append((name.replace("_", " "), f"{fmean(values):.2%}  ({severities})"))
        return lines


def mean_corruption_error(accuracy: Mapping[str, Sequence[float]]) -> float:
    """The mean error over severities and the standard corruptions that were measured, or all if none of them was.

    Not normalised: Hendrycks and Dietterich divide the error of each corruption by AlexNet's."""
    names = [name for name in STANDARD if name in accuracy] or list(accuracy)
    return fmean(fmean(1 - value for value in accuracy[name]) for name in names)


def measure_corruptions(trained: TrainedRun, names: Sequence[str] = NAMES, seed: int = 0) -> CorruptionResult:
    """Accuracy on the test images under each corruption at each severity.

    The pictures are the published ones where their folder (CIFAR-10-C) is under the data root and the run was trained
    on all classes; else they are generated, with the frost pictures of the folder `frost` there, if it exists."""
    images = dataclasses.replace(trained.test, pixels=trained.test.in_memory()).to(trained.process.device)
    clean, data = images.in_memory(), trained.config.data
    folder = data_root() / PUBLISHED.get(data.name, data.name)
    published = data.name in PUBLISHED and data.subset == "all" and folder.is_dir()
    frost = [] if published else read_frost(data_root())
    source = f"made here, seed {seed}, frost {'from pictures' if frost else 'without its pictures'}"

    def share(pixels: Tensor) -> float:
        return float(score(trained, dataclasses.replace(images, pixels=pixels))[0]["accuracy"] or 0.0)

    def corrupted(name: str, severity: int) -> Tensor:
        if published:
            return read_published(folder, name, severity, trained.test.labels)
        return corrupt(clean, name, severity, seed, frost=frost)

    pairs = list(itertools.product(names, SEVERITIES))
    accuracy: dict[str, list[float]] = {name: [] for name in names}
    for name, severity in trained.track(pairs, "corruptions", len(pairs)):
        accuracy[name].append(share(corrupted(name, severity)))
    return CorruptionResult(
        source=f"published, {folder.name}" if published else source,
        images=len(images),
        clean=share(clean),
        accuracy=accuracy,
        mean_accuracy=fmean(value for values in accuracy.values() for value in values),
        mean_error=mean_corruption_error(accuracy),
    )
