"""The page: results, curves and solver behaviour of some runs, in one file that needs nothing else."""

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment

from kerneq.report.figures import curves
from kerneq.report.runs import Run, gather
from kerneq.report.template import PAGE
from kerneq.training import TrainingError
from kerneq.training.files import write_atomically

FIGURES = (
    ("Accuracy on held-out images", "validation", "accuracy", "accuracy", False),
    ("Training loss", "train", "loss", "cross-entropy", False),
    ("Solver steps, mean over samples and branches", "validation", "steps", "steps", False),
    ("Relative residual at the end of a solve", "validation", "residual", "residual", True),
)


def render(folders: Sequence[Path], output: Path) -> None:
    """Write the page about the runs in `folders` to `output`."""
    runs = gather(folders)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingError(f"{output} could not be written: {error.strerror}.") from None
    write_atomically(output, page(runs).encode())


def page(runs: Sequence[Run]) -> str:
    figures = [(title, curves(runs, group, number, label, log)) for title, group, number, label, log in FIGURES]
    environment = Environment(autoescape=True, trim_blocks=True)
    return environment.from_string(PAGE).render(
        runs=runs, figures=[(title, drawing) for title, drawing in figures if drawing is not None]
    )
