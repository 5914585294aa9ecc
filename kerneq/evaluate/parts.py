"""What a kind of evidence is to the frame around it: measured, told in a few lines, written down, drawn."""

import dataclasses
import io
import time
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar, final

from PIL import Image

from .. import __version__
from ..run import Run, TrainingError
from .trained import TrainedRun


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

    name: str
    evidence: R
    seconds: float
    checkpoint: str
    epoch: int
    pictures: Mapping[str, Image.Image]

    def write(self, run: Run) -> list[str]:
        """Write the part and its pictures into the run's folder; returns the names of the files."""
        header = {
            "checkpoint": self.checkpoint,
            "epoch": self.epoch,
            "seconds": round(self.seconds, 3),
            "kerneq": __version__,
        }
        found = [run.write_part(self.name, header | dataclasses.asdict(self.evidence))]  # type: ignore[call-overload]
        for name, picture in self.pictures.items():
            buffer = io.BytesIO()
            picture.save(buffer, format="PNG")
            found.append(run.write_picture(name, buffer.getvalue()))
        return found


def measure_part(trained: TrainedRun, name: str, part: Part[R]) -> Measurements[R]:
    """Measure one part of a trained run and draw it; nothing is written."""
    began = time.monotonic()
    evidence = part.measure(trained)
    pictures = part.draw(trained, evidence) if part.draw is not None else {}
    return Measurements(name, evidence, time.monotonic() - began, trained.which, trained.epoch, pictures)
