"""A trained run, opened once for everything that is done with it, and what a kind of evidence about it is.

This is the only place that reads the test images. Evidence is measured, told in a few lines, written down, drawn.
"""

import dataclasses
import functools
import io
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Generic, Protocol, TypeVar, final

import torch
from PIL import Image
from rich.progress import Progress
from torch import Tensor, nn

from ... import __version__
from ...graphs import Captured, capture
from ...loading import load_weights
from ...solution import Solution
from ..data import Batches, DataError, Images, find, is_cut
from ..run import Run, TrainingError, find_run
from ..run.config import Config
from ..training.build import Builder, build_model, class_counts, hold, make_batches, place, read_images, split
from ..training.process import Process, choose_device

T = TypeVar("T")


@final
@dataclasses.dataclass(frozen=True, eq=False)
class TrainedRun:
    """The model with its best or last weights on its device, in `eval()`, and the images to measure it on.

    The data set is needed only by whoever asks for its images: `test`, `unknown` and `held_out` read it.
    """

    run: Run
    config: Config
    process: Process
    model: nn.Module
    seen: Images  # none: only the shape, scale and classes of those it was trained on
    named: bool  # whether the classes' names are known; otherwise they are numbers
    checkpoint: str  # best or last
    epoch: int
    step: int | None  # None: not known, of weights that an earlier version exported
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
        """Open the run in `path`, or the one that ships under this name; its data set is not needed."""
        run = find_run(path)
        config, process = run.config(), Process(choose_device(device))
        file = run.checkpoint(checkpoint)
        weights, epoch, step = run.trained_weights(checkpoint)
        seen, named = trained_on(config, len(weights["head.bias"]), run.classes())
        model = place(build(config, seen), config, process)
        load_weights(model, weights, file)
        return cls(run, config, process, model.eval(), seen, named, checkpoint, epoch, step, progress)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes it tells apart, by label."""
        return self.seen.classes

    @functools.cached_property
    def test(self) -> Images:
        """Test images of the classes it was trained on.

        A `DataError` where pictures were added to a folder, taken away or renamed, that has no test images of its own:
        some of those that it was trained on would be among them.
        """
        images = self._checked(read_images(self.config, "test"))
        if is_cut(self.config.data.name):
            self._trained_on()
        return hold(images, self.config, self.process)

    def unknown(self) -> Images | None:
        """Test images of the classes, or sub-classes, that were kept out of training; None if none were."""
        if self.config.data.subset == "all":
            return None
        images = read_images(self.config, "test", known=False)
        return hold(images, self.config, self.process) if len(images) > 0 else None

    def held_out(self) -> Images | None:
        """The training images that the run held out for validation; None if it trained on all.

        A `DataError` where the training images are not those that it was started on: others would be drawn.
        """
        if self.config.data.validation == 0:
            return None
        held_out = split(self._trained_on(), self.config)[1]
        return None if held_out is None else hold(held_out, self.config, self.process)

    def _trained_on(self) -> Images:
        """The training images, unless they are not as many of each class as the run was started on, or renamed."""
        images = self._checked(read_images(self.config, "train"))
        if self.run.counts() not in ((), tuple(class_counts(images))) or self.run.renamed():
            raise DataError(
                f"{self.config.data.name} has other training images than {self.run.path} was started on, so that "
                "others would be held out or tested on: bring back the pictures as they were."
            )
        return images

    def _checked(self, images: Images) -> Images:
        """The images, unless their classes are not those that the run was trained on: its labels mean others now."""
        if len(images.classes) != len(self.classes) or (self.named and images.classes != self.classes):
            pairs = itertools.zip_longest(self.classes, images.classes)
            then, now = next(pair for pair in pairs if pair[0] != pair[1])
            raise TrainingError(
                f"{self.run.path} was trained on {len(self.classes)} classes and {self.config.data.name} has "
                f"{len(images.classes)}; the first that differs was {then!r} and is {now!r}: bring back its data set."
            )
        return images

    def batches(self, images: Images) -> Batches:
        """Every image once, in order, as the model saw pictures in training but not augmented."""
        return make_batches(images, self.config, self.process, train=False)

    def track(self, items: Iterable[T], words: str, total: int) -> Iterator[T]:
        """The items one by one, `total` of them, with a bar where somebody is watching; bars may be nested."""
        if self.progress is None:
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
        """The model as CUDA graphs on a GPU, for many batches without gradients; its solves take a graph's steps."""
        return capture(self.model)

    @torch.no_grad()
    def outputs(
        self, images: Images, captured: bool = True
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, dict[str, Solution]]]:
        """For each batch its pictures x, labels, logits (float32) and solutions, all on the device; by `fast`, or not
        `captured`, so that every sample stops when it has converged."""
        model = self.fast if captured else self.model
        batches = self.batches(images)
        for x, labels in self.track(batches.epoch(0), f"{len(images)} images", len(batches)):
            with self.process.autocast(self.config.training.amp):
                logits, solutions = model(x, solutions=True)
            yield x, labels, logits.float(), solutions


def trained_on(config: Config, outputs: int, stored: tuple[str, ...] = ()) -> tuple[Images, bool]:
    """No pictures, but the shape, scale and classes of those of the run; and whether the classes have their names.

    `outputs` is how many classes the run's model tells apart, `stored` their names in its folder. Folders of earlier
    versions have none: then the data set says, and where only a folder of pictures had them, and that is gone or has
    changed, they are numbered.
    """
    data_set = find(config.data.name)
    side = config.data.size or data_set.size
    classes = stored or data_set.class_names or ()
    if not classes:
        with suppress(DataError):
            classes = read_images(config, "train").classes  # as the folder of pictures has them now
    if config.data.subset == "first-five-classes":
        classes = classes[:5]
    named = len(classes) == outputs
    if not named:
        classes = tuple(str(number) for number in range(outputs))
    pixels = torch.empty((0, len(data_set.mean), side, side), dtype=torch.uint8)
    labels = torch.empty(0, dtype=torch.int64)
    return Images(pixels, labels, classes, data_set.mean, data_set.std), named


class Evidence(Protocol):
    """A frozen dataclass of plain numbers, strings, lists and such dataclasses: what JSON can hold."""

    def summary(self) -> list[tuple[str, str]]:
        """What a person at a terminal wants to know: names and values, a line each."""


R = TypeVar("R", bound=Evidence)


@final
class NotApplicableError(TrainingError):
    """This evidence says nothing about this run: another kind of model, or of data, is needed. A sentence says which.

    Raised by a `measure_…`; whoever asked for the part by its name gets the sentence, the others go without.
    """


@final
@dataclasses.dataclass(frozen=True)
class Part(Generic[R]):
    """One kind of evidence: its function, and a sentence about it.

    `draw` makes its pictures, by the names of their files, from the run and what `measure` returned.
    """

    measure: Callable[[TrainedRun], R]
    sentence: str
    draw: Callable[[TrainedRun, R], Mapping[str, Image.Image]] | None = None
    usual: bool = False  # measured without being asked for


@final
@dataclasses.dataclass(frozen=True)
class Measurements(Generic[R]):
    """A part of a run that was measured, and what was drawn of it; nothing is on the disk yet."""

    trained: TrainedRun
    name: str
    evidence: R
    seconds: float
    pictures: Mapping[str, Image.Image]

    def write(self) -> list[str]:
        """Write the part and its pictures into the run's folder; returns the names of the files."""
        trained, run = self.trained, self.trained.run
        header = {"checkpoint": trained.checkpoint, "epoch": trained.epoch, "step": trained.step}
        header |= {"seconds": round(self.seconds, 3), "kerneq": __version__}
        found = [run.write_part(self.name, header | dataclasses.asdict(self.evidence))]  # type: ignore[call-overload]
        for name, picture in self.pictures.items():
            found.append(run.write_picture(name, png(picture)))
        return found


def png(picture: Image.Image) -> bytes:
    """The picture as a PNG file has it."""
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()


def measure_part(trained: TrainedRun, name: str, part: Part[R]) -> Measurements[R]:
    """Measure one part of a trained run and draw it; nothing is written."""
    began = time.monotonic()
    evidence = part.measure(trained)
    pictures = part.draw(trained, evidence) if part.draw is not None else {}
    return Measurements(trained, name, evidence, time.monotonic() - began, pictures)
