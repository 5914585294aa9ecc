"""What every script here shares: settings from TOML and `key=value`, the command line, records and figures.

    python experiments/kglm/NAME.py [FILE.toml] [KEY=VALUE …] [--device cuda] [--output FOLDER] [--threads N] [--record]
    python experiments/kglm/NAME.py --draw RECORD.json [RECORD.json …] [--output FOLDER] [--record]

Numbers, settings and figures go to runs/kglm/NAME or `--output`, where a run that was killed is taken up again. Figures
are drawn from the numbers, by `--draw` without computing them anew, several records side by side; only `--record`
replaces the records and figures of docs/kglm.
"""

import argparse
import dataclasses
import io
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, final

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress

from kerneq.lab import data
from kerneq.lab.run import TrainingError, machine, write_atomically
from kerneq.lab.run.config import ConfigError, read_toml
from kerneq.lab.training.process import choose_device
from kerneq.settings import Override, build, write

DOCS = Path(__file__).resolve().parents[2] / "docs" / "kglm"
COLOURS = {"informed": "C0", "naive": "C2", "random": "C3", "kernel": "C0"}

S = TypeVar("S")
Shared = bool | Literal["row", "col", "all"]
Result = dict[str, Any]  # what goes into result.json
Figures = dict[str, Figure]  # file name without .png → figure


@final
class Checkpoints:
    """What a killed run had done, in a folder; nothing is kept without one.

    A checkpoint made with other settings (`key`) is as good as none.
    """

    def __init__(self, folder: Path | None, key: str = "", seconds: float = 30.0) -> None:
        self.folder, self.key, self.seconds = folder, key, seconds
        self.last = time.monotonic()

    def due(self) -> bool:
        """Whether the last one is `seconds` old."""
        return self.folder is not None and time.monotonic() - self.last >= self.seconds

    def save(self, name: str, content: dict[str, Any]) -> None:
        """Keep tensors, numbers and containers of them."""
        if self.folder is None:
            return
        buffer = io.BytesIO()
        torch.save({"key": self.key, "content": content}, buffer)
        write_atomically(self.folder / f"{name}.pt", buffer.getvalue())
        self.last = time.monotonic()

    def load(self, name: str) -> dict[str, Any] | None:
        """What was kept under this name with these settings, on the CPU."""
        if self.folder is None or not (self.folder / f"{name}.pt").exists():
            return None
        kept = torch.load(self.folder / f"{name}.pt", map_location="cpu", weights_only=True)
        return kept["content"] if kept["key"] == self.key else None

    def drop(self, name: str) -> None:
        """Forget it."""
        if self.folder is not None:
            (self.folder / f"{name}.pt").unlink(missing_ok=True)


UNSAVED = Checkpoints(None)


@final
@dataclasses.dataclass(frozen=True)
class Job:
    """The device of an experiment, a function that reports its progress, and its checkpoints."""

    device: torch.device = torch.device("cpu")
    report: Callable[[float, str], None] = lambda share, words: None  # the share that is done, words to print or none
    saved: Checkpoints = UNSAVED


@dataclasses.dataclass(frozen=True)
class Record(Generic[S]):
    """A finished run: what figures are drawn from."""

    settings: S
    result: Result


@dataclasses.dataclass(frozen=True)
class Experiment(Generic[S]):
    """A figure or table of the paper: its settings, how it is computed, drawn and put into words."""

    name: str
    settings: type[S]
    run: Callable[[S, Job], Result]
    draw: Callable[[Sequence[Record[S]]], Figures]  # records of variants are compared side by side
    summarise: Callable[[S, Result], list[str]]
    label: Callable[[S], str]  # the figures of docs/kglm are called LABEL-FIGURE.png


def main(experiment: Experiment[Any], arguments: Sequence[str] | None = None) -> None:
    """The command line of a script; what the user can put right ends in one sentence."""
    options = _parse(experiment, arguments)
    given = options.settings
    title = Path(given[0]).stem if given and _is_file(given[0]) else experiment.name
    try:
        folder = options.output or Path("runs") / "kglm" / title
        if folder.resolve().is_relative_to(DOCS):
            raise ConfigError(f"{folder} holds tracked figures: choose another --output, and replace them by --record.")
        if options.draw:
            _draw(experiment, [read_record(experiment, Path(file)) for file in given], folder, options.record)
        else:
            settings = read(experiment.settings, [*given, *([f"device={options.device}"] if options.device else [])])
            _execute(experiment, settings, folder, options.threads, title if options.record else None)
    except (ConfigError, data.DataError, OSError, TrainingError) as error:
        print(f"{experiment.name}: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


def _parse(experiment: Experiment[Any], arguments: Sequence[str] | None) -> argparse.Namespace:
    fields = dataclasses.fields(experiment.settings)
    lines = [f"  {field.name} = {field.default}  {field.metadata['meaning']}" for field in fields]
    parser = argparse.ArgumentParser(
        prog=f"{experiment.name}.py",
        description=sys.modules[experiment.run.__module__].__doc__,
        epilog="settings:\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("settings", nargs="*", help="a TOML file of experiments/kglm, then KEY=VALUE changes")
    parser.add_argument("--draw", action="store_true", help="no run: draw the records (result.json) given instead")
    parser.add_argument("--device", help="the same as device=…: auto, cpu, cuda or cuda:N")
    parser.add_argument("--output", type=Path, help="the folder for numbers and figures (default: runs/kglm/…)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: as many as torch likes")
    parser.add_argument("--record", action="store_true", help="also replace the record and figures of docs/kglm")
    return parser.parse_intermixed_args(arguments)


def _execute(experiment: Experiment[Any], settings: Any, folder: Path, threads: int, record: str | None) -> None:
    if threads < 0:
        raise ConfigError(f"--threads must be 0 or more, got {threads}.")
    if threads:
        torch.set_num_threads(threads)
    console, device = Console(highlight=False, soft_wrap=True), choose_device(settings.device)
    folder.mkdir(parents=True, exist_ok=True)  # now: not after hours of work
    kept = {key: value for key, value in dataclasses.asdict(settings).items() if key not in ("seeds", "device")}
    saved = Checkpoints(folder / "checkpoints", json.dumps(kept))  # more seeds go on from fewer
    start = time.perf_counter()
    with Progress(console=console) as progress:
        bar = progress.add_task(experiment.name, total=1.0)

        def report(share: float, words: str) -> None:
            progress.update(bar, completed=share)
            if words:
                console.print(words)

        result = experiment.run(settings, Job(device, report, saved))
    result = {**result, "wall_seconds": round(time.perf_counter() - start, 1)}
    written = write_record(folder, settings, device, result)
    if record is not None:
        write_atomically(DOCS / "records" / f"{record}.json", written)
    for words in experiment.summarise(settings, result):
        console.print(words)
    console.print(f"{result['wall_seconds']:.0f} s. {folder}/result.json")
    _draw(experiment, [Record(settings, result)], folder, record is not None)


def _draw(experiment: Experiment[Any], records: list[Record[Any]], folder: Path, record: bool) -> None:
    if not records:
        raise ConfigError("--draw needs the records to draw: files result.json, or those of docs/kglm/records.")
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in experiment.draw(records).items():
        content = picture(figure)
        write_atomically(folder / f"{name}.png", content)
        if record:
            write_atomically(DOCS / f"{experiment.label(records[0].settings)}-{name}.png".lstrip("-"), content)


def read_record(experiment: Experiment[S], file: Path) -> Record[S]:
    """The settings and numbers of a finished run."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return Record(build(experiment.settings, content["settings"]), content)
    except FileNotFoundError:
        raise ConfigError(f"There is no record {file}; see docs/kglm/records.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not a record of {experiment.name}: {error}.") from None


def read(cls: type[S], arguments: Sequence[str] = ()) -> S:
    """The dataclass `cls` from a file (first, if any) and `key=value` changes; unknown keys are refused."""
    table: dict[str, Any] = {}
    if arguments and _is_file(arguments[0]):
        file, *arguments = arguments
        if not Path(file).exists():
            raise ConfigError(f"There is no file {file}; see experiments/kglm/ for ready ones.")
        table = read_toml(Path(file))
    for change in arguments:
        key, equals, text = change.partition("=")
        if not equals:
            raise ConfigError(f"A change of setting is written key=value, got `{change}`.")
        table[key.strip()] = Override(text)
    return build(cls, table)


def _is_file(argument: str) -> bool:
    """A first argument with `=` in it is a change, unless there is such a file; a path ends in .toml."""
    return Path(argument).exists() or (argument.endswith(".toml") and "=" not in argument)


def write_record(folder: Path, settings: Any, device: torch.device, result: Result) -> bytes:
    """Write the settings, the machine and the numbers of a run under `folder`."""
    content = {"settings": dataclasses.asdict(settings), "machine": machine(device), **result}
    written = (json.dumps(content) + "\n").encode()
    write_atomically(folder / "settings.toml", write(settings).encode())
    write_atomically(folder / "result.json", written)
    return written


def subplots(
    rows: int, columns: int, width: float, height: float, sharex: Shared = False, sharey: Shared = False
) -> tuple[Figure, Any]:
    """A figure and its axes as an array (rows, columns), without matplotlib's global state."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, np.asarray(figure.subplots(rows, columns, squeeze=False, sharex=sharex, sharey=sharey))


def picture(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110, format="png")
    return buffer.getvalue()
