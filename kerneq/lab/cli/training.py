"""The commands that train: one run, a sweep, and the demo."""

import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from ..console import about_run, complain, printable, say, show_table
from .arguments import RUNS, RunsFolder, complete

if TYPE_CHECKING:
    from ..run.config import Config
    from ..training import AbstractLogger


def train(
    file: Annotated[
        str,
        Argument(
            metavar="FILE",
            autocompletion=complete("experiments/*.toml"),
            help="An experiment by its name or its file, or a run folder to --resume.",
        ),
    ] = "",
    changes: Annotated[
        list[str] | None,
        Argument(metavar="KEY=VALUE", help="Settings to change, for example optimizer.lr=0.2 seed=1."),
    ] = None,
    resume: Annotated[bool, Option("--resume", help="Continue the run from its last checkpoint.")] = False,
    name: Annotated[str, Option(help="Name of the run folder; by default that of FILE.")] = "",
    runs: RunsFolder = RUNS,
    start: Annotated[
        str,
        Option(
            "--from",
            help="Begin from this run, or weights that ship, with a new head.",
            metavar="RUN",
            autocompletion=complete("weights/*"),
        ),
    ] = "",
    folds: Annotated[
        int, Option(help="Train so many times, each time with another part of the images held out.", max=100)
    ] = 0,
    skip_broken: Annotated[
        bool, Option("--skip-broken", help="Leave out files that are not readable pictures.")
    ] = False,
    show_config: Annotated[bool, Option("--show-config", help="Print every setting as TOML and stop.")] = False,
) -> None:
    """Train a model; everything about the run goes into runs/NAME."""
    began = time.monotonic()
    from ..run.config import check, write
    from ..training import train as train_model
    from ..training.plan import cross_validate

    settings = ["data.skip_broken=true"] if skip_broken else []
    settings += changes or []
    if "=" in file and not os.path.exists(file):  # False, not an error, for a name that is too long
        file, settings = "", [file, *settings]
    if folds:
        settings.append(f"data.folds={folds}")
    config, folder = plan_run(file, settings, resume, name, runs, start, quiet=show_config)
    check(config)
    if show_config:
        print(write(config, comments=True), end="")
    elif folds:
        say(cross_validate(config, folder, folds, open_loggers))
    else:
        loggers = open_loggers(folder)
        train_model(config, folder, resume=resume, loggers=loggers, began=began)
        if loggers:
            say_result(folder)


def say_result(folder: Path) -> None:
    """Say how good a finished run is, and what to do next."""
    from ..run import Run
    from ..training.metrics import describe_chance

    run = Run(folder)
    rows, best = run.rows(), run.best_accuracy()
    words = f"best validation accuracy {best:.2%}" if best is not None else "no accuracy on held-out images"
    epochs = "1 epoch" if len(rows) == 1 else f"{len(rows)} epochs"
    say(f"{folder}: {epochs}, {words}. Next: kerneq evaluate {shlex.quote(str(folder))}")
    last = rows[-1]["validation"] if rows else None
    if last:  # of the best epoch the accuracy is too good: it was chosen for it
        doubt = describe_chance(round(last["accuracy"] * last["images"]), last["images"], run.counts())
        if doubt:
            say(
                f"The accuracy of the last epoch, {last['accuracy']:.2%} of {last['images']} images, is {doubt}.",
                "yellow",
            )


def plan_run(
    file: str, changes: Sequence[str], resume: bool, name: str, runs: Path, start: str = "", quiet: bool = False
) -> "tuple[Config, Path]":
    """The configuration and the run folder that the arguments of `kerneq train` mean."""
    from ..run.config import ConfigError, load
    from ..training.plan import plan_config

    path = Path(file)
    if file and path.is_dir():
        if not resume:
            raise ConfigError(f"{path} is a folder: add --resume to continue the run in it, or name a TOML file.")
        if name or start or runs != RUNS:
            raise ConfigError(
                f"--name, --runs and --from are for a new run: {path} is continued where it is, as it is."
            )
        return load(path / "config.toml", changes), path
    hush = quiet or os.environ.get("RANK", "0") != "0"
    config = plan_config(file or None, changes, start, say=(lambda text: None) if hush else say)
    file_name = path.resolve().parent.name if path.name == "config.toml" else path.name  # of a run, which has a name
    name = name or file_name.removesuffix(".toml") or ("own-pictures" if start else config.model.name)
    if name in (".", "..") or "/" in name:
        raise ConfigError(f"--name is the name of a folder in {runs}, without slashes, got `{name}`.")
    return config, runs / name


def open_loggers(folder: Path) -> "list[AbstractLogger]":
    """Terminal and TensorBoard, if this is the only process or the first of those that torchrun started."""
    from ..training.logger import TensorBoardLogger, TerminalLogger

    if os.environ.get("RANK", "0") != "0":
        return []
    return [TerminalLogger(title=printable(folder.name)), TensorBoardLogger(folder / "tensorboard")]


def sweep(
    file: Annotated[
        str,
        Argument(
            metavar="FILE",
            autocompletion=complete("experiments/sweeps/*.toml", "experiments/*.toml"),
            help="A sweep or an experiment by its name, or a TOML file with a table `grid`.",
        ),
    ],
    axes: Annotated[
        list[str] | None,
        Argument(metavar="KEY=A,B,C", help="What to vary, for example model.norm=1,2 seed=0,1,2."),
    ] = None,
    name: Annotated[str, Option(help="Name of the folder of all its runs; by default that of FILE.")] = "",
    runs: RunsFolder = RUNS,
    test: Annotated[bool, Option("--test", help="Evaluate each run on the test images, too.")] = False,
    show: Annotated[bool, Option("--list", help="Train nothing: show the runs, and how far they are.")] = False,
) -> None:
    """Train an experiment over a grid of settings and draw it; finished runs are skipped, killed ones go on."""
    from ..sweep import collect, load_sweep, run_sweep

    grid = load_sweep(file, axes or [])
    folder = runs / (name or grid.name)
    result = collect(grid, folder) if show else run_sweep(grid, folder, test=test, loggers=open_loggers)
    show_table(result.table())
    for sentence in result.summary():
        say(sentence)
    failed = [cell for cell in result.cells if cell.problem]
    for cell in failed:
        complain(about_run(folder / cell.name, cell.problem))
    if not show:
        say(f"Written to {folder / 'sweep.json'}" + (f" and {folder / 'sweep.svg'}" if result.points else ""))
    if failed:
        sys.exit(1)


def demo(
    output: Annotated[Path, Option(help="Where the runs and the report go.")] = Path("runs/demo"),
    epochs: Annotated[int, Option(help="Epochs for each model.", min=1)] = 6,
) -> None:
    """Train small models on the embedded digits and compare them: a few minutes on a CPU, no downloads."""
    from ..demo import compare_models
    from ..tables import demo_table

    runs = compare_models(output, epochs, open_loggers)
    show_table(demo_table(runs))
    say(f"Curves, calibration, mistakes, equilibria: {output / 'report.html'}")
