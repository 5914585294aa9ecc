"""The command line: every command, its options, and what it prints.

torch, and all that imports it, is imported inside the commands, so that `kerneq --help` does not wait for it.
"""

import csv
import glob
import io
import json
import os
import shlex
import shutil
import sys
import time
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from .. import __version__

if TYPE_CHECKING:
    from ..models import Measured
    from .prediction import Prediction
    from .run import Run
    from .run.config import Config
    from .training import AbstractLogger

PACKAGE = Path(__file__).parents[1]

app = typer.Typer(
    name="kerneq",
    help="Kernel equilibrium models: train them, look at them, measure them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def experiments(start: str) -> list[str]:
    """What Tab offers where an experiment is wanted: those that ship, and what lies in the folder."""
    return _offered(start, "experiments/*.toml")


def sweeps(start: str) -> list[str]:
    """What Tab offers where a sweep is wanted: those that ship, and what could be varied."""
    return _offered(start, "experiments/sweeps/*.toml", "experiments/*.toml")


def trained_runs(start: str) -> list[str]:
    """What Tab offers where a trained run is wanted: the weights that ship, and what lies in the folder."""
    return _offered(start, "weights/*")


def _offered(start: str, *patterns: str) -> list[str]:
    ship = [path for pattern in patterns for path in sorted(PACKAGE.glob(pattern))]
    names = (path.name.removesuffix(".toml") for path in ship)
    return [name for name in [*names, *sorted(glob.glob(glob.escape(start) + "*"))] if name.startswith(start)]


Device = Annotated[
    str, typer.Option(help="auto, cpu, cuda or cuda:N.", autocompletion=lambda: ["auto", "cpu", "cuda", "cuda:0"])
]
_run = partial(typer.Argument, metavar="RUN", autocompletion=trained_runs)
RunFolder = Annotated[Path, _run(help="A run folder, or the name of weights that ship (kerneq models).")]
RunFolders = Annotated[list[Path], _run(help="Run folders, folders that hold some, or names of weights that ship.")]
AllRuns = Annotated[Path, typer.Option("--runs", help="The folder that holds the runs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Checkpoint = Annotated[
    str, typer.Option(help="best (on the held-out images) or last.", autocompletion=lambda: ["best", "last"])
]

RUNS = Path("runs")
DEMO_MODELS = ("geq-tiny", "mopteq-tiny", "opteq-tiny", "geq-dense-tiny", "resnet-tiny")
TOGETHER = 256  # picture files that are in the memory at once
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


@app.command(no_args_is_help=True)
def train(
    file: Annotated[
        str,
        typer.Argument(
            help="An experiment by its name or its file, or a run folder to --resume.",
            metavar="FILE",
            autocompletion=experiments,
        ),
    ] = "",
    changes: Annotated[
        list[str] | None,
        typer.Argument(help="Settings to change, for example optimizer.lr=0.2 seed=1.", metavar="KEY=VALUE"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run from its last checkpoint.")] = False,
    name: Annotated[str, typer.Option(help="Name of the run folder; by default that of FILE.")] = "",
    runs: AllRuns = RUNS,
    show_config: Annotated[bool, typer.Option("--show-config", help="Print every setting as TOML and stop.")] = False,
) -> None:
    """Train a model; everything about the run goes into runs/NAME."""
    began = time.monotonic()
    from .run import Run
    from .run.config import check, write
    from .training import train as train_model

    settings = list(changes or [])
    if "=" in file and not os.path.exists(file):  # which does not mind that it may be too long for a name
        file, settings = "", [file, *settings]
    config, folder = planned_run(file, settings, resume, name, runs)
    check(config)
    if show_config:
        sys.stdout.write(write(config, comments=True))
        return
    told = loggers(folder)
    train_model(config, folder, resume=resume, loggers=told, began=began)
    if told:
        best = Run(folder).best_accuracy()
        words = f"best validation accuracy {best:.2%}" if best is not None else "no accuracy on held-out images"
        epochs = "1 epoch" if config.training.epochs == 1 else f"{config.training.epochs} epochs"
        say(f"{folder}: {epochs}, {words}. Next: kerneq evaluate {shlex.quote(str(folder))}")


def planned_run(file: str, changes: Sequence[str], resume: bool, name: str, runs: Path) -> "tuple[Config, Path]":
    """The configuration and the run folder that the arguments of `kerneq train` mean."""
    from .run.config import ConfigError, load

    path = Path(file)
    if file and path.is_dir():
        if not resume:
            raise ConfigError(f"{path} is a folder: add --resume to continue the run in it, or name a TOML file.")
        if name or runs != RUNS:
            raise ConfigError(f"--name and --runs say where a new run goes: {path} is continued where it is.")
        return load(path / "config.toml", changes), path
    config = load(file or None, changes)
    file_name = path.resolve().parent.name if path.name == "config.toml" else path.name  # of a run, which has a name
    name = name or file_name.removesuffix(".toml") or config.model.name
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
def sweep(
    file: Annotated[
        str,
        typer.Argument(
            help="A sweep or an experiment by its name, or a TOML file with a table `grid`.",
            metavar="FILE",
            autocompletion=sweeps,
        ),
    ],
    axes: Annotated[
        list[str] | None,
        typer.Argument(help="What to vary, for example model.norm=1,2 seed=0,1,2.", metavar="KEY=A,B,C"),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the folder of all its runs; by default that of FILE.")] = "",
    runs: AllRuns = RUNS,
    test: Annotated[bool, typer.Option("--test", help="Evaluate each run on the test images, too.")] = False,
    show: Annotated[bool, typer.Option("--list", help="Train nothing: show the runs, and how far they are.")] = False,
) -> None:
    """Train an experiment over a grid of settings and draw it; finished runs are skipped, killed ones go on."""
    from .sweep import collect, load_sweep, run_sweep

    grid = load_sweep(file, axes or [])
    folder = runs / (name or grid.name)
    result = collect(grid, folder) if show else run_sweep(grid, folder, test=test, loggers=loggers)
    title = Text(printable(f"{grid.name}: accuracy of each run"))
    table = Table(Column("run", overflow="fold"), *numbers("epochs", "seconds", "validation", "test"), title=title)
    for cell in result.cells:
        shares = [f"{value:.2%}" if value is not None else "–" for value in (cell.validation, cell.test)]
        table.add_row(Text(printable(cell.name)), f"{cell.epochs}", f"{cell.seconds:.1f}", *shares)
    show_table(table)
    for point in result.points:
        spread = f" ± {point.std:.2%}" if point.std is not None else ""
        where = ", ".join(f"{axis} = {value}" for axis, value in point.values.items())
        say(f"{where or grid.name}: {point.mean:.2%}{spread} ({result.split}, seeds: {point.seeds})")
    failed = [cell for cell in result.cells if cell.problem]
    for cell in failed:
        complain(of_run(folder / cell.name, cell.problem))
    if not show:
        say(f"Written to {folder / 'sweep.json'}" + (f" and {folder / 'sweep.svg'}" if result.points else ""))
    if failed:
        sys.exit(1)


@app.command()
def evaluate(
    folders: RunFolders,
    part: Annotated[
        list[str] | None, typer.Option(help="Only this part, and more with another --part; a wrong name lists them.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every part that applies; some take long.")] = False,
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
) -> None:
    """What trained runs are worth on the test images; also written to RUN/evaluation.json and RUN/evaluation/."""
    from ..settings import suggestion
    from .evaluate import PARTS
    from .run import TrainingError, find_runs
    from .run.config import ConfigError

    names = list(dict.fromkeys(part or [name for name, entry in PARTS.items() if everything or entry.usual]))
    for name in names:
        if name not in PARTS:
            known = "".join(f"\n{known}: {entry.sentence}" for known, entry in PARTS.items())
            raise ConfigError(f"There is no part `{name}`.{suggestion(name, PARTS)} There are:{known}")
    runs = find_runs(folders)
    failures: list[Exception] = []
    for run in runs:
        try:
            evaluate_one(run, names, checkpoint, device, asked=bool(part), everything=everything)
        except Exception as error:
            if len(runs) == 1 or exit_code(error) is None:
                raise
            complain(of_run(run.path, str(error)))
            failures.append(error)
    whole = []
    for run in runs if len(runs) > 1 else ():
        try:
            run.test()
            whole.append(run)
        except TrainingError as error:  # a damaged evaluation.json costs the others no table
            complain(str(error))
            failures.append(error)
    if whole:
        compare(whole)
    if failures:
        sys.exit(exit_code(failures[0]))


def evaluate_one(
    run: "Run", names: Sequence[str], checkpoint: str, device: str, *, asked: bool, everything: bool
) -> None:
    """Measure, print and write some parts of one run.

    A part that says nothing about this run is an error where it was asked for by name, and a sentence among all.
    """
    from rich.progress import Progress

    from .evaluate import PARTS, NotApplicableError, TrainedRun, measure_part
    from .run import SHIPPED, TrainingError

    unwritten: TrainingError | None = None
    watched = Console(stderr=True)
    progress = Progress(console=watched, transient=True, disable=not watched.is_terminal)
    trained = TrainedRun.open(run.path, checkpoint, device, progress=progress)
    for name in names:
        try:
            with progress:
                measured = measure_part(trained, name, PARTS[name])
        except NotApplicableError as error:
            if asked:
                raise
            if everything:
                say(f"{run.path}, {name}: {error}")
            continue
        table = Table.grid(padding=(0, 2), pad_edge=True)
        for title, value in measured.evidence.summary():
            table.add_row(Text(printable(title), "dim"), Text(printable(value)))
        say(f"{run.path}: {PARTS[name].sentence}", "bold")
        Console().print(table)
        if run.path.resolve().parent == SHIPPED.resolve():
            say("Not written: these weights are part of the installation.")
            continue
        try:
            say(f"Written to {', '.join(str(run.path / file) for file in measured.write())}")
        except TrainingError as error:  # a folder that cannot be written costs nobody a result
            unwritten = unwritten or error
    if unwritten is not None:
        raise unwritten


def compare(runs: "Sequence[Run]") -> None:
    """Print the metrics of several runs on their test images, a row each, a dash where one was not evaluated.

    Below them, where some differ in their seed only, mean ± standard deviation over the seeds.
    """
    from .evaluate import over_seeds
    from .training.metrics import METRICS

    shown = [metric for metric in METRICS if metric.over != "adjoints"]  # those are of training
    headings = (metric.title.replace(" ", "\n") for metric in shown)  # which leave room for the run
    table = Table(Column("run", overflow="fold"), *numbers(*headings))
    for run in runs:
        table.add_row(Text(printable(str(run.path))), *(metric.text(run.test()) for metric in shown))
    show_table(table)
    for seeds in over_seeds(runs):
        means = ", ".join(f"{metric.title} {seeds.text(metric)}" for metric in shown)
        say(f"{', '.join(str(run.path) for run in seeds.runs)}, mean ± std of {len(seeds.runs)} seeds: {means}")


@app.command()
def predict(
    run: RunFolder,
    pictures: Annotated[
        list[Path],  # one that may not be read is for `Predictor.read` to refuse, or the others would get no prediction
        typer.Argument(help="Picture files, or folders of them.", metavar="IMAGE", readable=False),
    ],
    checkpoint: Checkpoint = "best",
    top: Annotated[int, typer.Option(help="How many classes to show for each picture.", min=1)] = 5,
    device: Device = "auto",
    as_json: AsJson = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print CSV instead of a table, a row for each picture.")
    ] = False,
    certify: Annotated[
        bool, typer.Option("--certify", help="Also how far a picture may change and provably keep its class; slow.")
    ] = False,
    saliency: Annotated[
        Path | None, typer.Option(help="Also draw where the model looks, into this PNG file.", metavar="FILE")
    ] = None,
) -> None:
    """What a trained run sees in picture files: classes, probabilities, and whether its equilibrium was found."""
    from rich.progress import track

    from .data import DataError
    from .evaluate.trained import png
    from .prediction import Predictor, draw_predictions, find_pictures
    from .run import write_atomically
    from .run.config import ConfigError

    if as_json and as_csv:
        raise ConfigError("--json and --csv exclude each other: choose one.")
    if saliency is not None and (saliency.suffix.lower() != ".png" or saliency.exists()):
        raise ConfigError(f"--saliency takes the name of a new .png file, got {printable(str(saliency))}.")
    predictor = Predictor(run, checkpoint, device)
    files: list[Path] = []
    failures: list[dict[str, str]] = []
    for path in pictures:
        try:
            files += find_pictures(path)
        except DataError as error:
            failures.append({"path": str(path), "problem": str(error)})
    predictions: list[Prediction] = []
    watched = Console(stderr=True)
    unseen = not watched.is_terminal or len(files) <= TOGETHER
    starts = range(0, len(files), TOGETHER)  # a whole folder need not fit into the memory
    for start in track(starts, f"{len(files)} pictures", console=watched, transient=True, disable=unseen):
        readable = []
        for path in files[start : start + TOGETHER]:
            try:
                readable.append((path, predictor.read(path)))
            except DataError as error:
                failures.append({"path": str(path), "problem": str(error)})
        try:
            predictions += predictor.predict(readable, top, certify)
        except TypeError as error:
            if not certify:
                raise
            raise ConfigError(f"--certify: {error}") from None
    if as_json:
        trained, rows = predictor.trained, [prediction_row(prediction) for prediction in predictions]
        facts = {"run": str(run), "checkpoint": checkpoint, "epoch": trained.epoch, "named": trained.named}
        print(json.dumps(facts | {"predictions": rows, "failures": failures}, indent=2))
    elif as_csv:
        write_csv(predictions, min(top, len(predictor.trained.classes)))
    elif predictions:
        title = f"{predictor.trained.config.model.name}, {checkpoint} weights of {run}"
        show_predictions(predictions, title, predictor.trained.named)
    if saliency is not None and predictions:
        sheet, drawn = draw_predictions(predictor, predictions)
        write_atomically(saliency, png(sheet))
        first = f"the first {drawn}" if drawn < len(predictions) else "all"
        watched.print(f"Where it looks, {first} of the pictures: {printable(str(saliency))}", soft_wrap=True)
    for failure in failures:
        complain(failure["problem"])
    if failures:
        sys.exit(1)


def show_predictions(predictions: "Sequence[Prediction]", title: str, named: bool) -> None:
    """Print a table of the predictions, and below it what keeps them from being taken at their word."""
    show_table(prediction_table(predictions, title))
    missed = Counter(p.status.value for p in predictions if p.status is not None and not p.converged)
    for reason, count in missed.items():
        words = f"{count} of {len(predictions)} predictions come from an unfinished equilibrium."
        say(f"{words} {reason}", "yellow")
    if all(p.radius == 0 for p in predictions):
        say("Radius 0: of this model no perturbation is certified. `geq-certified` is made for it.", "yellow")
    if not named:
        say(NUMBERED, "yellow")


def write_csv(predictions: "Sequence[Prediction]", top: int) -> None:
    """Print a row for each picture, its likeliest classes and their probabilities in pairs of columns."""
    pairs = [f"{word} {place}" for place in range(1, top + 1) for word in ("class", "probability")]
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(["picture", *pairs, "converged", "steps", "residual", "certified_radius"])
    for prediction in predictions:
        row = prediction_row(prediction)
        found = [cell for entry in row["top"] for cell in (entry["class"], entry["probability"])]
        path = str(prediction.path).encode(errors="replace").decode()  # a file's name may be no text
        table.writerow([path, *found, *(row[key] for key in ("converged", "steps", "residual", "certified_radius"))])


def prediction_row(prediction: "Prediction") -> dict[str, Any]:
    """A prediction as JSON has it, which knows no infinity."""
    from .run.folder import finite

    status = prediction.status
    top = zip(prediction.classes, prediction.probabilities, strict=True)
    row = {
        "path": str(prediction.path),
        "top": [{"class": name, "probability": share} for name, share in top],
        "converged": prediction.converged if status is not None else None,
        "status": status.name.lower() if status is not None else None,
        "steps": prediction.steps,
        "residual": prediction.residual,
        "certified_radius": prediction.radius,
    }
    return dict(finite(row))


def prediction_table(predictions: "Sequence[Prediction]", title: str) -> Table:
    """A few rows per picture: its likeliest classes, one a row, and how its equilibrium was found.

    A class stands in a row of its own with its probability, so that no fold can part them. All fits into 80 columns.
    """
    longest = max((len(printable(name)) for p in predictions for name in p.classes), default=0)
    certified = any(p.radius is not None for p in predictions)
    table = Table(
        Column("picture", overflow="fold", min_width=12),
        Column("class", overflow="fold", min_width=min(longest, 16)),
        *numbers("share", "steps", "residual"),
        Column("equilibrium", no_wrap=True),
        *(numbers("radius") if certified else ()),
        title=Text(printable(title)),
        box=box.HORIZONTALS,
        show_edge=False,
        padding=0,
    )
    for p in predictions:
        solver = [Text("–")] * 3
        if p.status is not None:
            word = Text("converged", "green") if p.converged else Text("not converged", "bold red")
            solver = [Text(f"{p.steps}"), Text(f"{p.residual:.1e}"), word]
        first = [Text(printable(str(p.path))), *solver]
        if certified:
            first.append(Text("–" if p.radius is None else f"{p.radius:.3f}"))
        for name, share in zip(p.classes, p.probabilities, strict=True):
            path, *outcome = first
            table.add_row(path, Text(printable(name)), f"{share:.2%}", *outcome)
            first = [Text("")] * len(first)
        table.add_section()
    return table


@app.command()
def export(
    run: RunFolder,
    folder: Annotated[Path, typer.Argument(help="The folder to write.", metavar="FOLDER")],
    checkpoint: Checkpoint = "best",
) -> None:
    """A small copy of a trained run to hand on: weights in half precision, records, and a model card."""
    from .evaluate import export as export_run

    written = export_run(run, folder, checkpoint)
    say(f"Written to {folder}; its card is {written.path / 'README.md'}")


@app.command()
def report(
    folders: RunFolders,
    output: Annotated[
        Path, typer.Option(help="One .html file, .md with its figures beside it, or .json: the results alone.")
    ] = Path("report.html"),
    title: Annotated[str, typer.Option(help="The title of the page.")] = "kerneq report",
) -> None:
    """One self-contained page about some runs: results beside the papers', curves, and all that was measured."""
    from .report import render

    render(folders, output, title)
    say(f"Written to {output}")


@app.command()
def data() -> None:
    """The data sets: which are found under KERNEQ_DATA, which are missing and how to get them."""
    from .data import data_root, describe

    title = Text(printable(f"Data sets under {data_root()} (set KERNEQ_DATA to look elsewhere)"))
    narrow = [Column(heading, no_wrap=True) for heading in ("name", "found")]
    table = Table(*narrow, Column("where, or how to get it", overflow="fold"), title=title, show_lines=True)
    for row in describe():
        if row.found:
            where = str(row.path or "part of the installation")
        else:
            where = str(row.problem) if row.path is not None else row.get
        cell = Text.assemble(printable(where), "\n", (f"licence: {row.licence}", "dim"))
        table.add_row(row.name, "[green]yes" if row.found else "[yellow]no", cell)
    own = "pictures of your own: one folder for each class in PATH, or in PATH/train and PATH/test"
    example = "kerneq train geq-tiny-cifar10 data.name=folder:PATH data.size=32 training.batch_size=16"
    table.add_row("folder:PATH", "", Text.assemble(own, "\n", (example, "bold")))
    show_table(table)


@app.command()
def verify(as_json: AsJson = False) -> None:
    """Check every claim of the papers and of ours by numbers, in half a minute; fails where an error is not known."""
    from .run.folder import to_json
    from .verify.claims import CLAIMS
    from .verify.verify import ROUNDING, Verdict
    from .verify.verify import verify as check

    findings = []
    with Console(stderr=True).status("") as status:
        for finding in check(CLAIMS):
            findings.append(finding)
            status.update(f"{len(findings)} of {len(CLAIMS)} claims")
    unexplained = [finding for finding in findings if not finding.explained]
    if as_json:
        print(to_json([finding.row() for finding in findings], indent=2))
    else:
        colours = {Verdict.HOLDS: "green", Verdict.CORRECTED: "yellow", Verdict.FAILS: "bold red"}
        title = "Worst case found: left-hand side over right-hand side, as published → corrected"
        columns = [Column("claim"), Column("verdict", no_wrap=True), *numbers("worst", "s")]
        table = Table(*columns, title=title, box=None, padding=(0, 1, 0, 0))
        for finding in findings:
            why = finding.evidence.where if finding.erratum is None else f"{finding.erratum}. {finding.evidence.where}"
            words = Text.assemble(f"{finding.published}: {finding.claim}\n", (why, "dim"))
            verdict = Text(finding.verdict.value, colours[finding.verdict])
            table.add_row(words, verdict, finding.worst, f"{finding.seconds:.1f}")
        show_table(table)
        seconds = sum(finding.seconds for finding in findings)
        counts = Counter(finding.verdict.value for finding in findings)
        told = ", ".join(f"{count} {word}" for word, count in counts.items())
        say(f"{len(findings)} claims in {seconds:.0f} s: {told}. A ratio above 1 + {ROUNDING:g} breaks a claim.")
    for finding in unexplained:
        complain(
            f"{finding.published}, {finding.claim}: {finding.verdict.value}, {finding.worst}. This is not explained."
        )
    if unexplained:
        sys.exit(1)


@app.command()
def models() -> None:
    """The models: parameters, equation, paper, published accuracy and ours."""
    from ..models import MODELS, build, our_accuracies, parameters
    from .run import Run
    from .run.weights import SHIPPED
    from .run.weights import names as weights

    headings = {"name": "left", "size": "right", "eq.": "right", "data": "left", "paper, %": "right", "ours, %": "left"}
    columns = [Column(heading, justify=side, no_wrap=True) for heading, side in headings.items()]  # type: ignore[arg-type]
    title = "Models: kerneq train … model.name=NAME"
    table = Table(*columns, title=title, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    equations = list(dict.fromkeys(entry.equation for entry in MODELS.values()))
    papers: dict[str, list[str]] = {}
    every = our_accuracies()
    for name, entry in MODELS.items():
        size = parameters(build(name))
        first = [name, millions(size), str(equations.index(entry.equation) + 1)]
        for data in dict.fromkeys((*entry.published, *every.get(name, {}))) or ("",):
            published = f"{entry.published[data]}".replace(" ", "") if data in entry.published else ""
            pictures = data.replace(" at ", "@").replace(" px", "")
            table.add_row(*first, pictures, published, accuracy_text(every.get(name, {}).get(data), size))
            first = [""] * 3
        papers.setdefault(entry.paper, []).append(name)
    show_table(table)
    console = Console()
    for place, equation in enumerate(equations, start=1):
        console.print(f"{place}: {equation}", markup=False, highlight=False)
    for paper, names in papers.items():
        console.print(f"{paper}: {', '.join(names)}", markup=False, highlight=False)
    say("ours: on the test images, of the run nearest to today's recipe, ± over seeds; docs/results.md has all.")
    say("In brackets the epochs trained, and the size where it was another.")
    shipped = (f"{name} ({Run(SHIPPED / name).test()['accuracy']:.2%})" for name in weights())
    say(f"Trained weights that ship, for kerneq predict: {', '.join(shipped)}")


def accuracy_text(found: "Measured | None", size: int) -> str:
    """A test accuracy of ours with its epochs; where the run's model had another size than the named one, with that."""
    if found is None:
        return ""
    spread = f"±{100 * found.std:.2f}" if found.std is not None else ""
    other = f", {millions(found.parameters)}" if millions(found.parameters) != millions(size) else ""
    return f"{100 * found.accuracy:.2f}{spread} ({found.epochs}{other})"


def millions(count: int) -> str:
    """A number of parameters in few digits."""
    return f"{count / 1e6:.1f}M" if count >= 100_000 else f"{count / 1e3:.1f}k"


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Where the runs and the report go.")] = Path("runs/demo"),
    epochs: Annotated[int, typer.Option(help="Epochs for each model.", min=1)] = 6,
) -> None:
    """Train small models on the embedded digits and compare them: a few minutes on a CPU, no downloads."""
    import torch

    from .evaluate import PARTS, NotApplicableError, TrainedRun, measure_part
    from .report import gather, render
    from .run import Run
    from .run.config import load
    from .training import train as train_model
    from .training.metrics import METRICS

    configs = {output / name: load(f"{name}-digits", [f"training.epochs={epochs}"]) for name in DEMO_MODELS}
    folders = list(configs)
    earlier = [Run(folder) for folder in folders if folder.exists()]
    for run in earlier:
        check_demo(run, configs[run.path])
    for run in earlier:
        with run.locked():
            shutil.rmtree(run.path)
    torch.set_num_threads(1)  # these models are too small to share between threads
    for folder, config in configs.items():
        train_model(config, folder, loggers=loggers(folder))
        trained = TrainedRun.open(folder, device="cpu")
        for name in ("scores", "behaviour"):
            with suppress(NotApplicableError):  # a model without equilibria has no behaviour
                measure_part(trained, name, PARTS[name]).write()
    render(folders, output / "report.html")
    shown = [metric for metric in METRICS if metric.demo]
    headings = (*(metric.heading for metric in shown), "size", "seconds")
    columns = [Column("model", no_wrap=True), *(Column(heading, justify="right") for heading in headings)]
    table = Table(*columns, title="Embedded digits: 8×8 pictures, 10 classes")
    for run in (one.run for one in gather(folders)):
        size = millions(run.evaluation()["parameters"])
        scores = (metric.text(run.test()) for metric in shown)
        table.add_row(Text(printable(run.name)), *scores, size, f"{run.seconds():.1f}")
    show_table(table)
    say(f"Curves, calibration, mistakes, equilibria: {output / 'report.html'}")


def check_demo(run: "Run", config: "Config") -> None:
    """Refuse a folder that the demo may not replace: no run, or one with other settings than its own, epochs aside."""
    from .run import TrainingError
    from .run.config import ConfigError, differences

    with suppress(ConfigError, TrainingError):  # no settings, or none that can be read
        if set(differences(run.config(), config)) <= {"training.epochs"}:
            return
    raise ConfigError(f"{run.path} exists but is not a run of the demo; choose another --output.")


def main(command: Callable[[], object] = app) -> None:
    """Run the program; exit with 2 for a wrong request, 130 for a stopped run, 1 for other known failures.

    Errors a user can act on are shown as their sentence, and so are our warnings; only bugs give a traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without our characters costs nobody a run or a result
            stream.reconfigure(errors="replace")
    plain = warnings.formatwarning
    warnings.formatwarning = partial(_sentence, plain)
    try:
        command()
    except (KeyboardInterrupt, SystemExit) as stop:  # typer makes the second of the first
        if isinstance(stop, SystemExit) and stop.code != 130:
            raise
        complain("Interrupted.")
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)  # the reader of our output went away; there is nobody to tell
    except Exception as error:
        code = exit_code(error)
        if code is None:
            raise
        complain(advised(error))
        sys.exit(code)
    finally:
        warnings.formatwarning = plain


def _sentence(
    plain: Callable[..., str], message: Warning | str, category: type[Warning], filename: str, *rest: Any
) -> str:
    """A warning from this package without the place it comes from; any other as Python writes it."""
    ours = Path(filename).is_relative_to(PACKAGE)
    return f"kerneq: {printable(str(message))}\n" if ours else plain(message, category, filename, *rest)


def exit_code(error: Exception) -> int | None:
    """What the program ends with after an error whose sentence is enough; None for a bug."""
    from torch import OutOfMemoryError

    from ..solution import EquilibriumError, NonfiniteInputError
    from .data import DataError
    from .run import Stopped, TrainingError
    from .run.config import ConfigError

    others = (DataError, EquilibriumError, NonfiniteInputError, TrainingError, OSError, OutOfMemoryError)
    codes = ((ConfigError, 2), (Stopped, 130), (others, 1))
    return next((code for kinds, code in codes if isinstance(error, kinds)), None)


def advised(error: Exception) -> str:
    """The sentence of an error; of PyTorch's about memory its first ones, and what to do instead of its own advice."""
    from torch import OutOfMemoryError

    if not isinstance(error, OutOfMemoryError):
        return str(error)
    said = str(error).partition(" Including non-PyTorch memory")[0].partition(" Of the allocated memory")[0]
    return f"{said} Free the card (`nvidia-smi` shows who holds it), or train in smaller batches (training.batch_size)."


def of_run(folder: Path, problem: str) -> str:
    """A sentence about a run, with its folder before it where it does not name it itself."""
    return problem if str(folder) in problem else f"{folder}: {problem}"


def numbers(*headings: str) -> list[Column]:
    """The columns of a table that hold numbers."""
    return [Column(heading, justify="right", no_wrap=True) for heading in headings]


def show_table(table: Table) -> None:
    """Print a table; in a terminal of fewer than 80 columns its lines are broken, but no cell is cut."""
    console = Console()
    console.width = max(console.width, 80)
    console.print(table)


def say(sentence: str, style: str = "") -> None:
    """Print a sentence as it is, on one line however long it is."""
    Console().print(Text(printable(sentence), style), soft_wrap=True)


def complain(sentence: str) -> None:
    """Print a sentence to the standard error, with the name of the program before it."""
    Console(stderr=True).print(Text.assemble(("kerneq: ", "bold red"), printable(sentence)), soft_wrap=True)


def printable(text: str) -> str:
    """The text without what a file's name may do to a terminal: control characters, halves of characters."""
    whole = text.encode(errors="replace").decode()
    return "".join(c if c == "\n" or unicodedata.category(c) not in ("Cc", "Cf") else "\ufffd" for c in whole)
