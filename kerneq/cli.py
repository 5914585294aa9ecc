"""The command line: every command, its options, and what it prints.

torch, and all that imports it, is imported inside the commands, so that `kerneq --help` does not wait for it.
"""

import json
import math
import os
import shutil
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from . import __version__

if TYPE_CHECKING:
    from .prediction import Prediction
    from .run.config import Config
    from .training import AbstractLogger

app = typer.Typer(
    name="kerneq",
    help="Kernel equilibrium models: train them, look at them, measure them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
RunFolder = Annotated[Path, typer.Argument(help="A run folder, for example runs/digits.")]

DEMO_MODELS = ("geq-tiny", "mopteq-tiny", "opteq-tiny", "geq-dense-tiny", "resnet-tiny")
NUMBERED = "The names of the classes are not known without the folder of pictures that the run was trained on."


def _version(asked: bool) -> None:
    if asked:
        print(f"kerneq {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def train(
    file: Annotated[
        str,
        typer.Argument(help="An experiment by its name or its file, or a run folder to --resume.", metavar="[FILE]"),
    ] = "",
    changes: Annotated[
        list[str] | None,
        typer.Argument(help="Settings to change, for example optimizer.lr=0.2 seed=1.", metavar="[KEY=VALUE]..."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run from its last checkpoint.")] = False,
    name: Annotated[str, typer.Option(help="Name of the run folder; by default that of FILE.")] = "",
    runs: Annotated[Path, typer.Option("--runs", help="The folder that holds the runs.")] = Path("runs"),
    show_config: Annotated[bool, typer.Option("--show-config", help="Print every setting as TOML and stop.")] = False,
) -> None:
    """Train a model; everything about the run goes into runs/NAME."""
    from .run import Run
    from .run.config import check, write
    from .training import train as train_model

    settings = list(changes or [])
    if "=" in file and not os.path.exists(file):  # which does not mind that it may be too long for a name
        file, settings = "", [file, *settings]
    config, folder = find_run(file, settings, resume, name, runs)
    check(config)
    if show_config:
        sys.stdout.write(write(config, comments=True))
        return
    told = loggers(folder)
    rows = train_model(config, folder, resume=resume, loggers=told)
    if told:
        best = Run(folder).best_accuracy()
        words = f"best validation accuracy {best:.2%}" if best is not None else "nothing was held out"
        epochs = "1 epoch" if len(rows) == 1 else f"{len(rows)} epochs"
        say(f"{folder}: {epochs}, {words}. Next: kerneq evaluate {folder}")


def find_run(file: str, changes: Sequence[str], resume: bool, name: str, runs: Path) -> "tuple[Config, Path]":
    """The configuration and the run folder that the arguments of `kerneq train` mean."""
    from .run.config import ConfigError, load

    path = Path(file)
    if file and path.is_dir():
        if not resume:
            raise ConfigError(f"{path} is a folder: add --resume to continue the run in it, or name a TOML file.")
        if name:
            raise ConfigError("--name and a run folder exclude each other: the folder has a name.")
        return load(path / "config.toml", changes), path
    config = load(file or None, changes)
    name = name or path.name.removesuffix(".toml") or config.model.name
    if name in (".", "..") or "/" in name:
        raise ConfigError(f"--name is the name of a folder in {runs}, without slashes, got `{name}`.")
    return config, runs / name


def loggers(folder: Path) -> "list[AbstractLogger]":
    """Terminal and TensorBoard, if this is the only process or the first of those that torchrun started."""
    from .training.logger import TensorBoardLogger, TerminalLogger

    if os.environ.get("RANK", "0") != "0":
        return []
    return [TerminalLogger(title=printable(folder.name)), TensorBoardLogger(folder / "tensorboard")]


@app.command()
def evaluate(
    run: RunFolder,
    checkpoint: Annotated[str, typer.Option(help="best (on the held-out images) or last.")] = "best",
    device: Device = "auto",
) -> None:
    """Accuracy and loss of a trained run on the test images; also written to RUN/evaluation.json."""
    from .evaluate import TrainedRun, measure
    from .training.metrics import METRICS

    check_which("--checkpoint", checkpoint)
    result = measure(TrainedRun.open(run, checkpoint, device))
    shown = [metric for metric in METRICS if metric.over != "adjoints"]  # those are of training
    columns = [Column(heading, justify="right") for heading in ("test images", *(m.title for m in shown))]
    table = Table(*columns, title=Text(printable(f"{result.model} on the test images of {result.data}")))
    for name, scores in result.scores.items():
        label = f"{scores['images']}" if name == "test" else f"{scores['images']} ({name})"
        table.add_row(label, *(metric.text(scores) for metric in shown))
    Console().print(table)
    result.write(run)  # after the table: a folder that cannot be written costs nobody the result
    say(f"Written to {run / 'evaluation.json'}")


@app.command()
def predict(
    run: RunFolder,
    pictures: Annotated[list[Path], typer.Argument(help="Picture files.", metavar="IMAGE...")],
    which: Annotated[str, typer.Option(help="The best weights (on the held-out images) or the last.")] = "best",
    top: Annotated[int, typer.Option(help="How many classes to show for each picture.", min=1)] = 5,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """What a trained run sees in picture files: classes, probabilities, and whether its equilibrium was found."""
    from .data import DataError
    from .prediction import Predictor

    check_which("--which", which)
    predictor = Predictor.open(run, which, device)
    readable, failures = [], []
    for path in pictures:
        try:
            readable.append((path, predictor.read(path)))
        except DataError as error:
            failures.append({"path": str(path), "problem": str(error)})
    predictions = predictor.predict(readable, top)
    if as_json:
        facts = {"run": str(run), "checkpoint": which, "epoch": predictor.epoch, "named": predictor.named}
        rows = [prediction_row(prediction) for prediction in predictions]
        print(json.dumps(facts | {"predictions": rows, "failures": failures}, indent=2))
    elif predictions:
        console = Console()
        console.print(prediction_table(predictions, f"{predictor.config.model.name}, {which} weights of {run}"))
        missed = Counter(p.status.value for p in predictions if p.status is not None and not p.converged)
        for reason, count in missed.items():
            words = f"{count} of {len(predictions)} predictions come from an unfinished equilibrium. {reason}"
            console.print(words, style="yellow", soft_wrap=True)
        if not predictor.named:
            console.print(NUMBERED, style="yellow", soft_wrap=True)
    for failure in failures:
        complain(failure["problem"])
    if failures:
        sys.exit(1)


def prediction_row(prediction: "Prediction") -> dict[str, Any]:
    """A prediction as JSON has it, which knows no infinity."""

    def finite(number: float | None) -> float | None:
        return number if number is not None and math.isfinite(number) else None

    status = prediction.status
    top = zip(prediction.classes, prediction.probabilities, strict=True)
    return {
        "path": str(prediction.path),
        "top": [{"class": name, "probability": finite(share)} for name, share in top],
        "converged": prediction.converged if status is not None else None,
        "status": status.name.lower() if status is not None else None,
        "steps": prediction.steps,
        "residual": finite(prediction.residual),
    }


def prediction_table(predictions: "Sequence[Prediction]", title: str) -> Table:
    """A few rows per picture: its likeliest classes, one a row, and how its equilibrium was found.

    A class stands in a row of its own with its probability, so that no fold can part them however narrow the terminal.
    """
    longest = max((len(printable(name)) for p in predictions for name in p.classes), default=0)
    words = [Column("picture", overflow="fold", min_width=12)]
    words.append(Column("class", overflow="fold", min_width=min(longest, 16)))  # together they fit into 80 columns
    numbers = [Column(h, justify="right", no_wrap=True) for h in ("share", "steps", "residual")]
    table = Table(*words, *numbers, Column("equilibrium", no_wrap=True), title=Text(printable(title)))
    for p in predictions:
        solver = [Text("–")] * 3
        if p.status is not None:
            word = Text("converged", "green") if p.converged else Text("not converged", "bold red")
            solver = [Text(f"{p.steps}"), Text(f"{p.residual:.1e}"), word]
        first = [Text(printable(str(p.path))), *solver]
        for name, share in zip(p.classes, p.probabilities, strict=True):
            path, *outcome = first
            table.add_row(path, Text(printable(name)), f"{share:.2%}", *outcome)
            first = [Text("")] * 4
        table.add_section()
    return table


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Run folders.", metavar="RUN...")],
    output: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
) -> None:
    """One self-contained HTML page about some runs: results, curves, solver behaviour."""
    from .report import render

    render(folders, output)
    say(f"Written to {output}")


@app.command()
def data() -> None:
    """The data sets: which are found under KERNEQ_DATA, which are missing and how to get them."""
    from .data import data_root, describe

    title = Text(printable(f"Data sets under {data_root()} (set KERNEQ_DATA to look elsewhere)"))
    table = Table(title=title, show_lines=True)
    for heading in ("name", "found", "where, or how to get it"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("name", "found"))
    for row in describe():
        if row.found:
            where = str(row.path or "part of the installation")
        else:
            where = str(row.problem) if row.path is not None else row.get
        cell = Text.assemble(printable(where), "\n", (f"licence: {row.licence}", "dim"))
        table.add_row(row.name, "[green]yes" if row.found else "[yellow]no", cell)
    Console().print(table)


@app.command()
def models() -> None:
    """The models: parameters, equation, paper, published accuracy and ours."""
    from .models import MODELS, build, parameters

    headings = {"name": "left", "size": "right", "eq.": "right", "data": "left", "published": "right", "ours": "left"}
    columns = [Column(heading, justify=side, no_wrap=True) for heading, side in headings.items()]  # type: ignore[arg-type]
    title = "Models: kerneq train … model.name=NAME"
    table = Table(*columns, title=title, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    equations = list(dict.fromkeys(entry.equation for entry in MODELS.values()))
    papers: dict[str, list[str]] = {}
    for name, entry in MODELS.items():
        first = [name, millions(parameters(build(name))), str(equations.index(entry.equation) + 1)]
        for data in dict.fromkeys((*entry.published, *entry.ours)) or ("",):
            published = f"{entry.published[data]} %" if data in entry.published else ""
            table.add_row(*first, data, published, entry.ours.get(data, ""))
            first = [""] * 3
        papers.setdefault(entry.paper, []).append(name)
    console = Console()
    console.print(table)
    for place, equation in enumerate(equations, start=1):
        console.print(f"{place}: {equation}", markup=False, highlight=False)
    for paper, names in papers.items():
        console.print(f"{paper}: {', '.join(names)}", markup=False, highlight=False)


def millions(count: int) -> str:
    """A number of parameters in few digits."""
    return f"{count / 1e6:.2f} M" if count >= 100_000 else f"{count / 1e3:.1f} k"


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Where the runs and the report go.")] = Path("runs/demo"),
    epochs: Annotated[int, typer.Option(help="Epochs for each model.", min=1)] = 6,
) -> None:
    """Train small models on the embedded digits and compare them: a few minutes on a CPU, no downloads."""
    import torch

    from .evaluate import evaluate as evaluate_run
    from .report import gather, render
    from .run import Run
    from .run.config import ConfigError, load
    from .training import train as train_model
    from .training.metrics import METRICS

    folders = [output / name for name in DEMO_MODELS]
    for folder in folders:  # an earlier demo is replaced, and nothing that is not one
        if folder.exists() and not Run(folder).exists:
            raise ConfigError(f"{folder} exists but is not a run of the demo; choose another --output.")
        shutil.rmtree(folder, ignore_errors=True)
    torch.set_num_threads(1)  # these models are too small to share between threads
    for folder in folders:
        config = load(f"{folder.name}-digits", [f"training.epochs={epochs}"])
        train_model(config, folder, loggers=loggers(folder))
        evaluate_run(folder, device="cpu")
    render(folders, output / "report.html")
    shown = [metric for metric in METRICS if metric.demo]
    table = Table(title="Embedded digits: 8×8 pictures, 10 classes")
    table.add_column("model", no_wrap=True)
    for heading in (*(metric.heading for metric in shown), "size", "seconds"):
        table.add_column(heading, justify="right")
    for run in gather(folders):
        size = millions(run.evaluation()["parameters"])
        table.add_row(
            Text(printable(run.name)), *(metric.text(run.test()) for metric in shown), size, f"{run.seconds():.1f}"
        )
    Console().print(table)
    say(f"Curves and solver behaviour: {output / 'report.html'}")


def main(command: Callable[[], object] = app) -> None:
    """Run the program; exit with 2 for a wrong request, 130 for a stopped run, 1 for other known failures.

    Errors a user can act on are shown as their sentence; only bugs give a traceback.
    """
    try:
        command()
    except KeyboardInterrupt:
        complain("Interrupted.")
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)  # the reader of our output went away; there is nobody to tell
    except Exception as error:
        from torch import OutOfMemoryError

        from .data import DataError
        from .run import Stopped, TrainingError
        from .run.config import ConfigError
        from .solution import EquilibriumError, NonfiniteInputError

        others = (DataError, EquilibriumError, NonfiniteInputError, TrainingError, OSError, OutOfMemoryError)
        codes = ((ConfigError, 2), (Stopped, 130), (others, 1))
        code = next((code for kinds, code in codes if isinstance(error, kinds)), None)
        if code is None:
            raise
        complain(str(error))
        sys.exit(code)


def check_which(option: str, which: str) -> None:
    """Refuse a checkpoint that is neither the best nor the last."""
    from .run.config import ConfigError

    if which not in ("best", "last"):
        raise ConfigError(f"{option} must be best or last, got `{which}`.")


def say(sentence: str) -> None:
    """Print a sentence as it is, on one line however long it is."""
    Console().print(Text(printable(sentence)), soft_wrap=True)


def complain(sentence: str) -> None:
    """Print a sentence to the standard error, with the name of the program before it."""
    Console(stderr=True).print(Text.assemble(("kerneq: ", "bold red"), printable(sentence)), soft_wrap=True)


def printable(text: str) -> str:
    """The text without what a file's name may do to a terminal: control characters, halves of characters."""
    whole = text.encode(errors="replace").decode()
    return "".join(c if c == "\n" or unicodedata.category(c) not in ("Cc", "Cf") else "\ufffd" for c in whole)
