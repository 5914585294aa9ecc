"""What every script here shares: settings from TOML and `key=value`, the command line, records and figures.

    python experiments/kglm/NAME.py [FILE.toml] [KEY=VALUE …] [--output FOLDER] [--threads N] [--record]

Numbers, settings and figures go to runs/kglm/NAME or `--output`; only `--record` replaces the figures of docs/kglm.
"""

import argparse
import dataclasses
import io
import json
import os
import platform
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

import kerneq
from kerneq import data
from kerneq.run.config import ConfigError, build, write
from kerneq.run.config import setting as setting  # the scripts take it from here

DOCS = Path(__file__).resolve().parents[2] / "docs" / "kglm"
COLOURS = {"informed": "C0", "naive": "C2", "random": "C3", "kernel": "C0"}

S = TypeVar("S")
Result = dict[str, Any]  # what goes into result.json
Figures = dict[str, Figure]  # file name without .png → figure


class Report(Protocol):
    """How a running experiment tells how far it is."""

    def __call__(self, share: float, words: str = "") -> None:
        """`share` of the work is done; `words` are printed above the progress bar."""


def silent(share: float, words: str = "") -> None:
    """Tell nobody."""


@dataclasses.dataclass(frozen=True)
class Experiment(Generic[S]):
    """A figure or table of the paper: its settings, how it is computed, drawn and put into words."""

    name: str
    settings: type[S]
    run: Callable[[S, torch.device, Report], Result]
    draw: Callable[[S, Result, torch.device], Figures]
    summarise: Callable[[S, Result], list[str]]
    label: Callable[[S], str]  # the figures of docs/kglm are called LABEL-FIGURE.png


def main(experiment: Experiment[Any], arguments: Sequence[str] | None = None) -> None:
    """The command line of a script; what the user can put right ends in one sentence."""
    options = _parse(experiment, arguments)
    try:
        settings = read(experiment.settings, options.settings)
        folder = options.output or Path("runs") / "kglm" / _title(experiment, options.settings)
        if folder.resolve().is_relative_to(DOCS):
            raise ConfigError(f"{folder} holds tracked figures: choose another --output, and replace them by --record.")
        _execute(experiment, settings, folder, options.threads, options.record)
    except (ConfigError, data.DataError, OSError) as error:
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
    parser.add_argument("--output", type=Path, help="the folder for numbers and figures (default: runs/kglm/…)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: as many as torch likes")
    parser.add_argument("--record", action="store_true", help="also replace the figures of docs/kglm")
    return parser.parse_args(arguments)


def _title(experiment: Experiment[Any], arguments: Sequence[str]) -> str:
    """The name of the file of settings, or the experiment's."""
    return Path(arguments[0]).stem if arguments and _is_file(arguments[0]) else experiment.name


def _execute(experiment: Experiment[Any], settings: Any, folder: Path, threads: int, record: bool) -> None:
    if threads:
        torch.set_num_threads(threads)
    console, device = Console(highlight=False, soft_wrap=True), device_of(settings.device)
    folder.mkdir(parents=True, exist_ok=True)  # now: not after hours of work
    start = time.perf_counter()
    with Progress(console=console) as progress:
        bar = progress.add_task(experiment.name, total=1.0)

        def report(share: float, words: str = "") -> None:
            progress.update(bar, completed=share)
            if words:
                console.print(words)

        result = experiment.run(settings, device, report)
    result = {**result, "wall_seconds": time.perf_counter() - start}
    figures = experiment.draw(settings, result, device)
    write_record(folder, settings, device, result, figures)
    if record:
        for name, figure in figures.items():
            write_atomically(DOCS / f"{experiment.label(settings)}-{name}.png".lstrip("-"), picture(figure))
    for words in experiment.summarise(settings, result):
        console.print(words)
    console.print(f"{result['wall_seconds']:.0f} s. {folder}/result.json")


def read(cls: type[S], arguments: Sequence[str] = ()) -> S:
    """The dataclass `cls` from a file (first, if any) and `key=value` changes; unknown keys are refused."""
    table: dict[str, Any] = {}
    if arguments and _is_file(arguments[0]):
        file, *arguments = arguments
        try:
            table = tomllib.loads(Path(file).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"There is no file {file}; see experiments/kglm/ for ready ones.") from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{file} cannot be read as a configuration file: {error}.") from None
    for change in arguments:
        key, equals, text = change.partition("=")
        if not equals:
            raise ConfigError(f"A change of setting is written key=value, got `{change}`.")
        table[key.strip()] = _value(text.strip())
    return build(cls, table)


def _is_file(argument: str) -> bool:
    """A first argument with `=` in it is a change, unless there is such a file; a path ends in .toml."""
    return Path(argument).exists() or (argument.endswith(".toml") and "=" not in argument)


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # a bare word is a text


def device_of(name: str) -> torch.device:
    """`auto` takes a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def load_pixels(name: str, split: Literal["train", "test"], count: int) -> Tensor:
    """The first `count` images of a data set as bytes (count, c, h, w)."""
    images = data.load(name, split)
    if not isinstance(images, data.Images):
        raise TypeError(f"{name} is read whole into memory.")
    return images.pixels[:count]


def write_record(folder: Path, settings: Any, device: torch.device, result: Result, figures: Figures) -> None:
    """Write the settings, the machine, the numbers and the figures of a run under `folder`."""
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
    facts = {
        "kerneq": kerneq.__version__,
        "torch": torch.__version__,
        "device": machine,
        "threads": torch.get_num_threads(),
    }
    content = {"settings": dataclasses.asdict(settings), "machine": facts, **result}
    write_atomically(folder / "settings.toml", write(settings).encode())
    write_atomically(folder / "result.json", (json.dumps(content, indent=1) + "\n").encode())
    for name, figure in figures.items():
        write_atomically(folder / f"{name}.png", picture(figure))


def write_atomically(path: Path, content: bytes) -> None:
    """The old file or the new one, never half of each."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def subplots(rows: int, columns: int, width: float, height: float) -> tuple[Figure, Any]:
    """A figure and its axes as an array (rows, columns), without matplotlib's global state."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, np.asarray(figure.subplots(rows, columns, squeeze=False))


def picture(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110, format="png")
    return buffer.getvalue()


def plain(values: Tensor) -> list:
    """Numbers for JSON, which has no NaN: a model that failed becomes null."""
    return [plain(row) for row in values] if values.ndim > 1 else [v if v == v else None for v in values.tolist()]
