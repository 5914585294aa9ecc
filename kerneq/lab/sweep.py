"""A sweep: one experiment over a grid of settings, every cell an ordinary run folder, drawn as accuracy ± seeds.

The file of a sweep is an experiment file with a table `[grid]`, in which every entry is an axis:

    base = "geq-tiny-digits"
    [grid]
    model.kernel.patch = [1, 2]                                        # values of the setting the axis is named after
    gradient = [                                                       # or settings that change together
        {label = "implicit", model.gradient.name = "implicit"},
        {label = "another model", base = "opteq-tiny-digits"},
    ]
    seed = [0, 1, 2]                                                   # what the mean and its ± are taken over

Cells that are finished are left alone, those that were killed go on, and one that fails says why and lets the others
run.
"""

import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, final

import torch

from ..settings import Written, suggestion, written
from .data import DataError
from .evaluate import evaluate
from .evaluate.scores import spread
from .report.figures import COLOURS, Canvas, clean, open_canvas
from .run import Run, Stopped, TrainingError, write_atomically
from .run.checkpoint import read_facts
from .run.config import EXPERIMENTS, Config, ConfigError, check, overlay, put, read_toml, resolve
from .run.folder import write_json
from .training import AbstractLogger, train

SWEEPS = EXPERIMENTS / "sweeps"  # those that come with the package
Axis = Mapping[str, Mapping[str, Any]]  # by the label of each value, the table of settings it stands for
Loggers = Callable[[Path], Sequence[AbstractLogger]]  # of the run in a folder


@final
@dataclasses.dataclass(frozen=True)
class Cell:
    """A point of the grid with one seed: where its run lies, and the settings laid over the experiment's."""

    name: str  # of its folder
    values: Mapping[str, str]  # by axis; axes of one value are left out
    settings: Mapping[str, Any]


@final
@dataclasses.dataclass(frozen=True)
class Sweep:
    """An experiment, as a table, and the axes of the grid."""

    name: str
    table: Mapping[str, Any]
    folder: Path  # from which a `base` is looked for
    axes: Mapping[str, Axis]

    def cells(self) -> list[Cell]:
        """Every combination of values, the last axis moving fastest."""
        found = []
        ends = [axis.removesuffix(".name").rpartition(".")[2] for axis in self.axes]
        short = {axis: end if ends.count(end) == 1 else axis for axis, end in zip(self.axes, ends, strict=True)}
        for combination in itertools.product(*(axis.items() for axis in self.axes.values())):
            settings: dict[str, Any] = {}
            for _, change in combination:
                settings = overlay(settings, change)
            chosen = zip(self.axes, combination, strict=True)
            values = {axis: label for axis, (label, _) in chosen if len(self.axes[axis]) > 1}
            plain = {axis: re.sub(r"[^\w.,+-]+", "-", label).strip("-") for axis, label in values.items()}
            name = ",".join(f"{short[axis]}={label}" for axis, label in plain.items())
            found.append(Cell(name, values, settings))
        names = [cell.name for cell in found]
        if len(set(names)) < len(names):
            raise ConfigError("Two cells of the grid have the same labels: give their values a `label` each.")
        return found

    def config(self, cell: Cell) -> Config:
        """The configuration of a cell, checked as `kerneq train` checks it."""
        config = resolve([self.table, cell.settings], self.folder)
        check(config)
        return config


def load_sweep(file: str, changes: Sequence[str] = ()) -> Sweep:
    """A sweep of the package by its name, a file with a [grid], or any experiment, over the values of `key=a,b,c`.

    A change replaces the axis of its key; one of a single value is a setting of all cells."""
    path, table = _find(file)
    grid = table.pop("grid", {})
    axes = _axes(grid) if isinstance(grid, Mapping) else {}
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"An axis is written key=a,b,c (for example seed=0,1,2), got `{change}`.")
        axes[key.strip()] = _axis(key.strip(), [Written(part) for part in _split(text)])
    if not any(len(values) > 1 for values in axes.values()):
        raise ConfigError(f"{file} has no [grid] of several values: say what to vary, for example seed=0,1,2.")
    if "seed" in axes:  # fastest, so that a sweep that is cut short has whole points
        axes["seed"] = axes.pop("seed")
    return Sweep(path.name.removesuffix(".toml"), table, path.parent, axes)


def _find(file: str) -> tuple[Path, dict[str, Any]]:
    """Where a sweep is, and its table; an experiment of the package is the `base` of an empty one."""
    path = Path(file)
    if "/" in file or file.endswith(".toml"):
        return path, read_toml(path)
    sweep, experiment = (folder / f"{file}.toml" for folder in (SWEEPS, EXPERIMENTS))
    if sweep.is_file():
        return sweep, read_toml(sweep)
    if experiment.is_file():
        return path, {"base": file}
    if path.is_file():
        return path, read_toml(path)
    sweeps, experiments = ([known.stem for known in folder.glob("*.toml")] for folder in (SWEEPS, EXPERIMENTS))
    hint = suggestion(file, [*sweeps, *experiments])
    raise ConfigError(f"There is no sweep or experiment {file!r}.{hint} The sweeps are: {', '.join(sorted(sweeps))}.")


def _axes(grid: Mapping[str, Any], path: str = "") -> dict[str, Axis]:
    """The axes in a tree of tables: its lists, by their dotted keys."""
    found: dict[str, Axis] = {}
    for name, entry in grid.items():
        if isinstance(entry, Mapping):
            found |= _axes(entry, f"{path}{name}.")
        elif isinstance(entry, list) and entry:
            found[path + name] = _axis(path + name, entry)
        else:
            raise ConfigError(f"`grid.{path}{name}` must be a list of values, got {entry!r}.")
    return found


def _axis(key: str, values: Sequence[Any]) -> Axis:
    """The values of the axis of a key."""
    found: dict[str, Mapping[str, Any]] = {}
    for value in values:
        table: dict[str, Any] = {}
        if isinstance(value, Mapping):
            if not isinstance(value.get("label"), str):
                raise ConfigError(f"A table in `grid.{key}` needs a `label`, got {dict(value)}.")
            label, table = value["label"], {name: entry for name, entry in value.items() if name != "label"}
        else:
            label = str(value)
            put(table, key, written(value) if isinstance(value, Written) else value)
        if label in found:
            raise ConfigError(f"`grid.{key}` has the value {label} twice.")
        found[label] = table
    return found


def _split(text: str) -> list[str]:
    """The parts between commas that are in no bracket, nor in a value that begins with a quotation mark."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote or (character in "\"'" and not parts[-1].strip()):
            quote = "" if character == quote else quote or character
        else:
            depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


@final
@dataclasses.dataclass(frozen=True)
class CellResult:
    """What became of a cell."""

    name: str
    values: Mapping[str, str]
    epochs: int  # trained so far
    seconds: float  # of training
    validation: float | None  # best accuracy on held-out images
    test: float | None  # accuracy on the test images
    problem: str  # why it failed; empty if it did not


@final
@dataclasses.dataclass(frozen=True)
class Point:
    """A point of the grid: accuracy over its seeds."""

    values: Mapping[str, str]
    seeds: int
    mean: float
    std: float | None  # with n − 1; None of one seed


@final
@dataclasses.dataclass(frozen=True)
class SweepResult:
    """Every cell of a sweep, and accuracy over the seeds by point: on test images if all finished cells have it."""

    name: str
    split: Literal["test", "validation"]
    axes: Mapping[str, Sequence[str]]  # of several values, the seed left out
    points: Sequence[Point]
    cells: Sequence[CellResult]


def run_sweep(sweep: Sweep, folder: Path, *, test: bool = False, loggers: Loggers = lambda folder: ()) -> SweepResult:
    """Train every cell that is not finished, each in its folder under `folder`; writes sweep.json and sweep.svg there.

    With `test` each is evaluated on the test images. `Stopped` (Ctrl-C) ends the sweep, which goes on when called
    again; a grid of which no cell can be configured is the `ConfigError` of the first, and one whose cells all hold
    runs of other settings, or damaged ones, a `TrainingError`."""
    if os.environ.get("WORLD_SIZE", "1") != "1":  # each process would look at files that another is still writing
        raise ConfigError("A sweep runs in one process: start it without torchrun.")
    planned = _plan(sweep)
    if all(config is None for _, config, _ in planned):
        raise ConfigError(planned[0][2])
    cells = [_look(folder, *entry) for entry in planned]
    if all(cell.problem for cell in cells):  # sweep.json is of other runs, and stays
        raise TrainingError(cells[0].problem)
    folder.mkdir(parents=True, exist_ok=True)
    for place, (cell, config, _) in enumerate(planned):
        if config is None:
            continue
        problem = _train_cell(config, folder / cell.name, test, loggers)
        cells[place] = _look(folder, cell, config, problem)
        result = _gather(sweep, cells)
        write_json(folder / "sweep.json", dataclasses.asdict(result))
    if result.points:
        write_atomically(folder / "sweep.svg", draw(result).svg)
    return result


def _plan(sweep: Sweep) -> list[tuple[Cell, Config | None, str]]:
    """Each cell with its configuration, or the sentence that says why it has none."""
    planned: list[tuple[Cell, Config | None, str]] = []
    for cell in sweep.cells():
        try:
            planned.append((cell, sweep.config(cell), ""))
        except ConfigError as error:
            planned.append((cell, None, str(error)))
    return planned


def _train_cell(config: Config, path: Path, test: bool, loggers: Loggers) -> str:
    """Train and evaluate what has not been; the sentence that says why that failed, empty if it did not."""
    run = Run(path)
    try:
        if run.exists:
            run.check_same(config)
        last, epochs = run.checkpoint("last"), config.training.epochs
        behind = read_facts(last).get("epoch", epochs) < epochs  # killed between the last row and its checkpoint
        if behind or not _finished(run, epochs) or not (last.exists() or run.finished):
            if config.training.compile:
                torch.compiler.reset()  # or the limit on recompilations would count the cells before
            train(config, path, resume=True, loggers=loggers(path))
            if not _finished(run, epochs):
                return (
                    f"{path / 'metrics.jsonl'} has no row of epoch {epochs}, the last: put it back, or remove the run."
                )
        if test and not run.test():
            evaluate(path, device=config.device)
    except Stopped:
        raise
    except (DataError, TrainingError, ValueError) as error:  # sentences for people
        return str(error)
    except Exception as error:  # whatever happened to this cell, the others are worth their results
        return f"{type(error).__name__}: {error}"
    return ""


def _finished(run: Run, epochs: int) -> bool:
    return any(row["epoch"] == epochs for row in run.rows())


def collect(sweep: Sweep, folder: Path) -> SweepResult:
    """What the run folders of a sweep hold now; nothing is trained."""
    return _gather(sweep, [_look(folder, *entry) for entry in _plan(sweep)])


def _look(folder: Path, cell: Cell, config: Config | None, problem: str) -> CellResult:
    """What the run folder of a cell holds now; one that is damaged, or of other settings, is a problem of its own."""
    run = Run(folder / cell.name)
    validation = accuracy = None
    try:
        if config is not None and not problem and run.exists:
            run.check_same(config)
            if _finished(run, config.training.epochs):
                validation, accuracy = run.best_accuracy(), run.test().get("accuracy")
    except TrainingError as error:
        problem = str(error)
    return CellResult(cell.name, cell.values, len(run.rows()), run.seconds(), validation, accuracy, problem)


def _gather(sweep: Sweep, results: Sequence[CellResult]) -> SweepResult:
    """The cells, and the accuracy of those that are finished, by point."""
    finished = [result for result in results if result.validation is not None or result.test is not None]
    tested = bool(finished) and all(result.test is not None for result in finished)
    groups: dict[tuple[str, ...], list[float]] = {}
    axes = {axis: list(values) for axis, values in sweep.axes.items() if axis != "seed" and len(values) > 1}
    for result in finished:
        value = result.test if tested else result.validation
        if value is not None:
            groups.setdefault(tuple(result.values[axis] for axis in axes), []).append(value)
    points = [Point(dict(zip(axes, key, strict=True)), len(found), *spread(found)) for key, found in groups.items()]
    return SweepResult(sweep.name, "test" if tested else "validation", axes, points, results)


def draw(result: SweepResult) -> Canvas:
    """Accuracy against the axis of the most values, ± one standard deviation over the seeds; the others are lines."""
    across = max(result.axes, key=lambda axis: len(result.axes[axis]), default="")
    labels = list(result.axes.get(across, [""]))
    places: list[float] = []
    with suppress(ValueError):
        places = [float(label) for label in labels]
    scaled = len(places) > 0
    where = dict(zip(labels, places if scaled else map(float, range(len(labels))), strict=True))
    lines: dict[str, list[Point]] = {}
    for point in result.points:
        rest = ", ".join(value for axis, value in point.values.items() if axis != across)
        lines.setdefault(rest, []).append(point)
    seeds = max((point.seeds for point in result.points), default=1)
    with open_canvas(3.6, width=6) as canvas:
        (axes,) = canvas.axes
        for place, (name, points) in enumerate(lines.items()):
            points.sort(key=lambda point: where[point.values.get(across, "")])  # or the line would go to and fro
            axes.errorbar(
                [where[point.values.get(across, "")] for point in points],
                [100 * point.mean for point in points],
                [100 * (point.std or 0.0) for point in points],
                color=COLOURS[place % len(COLOURS)],
                label=clean(name),
                marker="o",
                capsize=3,
                linestyle="-" if scaled else "none",
            )
        if scaled and min(places) > 0 and max(places) >= 8 * min(places):
            axes.set_xscale("log")
            axes.minorticks_off()
        axes.set_xticks(list(where.values()), labels)
        axes.tick_params("x", rotation=0 if scaled else 20)
        axes.set(xlabel=across, ylabel=f"{result.split} accuracy in %" + (f", {seeds} seeds" if seeds > 1 else ""))
    return canvas
