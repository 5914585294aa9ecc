"""A trained run as a small folder to hand on: weights in half precision, records, and a model card."""

import hashlib
import importlib.resources
import shlex
import shutil
import tempfile
from pathlib import Path

import torch
from jinja2 import Template, UndefinedError

from ..data import find
from ..run import Run, TrainingError, write_atomically
from ..run.checkpoint import copied, save
from ..run.config import write
from ..run.folder import read_json
from .trained import TrainedRun

RECORDS = ("config.toml", "classes.json", "environment.json", "metrics.jsonl", "evaluation.json", "evaluation/*.json")


def export(path: Path | str, folder: Path, checkpoint: str = "best") -> Run:
    """Write a run's best or last weights and its records to a new `folder`, which can be used wherever a run can.

    Matrices and convolutions are stored in half precision, norms, biases and statistics, which are small and span more
    than half precision does, as they are. The norms of W are measured once more and stored, so that whoever loads the
    weights need not wait for that. What was measured on the weights of another epoch or step is left behind.
    """
    if folder.exists():
        raise TrainingError(f"{folder} already exists: choose another folder.")
    trained = TrainedRun.open(path, checkpoint, "cpu")
    trained.model.load_state_dict({name: halved(value).float() for name, value in trained.model.state_dict().items()})
    trained.model.train().eval()  # the vectors were settled for the weights before they were rounded
    with torch.no_grad():
        trained.model(torch.zeros(1, *trained.seen.shape))
    weights = {f"model.{name}": halved(value) for name, value in trained.model.state_dict().items()}
    too_large = [name for name, value in weights.items() if not bool(value.float().isfinite().all())]
    if too_large:
        raise TrainingError(f"`{too_large[0]}` does not fit into half precision: its numbers reach beyond 65504.")
    facts = {"epoch": trained.epoch, "step": trained.step, "config": write(trained.run.config())}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".kerneq-", dir=folder.parent) as place:  # whatever happens, no half
            partial = Run(Path(place) / folder.name)
            for folder_of in ("checkpoints", "evaluation"):
                (partial.path / folder_of).mkdir(parents=True)
            for file in (path for pattern in RECORDS for path in trained.run.path.glob(pattern)):
                needed = file.stem == "evaluation" or file.parent.name == "evaluation"  # what the card is made of
                measured = read_json(file, needed) if file.suffix == ".json" else {}
                if measured.get("epoch") in (None, trained.epoch) and measured.get("step") in (None, trained.step):
                    shutil.copyfile(file, partial.path / file.relative_to(trained.run.path))
            save(partial.checkpoint("best"), copied(weights), facts)
            try:
                shown = card(partial)
            except (KeyError, TypeError, ValueError, UndefinedError) as error:
                raise TrainingError(f"The evaluation of {path} is damaged ({error!r}): evaluate it again.") from None
            # the name of a folder, or of a class, may be no text
            write_atomically(partial.path / "README.md", shown.encode(errors="replace"))
            partial.path.rename(folder)
    except OSError as error:
        raise TrainingError(f"{folder} could not be written: {error.strerror}.") from None
    return Run(folder)


def halved(value: torch.Tensor) -> torch.Tensor:
    """A matrix or a convolution in half precision, anything else as it is."""
    return value.half() if value.is_floating_point() and value.dim() > 1 else value


def card(run: Run) -> str:
    """The model card of an exported run, from its own records: card.md, filled in."""
    config, evaluation, weights = run.config(), run.evaluation(), run.checkpoint("best").read_bytes()
    data_set, test = find(config.data.name), evaluation.get("classification", {}).get("test")
    by_class = zip(test["per_class"], evaluation["classes"], strict=True) if test else ()
    rates = [(rate, label) for rate, label in by_class if rate is not None]
    worst, best = (pick((rate for rate, _ in rates), default=None) for pick in (min, max))
    calibration = evaluation.get("calibration")
    bins = [each for each in calibration["bins"] if each["count"]] if calibration else []
    source = importlib.resources.files(__package__).joinpath("card.md").read_text(encoding="utf-8")
    return Template(source, trim_blocks=True, keep_trailing_newline=True).render(
        name=run.name,
        quoted=shlex.quote(run.name),
        model=config.model.name,
        data=config.data.described,
        side=config.data.size or data_set.size,
        mean=data_set.mean,
        std=data_set.std,
        licence=data_set.licence,
        seed=config.seed,
        held_out="no image was held out" if config.data.validation == 0 else f"{config.data.validation:.0%} held out",
        scores=evaluation.get("scores", {}).get("test"),
        test=test,
        worst=(worst, ", ".join(label for rate, label in rates if rate == worst)),
        best=(best, ", ".join(label for rate, label in rates if rate == best)),
        calibration=calibration,
        confidence=sum(each["count"] * each["confidence"] for each in bins)
        / max(sum(each["count"] for each in bins), 1),
        corruptions=run.part("corruptions"),
        attack=run.part("attack"),
        parameters=evaluation.get("parameters", "unknown"),
        epochs=len(run.rows()),
        seconds=run.seconds(),
        environment=run.environment(),
        classes=run.classes(),
        size=len(weights) / 1e6,
        digest=hashlib.sha256(weights).hexdigest(),
    )
