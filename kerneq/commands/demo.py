"""`kerneq demo`: five small models on the embedded digits, through the same path as any other run."""

import shutil
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from kerneq.commands.models import millions
from kerneq.commands.train import watchers
from kerneq.evaluate import evaluate
from kerneq.report import gather, render
from kerneq.report.runs import Run
from kerneq.run.config import ConfigError, parse
from kerneq.training import Folder, train

MODELS = ("geq-tiny", "mopteq-tiny", "opteq-tiny", "geq-dense-tiny", "resnet-tiny")
SETTINGS = """
[data]
name = "digits"
[augment]
crop = 1
[optimizer]
lr = 0.1
[schedule]
kind = "cosine"
warmup = 1.0
[training]
batch_size = 64
label_smoothing = 0.05
ema = 0.95
"""


def run(output: Path, epochs: int) -> None:
    """Train, evaluate and compare; a demo that was run before is replaced."""
    console = Console()
    clear(output)
    torch.set_num_threads(1)  # these models are too small to share between threads
    folders = [output / name for name in MODELS]
    for name, folder in zip(MODELS, folders, strict=True):
        changes = [f"model.name={name}", f"training.epochs={epochs}", "device=cpu"]
        train(parse(SETTINGS, changes), folder, watcher=watchers(folder, name))
        evaluate(folder, device="cpu")
    page = output / "report.html"
    render(folders, page)
    console.print(results(gather(folders)))
    console.print(f"Curves and solver behaviour: {page}", highlight=False, soft_wrap=True)


def clear(output: Path) -> None:
    """Remove the runs of an earlier demo, and nothing that is not one."""
    for folder in (output / name for name in MODELS):
        if folder.exists() and not Folder(folder).config.exists():
            raise ConfigError(f"{folder} exists but is not a run of the demo; choose another --output.")
        shutil.rmtree(folder, ignore_errors=True)


def results(runs: list[Run]) -> Table:
    """One row per run, the best first."""
    table = Table(title="Embedded digits: 8×8 pictures, 10 classes")
    for column in ("model", "test accuracy", "parameters", "solver steps", "residual", "seconds"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for run in runs:
        steps = f"{run.steps:.1f}" if run.steps is not None else "–"
        residual = f"{run.residual:.1e}" if run.residual is not None else "–"
        accuracy = f"{run.accuracy:.2%}" if run.accuracy is not None else "–"
        table.add_row(run.model, accuracy, millions(run.parameters or 0), steps, residual, f"{run.seconds:.1f}")
    return table
