"""What is asked for, as runs: an experiment with changes, pictures of one's own, every part held out once."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ...loading import choose_device
from ...loading import load as load_model
from ..console import describe_seconds
from ..data import OWN as FOLDER
from ..data import DataError, Images, find
from ..data import load as load_images
from ..run import Run, TrainingError, find_run
from ..run.config import Config, load
from .logger import AbstractLogger, TerminalLogger
from .loop import train
from .metrics import describe_chance
from .start import FITTED

OWN = "own-pictures"
START = "geq-5m-cifar100"  # of the weights that ship, those of the most classes
Say = Callable[[str], None]


def train_experiment(
    experiment: Path | str,
    folder: Path | str,
    changes: Sequence[str] = (),
    *,
    start: Path | str = "",
    resume: bool = False,
    quiet: bool = False,
) -> Run:
    """Train an experiment, by its name or its TOML file, in the run folder `folder`; return the run.

        run = kq.train("own-pictures", "runs/birds", ["data.name=folder:~/birds"])
        run.best_accuracy()  # on held-out pictures; kq.load("runs/birds") is the model

    `changes` are settings, as `kerneq train` takes them; `start` is a run, or the name of weights that ship, to begin
    from with a new head. Unless `quiet`, what happens is printed.
    """
    path = Path(folder)
    config = plan_config(experiment, changes, start, say=(lambda text: None) if quiet else print)
    train(config, path, resume=resume, loggers=[] if quiet else [TerminalLogger(title=path.name)])
    return Run(path)


def plan_config(experiment: Path | str | None, changes: Sequence[str], start: Path | str, say: Say) -> Config:
    """The configuration of an experiment (none: the defaults) with `key=value` changes, to begin from `start`.

    For `own-pictures`, also meant by a `start` alone, what the changes leave open is chosen from the folder of pictures
    and the device, and said.
    """
    if experiment != OWN and (experiment or not start):
        return load(experiment, changes, start)
    start = start or START
    asked = load(OWN, changes, start)
    if not asked.data.name.startswith(FOLDER):
        raise DataError(f"{OWN} is for a folder of pictures: data.name=folder:PATH, got data.name={asked.data.name}.")
    images = load_images(asked.data.name, "train")
    config = load(OWN, [*choose_settings(asked, images), *changes], start)
    say(describe_plan(config, images))
    return config


def choose_settings(asked: Config, images: Images) -> list[str]:
    """Settings for pictures of one's own: the size of those that the weights know, and what suits their number.

    The head alone is trained: fitted at the start, it changes little in two epochs of shifted and mirrored pictures.
    With all weights, 144 pictures of three classes gave 89 % where the head alone gave 94 % (docs/own-pictures.md).
    """
    known = find_run(asked.start.run).config().data
    share = 0.2 if len(images) < 1000 else 0.1
    kept = round((1 - share) * len(images))
    if kept < 4:
        raise DataError(f"{asked.data.name} has {len(images)} pictures to train on: 40 are few, and fewer no use.")
    return [
        f"data.size={known.size or find(known.name).size}",
        f"data.validation={share}",
        "start.frozen=true",
        "training.epochs=2",
        f"training.batch_size={min(128, 2 ** int(math.log2(max(kept / 8, min(kept, 8)))))}",
    ]


def describe_plan(config: Config, images: Images) -> str:
    """What a run with pictures of one's own does, and about how long it takes on a CPU, by the clock of one batch."""
    counts, data, settings = images.labels.bincount().tolist(), config.data, config.training
    held = len(images) / data.folds if data.folds else data.validation * len(images)
    what = "the head alone (start.frozen=false: all weights)" if config.start.frozen else "all weights"
    numbers = f"{len(images):,} pictures of {len(counts)} classes ({min(counts)} to {max(counts)} each)"
    weights = f"{config.start.run} at {data.size} × {data.size} with a new head"
    steps = f"batches of {settings.batch_size}, learning rate {config.optimizer.lr:g}"
    plan = f"{numbers}, {held:.0f} held out: {weights}, then {settings.epochs} epochs of {what} in {steps}"
    if choose_device(config.device).type != "cpu":
        return f"{plan}."
    model, x = load_model(config.start.run), torch.zeros(8, 3, data.size, data.size)
    with torch.no_grad():
        model.size = None
        model(x)  # which may have to find the norms for this size
        began = time.monotonic()
        model(x)
    each = (time.monotonic() - began) / len(x)
    passes = settings.epochs * (1 if config.start.frozen else 4)  # forward and backward cost about four times as much
    seconds = each * (min(len(images) - held, FITTED) + passes * (len(images) - held) + settings.epochs * held)
    return f"{plan}. On this CPU {describe_seconds(seconds * max(data.folds, 1))}."


def cross_validate(
    config: Config, folder: Path, folds: int, open_loggers: Callable[[Path], Sequence[AbstractLogger]]
) -> str:
    """Train once for each of so many parts of the training images, which is held out; finished trainings are skipped.

    The runs are in `folder`/fold-1 …; returns a sentence about the accuracy of the last weights on all parts together.
    """
    hits = images = 0
    counts: tuple[int, ...] = ()
    for fold in range(1, folds + 1):
        run = Run(folder / f"fold-{fold}")
        part = dataclasses.replace(config, data=dataclasses.replace(config.data, folds=folds, fold=fold))
        if run.exists:
            run.check_same(part)
        if not run.finished:
            train(part, run.path, resume=True, loggers=open_loggers(run.path))
        scores = run.rows()[-1]["validation"]
        if scores is None:
            raise TrainingError(f"{run.path} has no accuracy on held-out images in its last epoch.")
        hits += round(scores["accuracy"] * scores["images"])
        images += scores["images"]
        counts = run.counts()
    doubt = describe_chance(hits, images, counts)
    words = f"accuracy {hits / images:.2%} on {images:,} images, each held out once" + (f", {doubt}" if doubt else "")
    return f"{folder}: {folds}-fold cross-validation, {words}."
