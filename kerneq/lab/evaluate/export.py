"""A trained run as a small folder to share: weights in half precision, records without paths, and a model card."""

import dataclasses
import hashlib
import importlib.resources
import shlex
import tempfile
from pathlib import Path

import torch
from jinja2 import Environment, UndefinedError
from markupsafe import Markup
from torch import Tensor

from ..console import escape_markdown, printable
from ..data import find
from ..run import Run, TrainingError, write_atomically
from ..run.checkpoint import copy_tensors, save
from ..run.config import Config, write
from ..run.files import read_json, to_json, write_json
from .classification import extreme_classes
from .trained import DAMAGES, TrainedRun

RECORDS = ("classes.json", "environment.json", "evaluation.json", "evaluation/*.json")


def export(path: Path | str, folder: Path, checkpoint: str = "best") -> Run:
    """Write a run's best or last weights and its records to a new `folder`, which can be used wherever a run can.

    Records measured on the weights of another epoch or step are left out.
    """
    if folder.exists():
        raise TrainingError(f"{folder} already exists: choose another folder.")
    trained = TrainedRun.open(path, checkpoint, "cpu")
    weights = half_precision_weights(trained)
    config = without_path(trained.run.config())
    facts = {"epoch": trained.epoch, "step": trained.step, "config": write(config)}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Made under another name and renamed at the end: an interrupted export leaves no incomplete folder.
        with tempfile.TemporaryDirectory(prefix=".kerneq-", dir=folder.parent) as place:
            partial = Run(Path(place) / folder.name)
            for name in ("checkpoints", "evaluation"):
                (partial.path / name).mkdir(parents=True)
            save(partial.checkpoint("best"), copy_tensors(weights), facts)
            try:
                copy_records(trained, partial, config)
                text = card(partial)
            except TrainingError as error:
                raise TrainingError(str(error).replace(str(partial.path), str(path))) from None
            except (*DAMAGES, UndefinedError) as error:
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


def copy_records(trained: TrainedRun, copy: Run, config: Config) -> None:
    """Write the run's records into a copy of it, except those measured on other weights and paths of this machine."""
    run = trained.run
    write_atomically(copy.path / "config.toml", write(config).encode())
    write_atomically(copy.path / "metrics.jsonl", "".join(to_json(row) + "\n" for row in run.rows()).encode())
    for file in (path for pattern in RECORDS for path in sorted(run.path.glob(pattern))):
        needed = file.stem == "evaluation" or file.parent.name == "evaluation"  # the card is made of these
        record = read_json(file, needed)
        record |= {"data": config.data.pictures} if "data" in record else {}
        resumed = record.get("resumed")
        for start in (record, *(resumed if isinstance(resumed, list) else ())):
            if isinstance(start, dict):
                start.pop("command", None)
        if record.get("epoch") in (None, trained.epoch) and record.get("step") in (None, trained.step):
            write_json(copy.path / file.relative_to(run.path), record)


def without_path(config: Config) -> Config:
    """The settings, with the name alone of a folder of pictures, which others have elsewhere."""
    folder = Path(config.data.name.removeprefix("folder:")).resolve().name
    if not config.data.name.startswith("folder:") or not folder:
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, name=f"folder:{folder}"))


def card(run: Run) -> str:
    """The model card of an exported run: the template card.md, filled in from the run's own records."""
    config, evaluation, weights = run.config(), run.evaluation(), run.checkpoint("best").read_bytes()
    test, calibration = evaluation.get("classification", {}).get("test"), evaluation.get("calibration")
    bins = calibration["bins"] if calibration else ()
    filled = [(each["count"], each["confidence"]) for each in bins if each["count"]]
    confidence = sum(count * mean for count, mean in filled) / max(sum(count for count, _ in filled), 1)
    source = importlib.resources.files(__package__).joinpath("card.md").read_text(encoding="utf-8")
    name = printable(run.name).replace("\n", " ")  # in code, where nothing else needs to be escaped
    environment = Environment(trim_blocks=True, keep_trailing_newline=True, finalize=_as_text)
    return environment.from_string(source).render(
        run=run,
        name=Markup(name),
        quoted=Markup(shlex.quote(name)),
        config=config,
        data_set=find(config.data.name),
        scores=evaluation.get("scores", {}).get("test"),
        test=test,
        rates=extreme_classes(test["per_class"], evaluation["classes"]) if test else None,
        calibration=calibration,
        threshold=evaluation.get("threshold"),
        confidence=confidence,
        parameters=evaluation.get("parameters", "unknown"),
        size=len(weights) / 1e6,
        digest=hashlib.sha256(weights).hexdigest(),
    )


def _as_text(value: object) -> object:
    """What Markdown shows as this value, whatever the names of classes and folders have in them."""
    return escape_markdown(value) if isinstance(value, str) and not isinstance(value, Markup) else value
