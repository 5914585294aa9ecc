"""A trained run on the test images: the only place that reads them."""

import dataclasses
import json
from pathlib import Path
from typing import final

from torch import nn

from kerneq.run.config import Config, load
from kerneq.training import checkpoint
from kerneq.training.data import plain_batches, read
from kerneq.training.errors import CheckpointError, TrainingError
from kerneq.training.files import write_atomically
from kerneq.training.folder import Folder
from kerneq.training.meter import Scores
from kerneq.training.model import Builder, build_model, place
from kerneq.training.process import Process, choose
from kerneq.training.state import load_weights, part
from kerneq.training.validate import validate


@final
@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Scores on the test images; where classes were kept out of training, on the `unknown` ones too."""

    model: str
    data: str
    checkpoint: str
    epoch: int
    parameters: int
    scores: dict[str, Scores]


def evaluate(
    path: Path,
    which: str = "best",
    device: str = "auto",
    build: Builder = build_model,
) -> Evaluation:
    """Evaluate the best or the last weights of the run in `path` and write RUN/evaluation.json."""
    folder = Folder(path)
    if not folder.config.exists():
        raise TrainingError(f"{path} is not a run folder: it has no config.toml.")
    process = Process(0, 1, choose(device))
    config = laid_out(load(folder.config), process)
    images = read(config, "test")
    model = place(build(config, images), config, process)
    epoch = restore(model, folder.checkpoint(which))
    amp = config.training.amp
    scores = {"test": validate(model, plain_batches(images, config, process), process, amp)}
    if config.data.subset == "four-of-five-subclasses":
        unknown = read(config, "test", known=False)
        scores["unknown"] = validate(model, plain_batches(unknown, config, process), process, amp)
    size = sum(parameter.numel() for parameter in model.parameters())
    result = Evaluation(config.model.name, config.data.name, which, epoch, size, scores)
    write_atomically(path / "evaluation.json", (json.dumps(dataclasses.asdict(result), indent=2) + "\n").encode())
    return result


def laid_out(config: Config, process: Process) -> Config:
    """On a CPU channels-last whatever the training used: oneDNN's convolutions then need no reordering."""
    if process.device.type != "cpu":
        return config
    return dataclasses.replace(config, training=dataclasses.replace(config.training, channels_last=True))


def restore(model: nn.Module, path: Path) -> int:
    """Put a checkpoint's weights (their average, where there is one) into the model; return its epoch."""
    tensors, facts = checkpoint.load(path)
    try:
        load_weights(model, part(tensors, "average.") or part(tensors, "model."))
    except CheckpointError as error:
        raise CheckpointError(f"{path} belongs to another model: {error}") from None
    return int(facts["epoch"])
