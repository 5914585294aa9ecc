"""Errors whose sentence is enough for the user: how the program ends after one, and what goes on after it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

from ..console import about_run, complain

if TYPE_CHECKING:
    from ..run import Run

STOPPED = 130  # the code of a program that Ctrl-C has ended: what else was asked for is left out, too


def describe_error(error: Exception) -> tuple[int, str] | None:
    """The code that the program ends with after this error, and what it says; None for a bug.

    Of PyTorch's sentences about memory the first ones are said, and what to do instead of its own advice.
    """
    from torch import OutOfMemoryError

    from ...solution import EquilibriumError, NonfiniteInputError
    from ..data import DataError
    from ..data.images import explain_killed_worker
    from ..run import Stopped, TrainingError
    from ..run.config import ConfigError

    said = str(error)
    if isinstance(error, OutOfMemoryError):
        said = said.partition(" Including non-PyTorch memory")[0].partition(" Of the allocated memory")[0]
        return 1, f"{said} Free the card (`nvidia-smi` shows who holds it), or lower training.batch_size."
    if isinstance(error, RuntimeError) and (asked := re.search(r"tried to allocate (\d+) bytes", said)):
        sizes = "the sizes of the model, data.size or training.batch_size"
        return 1, f"There is no memory for a single tensor of {int(asked[1]) / 1e9:,.1f} GB: lower {sizes}."
    if isinstance(error, RuntimeError) and (killed := explain_killed_worker(error)):
        return 1, str(killed)
    if isinstance(error, ConfigError):
        return 2, said
    if isinstance(error, Stopped):
        return STOPPED, said
    known = (DataError, EquilibriumError, NonfiniteInputError, TrainingError, OSError)
    return (1, said) if isinstance(error, known) else None


@final
class Failures:
    """Errors about single runs, printed at once, after which the other runs are measured all the same."""

    def __init__(self, several: bool):
        self.several = several  # then a sentence must name its run
        self.codes: list[int] = []  # what the program would end with after each error

    @contextmanager
    def of(self, run: "Run") -> Iterator[None]:
        """Run a block in which an error whose sentence is enough is collected."""
        try:
            yield
        except Exception as error:
            explained = describe_error(error)
            if explained is None or explained[0] == STOPPED:
                raise
            code, sentence = explained
            complain(about_run(run.path, sentence) if self.several else sentence)
            self.codes.append(code)
