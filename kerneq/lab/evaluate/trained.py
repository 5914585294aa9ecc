"""A trained run opened for evaluation. This is the only file that reads the test images."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar, final

import torch
from rich.progress import Progress
from torch import Tensor, nn

from ...cuda_graphs import Captured, capture
from ...loading import load_weights
from ...solution import Solution
from ..data import Batches, DataError, Images, find, is_cut
from ..run import Run, TrainingError, find_run
from ..run.config import Config
from ..training.build import Builder, build_model, class_counts, hold, make_batches, place, read_images, split
from ..training.process import Process, choose_device

T = TypeVar("T")
# What reading a damaged record of an evaluation may end in.
DAMAGES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class TrainedRun:
    """The model with its best or last weights on its device, in `eval()`, and the images to measure it on.

    Only `test`, `unknown` and `held_out` read the data set.
    """

    run: Run
    config: Config
    process: Process
    model: nn.Module
    seen: Images  # no pictures, only the shape, mean, std and classes of those it was trained on
    named: bool  # whether the classes' names are known; otherwise they are numbers
    checkpoint: str  # best or last
    epoch: int
    step: int | None  # None: unknown, for weights exported by an earlier version
    progress: Progress | None = None  # where `track` draws its bars

    @classmethod
    def open(
        cls,
        path: Path | str,
        checkpoint: str = "best",
        device: str = "auto",
        build: Builder = build_model,
        progress: Progress | None = None,
    ) -> "TrainedRun":
        """Open the run in `path`, or the shipped one of that name; its data set is not needed."""
        run = find_run(path)
        config, process = run.config(), Process(choose_device(device))
        file = run.checkpoint(checkpoint)
        weights, epoch, step = run.trained_weights(checkpoint)
        seen, named = describe_images(config, len(weights["head.bias"]), run.classes())
        model = place(build(config, seen), config, process)
        load_weights(model, weights, file)
        return cls(run, config, process, model.eval(), seen, named, checkpoint, epoch, step, progress)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, by label."""
        return self.seen.classes

    @functools.cached_property
    def test(self) -> Images:
        """Test images of the classes it was trained on.

        Where they are cut from the training folder and its pictures have changed since, a `DataError`: images of the
        training would be among them.
        """
        images = self._check_classes(read_images(self.config, "test"))
        if is_cut(self.config.data.name):
            self._training_images()
        return hold(images, self.config, self.process)

    def unknown(self) -> Images | None:
        """Test images of the classes, or sub-classes, left out of the training; None if none were."""
        if self.config.data.subset == "all":
            return None
        images = read_images(self.config, "test", known=False)
        return hold(images, self.config, self.process) if len(images) > 0 else None

    def held_out(self) -> Images | None:
        """The training images that the run held out for validation; None if it trained on all."""
        if self.config.data.validation == 0:
            return None
        held_out = split(self._training_images(), self.config)[1]
        return None if held_out is None else hold(held_out, self.config, self.process)

    def _training_images(self) -> Images:
        """The training images; a `DataError` if their numbers by class or their names have changed since the start."""
        images = self._check_classes(read_images(self.config, "train"))
        if self.run.counts() not in ((), tuple(class_counts(images))) or self.run.renamed():
            raise DataError(
                f"{self.config.data.name} has other training images than {self.run.path} was started on, so that "
                "others would be held out or tested on: bring back the pictures as they were."
            )
        return images

    def _check_classes(self, images: Images) -> Images:
        """The images; a `TrainingError` if their classes are not those that the run was trained on."""
        if len(images.classes) != len(self.classes) or (self.named and images.classes != self.classes):
            pairs = itertools.zip_longest(self.classes, images.classes)
            then, now = next(pair for pair in pairs if pair[0] != pair[1])
            raise TrainingError(
                f"{self.run.path} was trained on {len(self.classes)} classes and {self.config.data.name} has "
                f"{len(images.classes)}; the first that differs was {then!r} and is {now!r}: bring back its data set."
            )
        return images

    def batches(self, images: Images) -> Batches:
        """Every image once, in order, prepared as in training but not augmented."""
        return make_batches(images, self.config, self.process, train=False)

    def track(self, items: Iterable[T], words: str, total: int) -> Iterator[T]:
        """Iterate over `total` items, with a bar where there is a `progress` without one, and more than one item."""
        if self.progress is None or self.progress.tasks or total < 2:
            yield from items
            return
        task = self.progress.add_task(words, total=total)
        try:
            for item in items:
                yield item
                self.progress.advance(task)
        finally:
            self.progress.remove_task(task)

    @functools.cached_property
    def fast(self) -> Captured:
        """The model as CUDA graphs on a GPU, for many batches without gradients, with a fixed number of steps."""
        return capture(self.model)

    @torch.no_grad()
    def outputs(
        self, images: Images, captured: bool = True
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, dict[str, Solution]]]:
        """For each batch its pictures x, labels, logits (float32) and solutions, all on the device.

        By `fast`, or unless `captured` by the model itself, in which every sample stops when it has converged."""
        model = self.fast if captured else self.model
        batches = self.batches(images)
        for x, labels in self.track(batches.epoch(0), f"{len(images)} images", len(batches)):
            with self.process.autocast(self.config.training.amp):
                logits, solutions = model(x, solutions=True)
            yield x, labels, logits.float(), solutions


def describe_images(config: Config, outputs: int, stored: tuple[str, ...] = ()) -> tuple[Images, bool]:
    """`TrainedRun.seen`, and whether the names of its classes are known.

    `outputs` is the number of the model's classes, `stored` their names in the run's folder. Without these the names of
    the data set count, or numbers if they are unknown or of another count.
    """
    data_set = find(config.data.name)
    side = config.data.size or data_set.size
    classes = stored or data_set.class_names or ()
    if not classes:
        with suppress(DataError):
            classes = read_images(config, "train").classes  # those of a folder of pictures
    if config.data.subset == "first-five-classes":
        classes = classes[:5]
    named = len(classes) == outputs
    if not named:
        classes = tuple(str(number) for number in range(outputs))
    pixels = torch.empty((0, len(data_set.mean), side, side), dtype=torch.uint8)
    labels = torch.empty(0, dtype=torch.int64)
    return Images(pixels, labels, classes, data_set.mean, data_set.std), named


@final
class NotApplicableError(TrainingError):
    """A part does not apply to this run; the message says which model or data it needs."""
