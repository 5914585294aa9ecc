"""The demo: small models trained on the digits that come with the package, measured, and compared on one page."""

import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from .evaluate import NotApplicableError, TrainedRun, measure_part
from .report import render
from .run import Run, TrainingError
from .run.config import Config, ConfigError, differences, load
from .training import AbstractLogger, train

DEMO_MODELS = ("geq-tiny", "mopteq-tiny", "opteq-tiny", "geq-dense-tiny", "resnet-tiny")


def compare_models(output: Path, epochs: int, loggers: Callable[[Path], Sequence[AbstractLogger]]) -> list[Run]:
    """Train and measure each model in its folder under `output`, replacing earlier demos; write report.html there."""
    configs = {output / name: load(f"{name}-digits", [f"training.epochs={epochs}"]) for name in DEMO_MODELS}
    earlier = [Run(folder) for folder in configs if folder.exists()]
    for run in earlier:
        _check_replaceable(run, configs[run.path])
    for run in earlier:
        with run.locked():
            shutil.rmtree(run.path)
    torch.set_num_threads(1)  # these models are too small to share between threads
    for folder, config in configs.items():
        train(config, folder, loggers=loggers(folder))
        trained = TrainedRun.open(folder, device="cpu")
        for name in ("scores", "behaviour"):
            with suppress(NotApplicableError):  # a model without equilibria has no behaviour
                measure_part(trained, name).write()
    render(list(configs), output / "report.html")
    return [Run(folder) for folder in configs]


def _check_replaceable(run: Run, config: Config) -> None:
    """Refuse a folder that the demo may not replace: no run, or one with other settings than its own, epochs aside."""
    with suppress(ConfigError, TrainingError):  # no settings, or none that can be read
        if set(differences(run.config(), config)) <= {"training.epochs"}:
            return
    raise ConfigError(f"{run.path} exists but is not a run of the demo; choose another --output.")
