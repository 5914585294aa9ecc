"""A trained run as a small folder to share: weights in half precision, records, and a model card."""

import hashlib
import importlib.resources
import shlex
import shutil
import tempfile
from pathlib import Path

import torch
from jinja2 import Template, UndefinedError
from torch import Tensor

from ..data import find
from ..run import Run, TrainingError, write_atomically
from ..run.checkpoint import copy_tensors, save
from ..run.config import write
from ..run.files import read_json
from .classification import extreme_classes
from .trained import TrainedRun

RECORDS = ("config.toml", "classes.json", "environment.json", "metrics.jsonl", "evaluation.json", "evaluation/*.json")


def export(path: Path | str, folder: Path, checkpoint: str = "best") -> Run:
    """Write a run's best or last weights and its records to a new `folder`, which can be used wherever a run can.

    Records measured on the weights of another epoch or step are left out.
    """
    if folder.exists():
        raise TrainingError(f"{folder} already exists: choose another folder.")
    trained = TrainedRun.open(path, checkpoint, "cpu")
    weights = half_precision_weights(trained)
    facts = {"epoch": trained.epoch, "step": trained.step, "config": write(trained.run.config())}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Made under another name and renamed at the end: an interrupted export leaves no incomplete folder.
        with tempfile.TemporaryDirectory(prefix=".kerneq-", dir=folder.parent) as place:
            partial = Run(Path(place) / folder.name)
            for name in ("checkpoints", "evaluation"):
                (partial.path / name).mkdir(parents=True)
            copy_records(trained, partial.path)
            save(partial.checkpoint("best"), copy_tensors(weights), facts)
            try:
                text = card(partial)
            except (KeyError, TypeError, ValueError, UndefinedError) as error:
                raise TrainingError(f"The evaluation of {path} is damaged ({error!r}): evaluate it again.") from None
            # The name of a folder or of a class need not be valid text.
            write_atomically(partial.path / "README.md", text.encode(errors="replace"))
            partial.path.rename(folder)
    except OSError as error:
        raise TrainingError(f"{folder} could not be written: {error.strerror}.") from None
    return Run(folder)


def half_precision_weights(trained: TrainedRun) -> dict[str, Tensor]:
    """The checkpoint's tensors, with matrices and convolutions in half precision; the model gets the rounded weights.

    Norms, biases and statistics stay as they are: they are small and span more than half precision does. The norms of W
    are estimated again for the rounded weights and stored, so that loading need not do it.
    """
    model = trained.model
    model.load_state_dict({name: halve(value).float() for name, value in model.state_dict().items()})
    model.train().eval()  # forgets the norms that were estimated for the weights before they were rounded
    with torch.no_grad():
        model(torch.zeros(1, *trained.seen.shape))
    weights = {f"model.{name}": halve(value) for name, value in model.state_dict().items()}
    for name, value in weights.items():
        if not bool(value.float().isfinite().all()):
            raise TrainingError(f"`{name}` does not fit into half precision: its numbers reach beyond 65504.")
    return weights


def halve(value: Tensor) -> Tensor:
    """A matrix or a convolution in half precision, anything else as it is."""
    return value.half() if value.is_floating_point() and value.dim() > 1 else value


def copy_records(trained: TrainedRun, folder: Path) -> None:
    """Copy the run's records into `folder`, except those measured on other weights."""
    for file in (path for pattern in RECORDS for path in trained.run.path.glob(pattern)):
        needed = file.stem == "evaluation" or file.parent.name == "evaluation"  # the card is made of these
        record = read_json(file, needed) if file.suffix == ".json" else {}
        if record.get("epoch") in (None, trained.epoch) and record.get("step") in (None, trained.step):
            shutil.copyfile(file, folder / file.relative_to(trained.run.path))


def card(run: Run) -> str:
    """The model card of an exported run: the template card.md, filled in from the run's own records."""
    config, evaluation, weights = run.config(), run.evaluation(), run.checkpoint("best").read_bytes()
    test, calibration = evaluation.get("classification", {}).get("test"), evaluation.get("calibration")
    bins = calibration["bins"] if calibration else ()
    filled = [(each["count"], each["confidence"]) for each in bins if each["count"]]
    confidence = sum(count * mean for count, mean in filled) / max(sum(count for count, _ in filled), 1)
    source = importlib.resources.files(__package__).joinpath("card.md").read_text(encoding="utf-8")
    return Template(source, trim_blocks=True, keep_trailing_newline=True).render(
        run=run,
        quoted=shlex.quote(run.name),
        config=config,
        data_set=find(config.data.name),
        scores=evaluation.get("scores", {}).get("test"),
        test=test,
        rates=extreme_classes(test["per_class"], evaluation["classes"]) if test else None,
        calibration=calibration,
        confidence=confidence,
        parameters=evaluation.get("parameters", "unknown"),
        size=len(weights) / 1e6,
        digest=hashlib.sha256(weights).hexdigest(),
    )
