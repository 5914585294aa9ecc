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

Finished cells are skipped, killed ones continue, and one that fails says why and lets the others run.
"""

import dataclasses
import functools
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, final

import torch
from rich.table import Column, Table

from ..settings import Override, read_override, suggestion
from .console import numbers, plain
from .data import DataError
from .evaluate import evaluate
from .evaluate.scores import spread
from .report.figures import COLOURS, Canvas, clean, open_canvas
from .run import Run, Stopped, TrainingError, write_atomically
from .run.config import EXPERIMENTS, Config, ConfigError, check, overlay, put, read_toml, resolve
from .run.files import write_json
from .training import AbstractLogger, train

SWEEPS = EXPERIMENTS / "sweeps"  # those that come with the package
AWKWARD = re.compile(r"[^\w.,+-]+")  # in the name of a folder
Axis = Mapping[str, Mapping[str, Any]]  # by the label of each value, the table of settings it stands for
Loggers = Callable[[Path], Sequence[AbstractLogger]]  # of the run in a folder


@final
@dataclasses.dataclass(frozen=True)
class Cell:
    """A point of the grid with one seed."""

    name: str  # of its run folder
    values: Mapping[str, str]  # by axis; axes of one value are left out
    tables: Sequence[Mapping[str, Any]]  # of settings, each laid over the last
    folder: Path  # from which a `base` in them is looked for

    @functools.cached_property
    def config(self) -> Config:
        """The configuration, checked as `kerneq train` checks it."""
        config = resolve(self.tables, self.folder)
        check(config)
        return config


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
        cells: list[Cell] = []
        ends = [axis.removesuffix(".name").rpartition(".")[2] for axis in self.axes]
        short = {axis: end if ends.count(end) == 1 else axis for axis, end in zip(self.axes, ends, strict=True)}
        for labels in itertools.product(*self.axes.values()):
            chosen = dict(zip(self.axes, labels, strict=True))
            settings: dict[str, Any] = {}
            for axis, label in chosen.items():
                settings = overlay(settings, self.axes[axis][label])
            values = {axis: label for axis, label in chosen.items() if len(self.axes[axis]) > 1}
            parts = (f"{short[axis]}={AWKWARD.sub('-', label).strip('-')}" for axis, label in values.items())
            cells.append(Cell(",".join(parts), values, (self.table, settings), self.folder))
        if len({cell.name for cell in cells}) < len(cells):
            raise ConfigError("Two cells of the grid have the same labels: give their values a `label` each.")
        return cells


def load_sweep(file: str, changes: Sequence[str] = ()) -> Sweep:
    """A sweep of the package by its name, a file with a [grid], or any experiment, over the values of `key=a,b,c`.

    A change replaces the axis of its key; one of a single value is a setting of all cells."""
    path, table = _find_sweep(file)
    grid = table.pop("grid", {})
    axes = _axes(grid) if isinstance(grid, Mapping) else {}
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"An axis is written key=a,b,c (for example seed=0,1,2), got `{change}`.")
        axes[key.strip()] = _axis(key.strip(), [Override(part) for part in _split(text)])
    if not any(len(values) > 1 for values in axes.values()):
        raise ConfigError(f"{file} has no [grid] of several values: say what to vary, for example seed=0,1,2.")
    if "seed" in axes:  # fastest, so that a sweep that is cut short has whole points
        axes["seed"] = axes.pop("seed")
    return Sweep(path.name.removesuffix(".toml"), table, path.parent, axes)


def _find_sweep(file: str) -> tuple[Path, dict[str, Any]]:
    """Where a sweep is, and its table; an experiment of the package is the `base` of an empty one."""
    path = Path(file)
    sweeps, experiments = ([known.stem for known in folder.glob("*.toml")] for folder in (SWEEPS, EXPERIMENTS))
    if file in sweeps:
        path = SWEEPS / f"{file}.toml"
    elif file in experiments:
        return path, {"base": file}
    if path.is_file() or path.name != file or file.endswith(".toml"):
        return path, read_toml(path)
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
            put(table, key, read_override(value) if isinstance(value, Override) else value)
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
    """What the run folder of a cell holds; it is finished where it has an accuracy."""

    name: str
    values: Mapping[str, str]
    epochs: int  # trained so far
    seconds: float  # of training
    validation: float | None  # best accuracy on held-out images; like `test`, of finished cells only
    test: float | None  # accuracy on the test images
    problem: str  # why it failed; empty if it did not


@final
@dataclasses.dataclass(frozen=True)
class GridPoint:
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
    points: Sequence[GridPoint]
    cells: Sequence[CellResult]

    def table(self) -> Table:
        """The accuracy of each run, with a dash where there is none."""
        columns = Column("run", overflow="fold"), *numbers("epochs", "seconds", "validation", "test")
        table = Table(*columns, title=plain(f"{self.name}: accuracy of each run"))
        for cell in self.cells:
            shares = [f"{value:.2%}" if value is not None else "–" for value in (cell.validation, cell.test)]
            table.add_row(plain(cell.name), f"{cell.epochs}", f"{cell.seconds:.1f}", *shares)
        return table

    def summary(self) -> list[str]:
        """A sentence for each point: its mean accuracy ± standard deviation."""
        sentences = []
        for point in self.points:
            spread = f" ± {point.std:.2%}" if point.std is not None else ""
            where = ", ".join(f"{axis} = {value}" for axis, value in point.values.items())
            sentences.append(f"{where or self.name}: {point.mean:.2%}{spread} ({self.split}, seeds: {point.seeds})")
        return sentences


def run_sweep(sweep: Sweep, folder: Path, *, test: bool = False, loggers: Loggers = lambda folder: ()) -> SweepResult:
    """Train every cell that is not finished, each in its folder under `folder`; writes sweep.json and sweep.svg there.

    With `test` each is evaluated on the test images. `Stopped` (Ctrl-C) ends the sweep, which continues when called
    again. Where every cell has a problem, the first is raised, as a `ConfigError` or a `TrainingError`."""
    if os.environ.get("WORLD_SIZE", "1") != "1":  # each process would look at files that another is still writing
        raise ConfigError("A sweep runs in one process: start it without torchrun.")
    cells = sweep.cells()
    results = [_read_cell(cell, folder) for cell in cells]
    if all(result.problem for result in results):  # sweep.json is of other runs, and stays
        _ = cells[0].config  # raises its ConfigError, if that is the problem
        raise TrainingError(results[0].problem)
    folder.mkdir(parents=True, exist_ok=True)
    for place, cell in enumerate(cells):
        problem = _train_cell(cell, Run(folder / cell.name), test, loggers)
        results[place] = _read_cell(cell, folder, problem)
        result = _summarize(sweep, results)
        write_json(folder / "sweep.json", dataclasses.asdict(result))
    if result.points:
        write_atomically(folder / "sweep.svg", draw(result).svg)
    return result


def _train_cell(cell: Cell, run: Run, test: bool, loggers: Loggers) -> str:
    """Train and evaluate a cell as far as it is not done; returns why that failed, empty if it did not."""
    try:
        config = cell.config
        if run.exists:
            run.check_same(config)
        if not run.finished:
            if config.training.compile:
                torch.compiler.reset()  # or the limit on recompilations would count the cells before
            train(config, run.path, resume=True, loggers=loggers(run.path))
        if not run.rows():
            return f"{run.path / 'metrics.jsonl'} has no row of epoch 1: put it back, or remove the run."
        if test and not run.test():
            evaluate(run.path, device=config.device)
    except Stopped:
        raise
    except (DataError, TrainingError, ValueError) as error:  # sentences for people
        return str(error)
    except Exception as error:  # also a bug in this cell does not end the others
        return f"{type(error).__name__}: {error}"
    return ""


def collect(sweep: Sweep, folder: Path) -> SweepResult:
    """What the run folders of a sweep hold now; nothing is trained."""
    return _summarize(sweep, [_read_cell(cell, folder) for cell in sweep.cells()])


def _read_cell(cell: Cell, folder: Path, problem: str = "") -> CellResult:
    """What the run folder of a cell holds now; one that is damaged, or of other settings, is a problem of its own."""
    run = Run(folder / cell.name)
    validation = test = None
    try:
        config = cell.config
        if run.exists and not problem:
            run.check_same(config)
            if run.finished:
                validation, test = run.best_accuracy(), run.test().get("accuracy")
    except (ConfigError, TrainingError) as error:
        problem = problem or str(error)
    return CellResult(cell.name, cell.values, len(run.rows()), run.seconds(), validation, test, problem)


def _summarize(sweep: Sweep, cells: Sequence[CellResult]) -> SweepResult:
    """The cells, and the accuracy of those that are finished, by point."""
    finished = [cell for cell in cells if (cell.validation, cell.test) != (None, None)]
    tested = bool(finished) and all(cell.test is not None for cell in finished)
    axes = {axis: list(values) for axis, values in sweep.axes.items() if axis != "seed" and len(values) > 1}
    groups: dict[tuple[str, ...], list[float]] = {}
    for cell in finished:
        accuracy = cell.test if tested else cell.validation
        if accuracy is not None:
            groups.setdefault(tuple(cell.values[axis] for axis in axes), []).append(accuracy)
    points = [GridPoint(dict(zip(axes, key, strict=True)), len(found), *spread(found)) for key, found in groups.items()]
    return SweepResult(sweep.name, "test" if tested else "validation", axes, points, cells)


def draw(result: SweepResult) -> Canvas:
    """Accuracy against the axis of the most values, ± one standard deviation over the seeds; the others are lines."""
    across = max(result.axes, key=lambda axis: len(result.axes[axis]), default="")
    labels = result.axes.get(across, [""])
    where, scaled = _place(labels)
    seeds = max((point.seeds for point in result.points), default=1)
    lines: dict[str, list[GridPoint]] = {}  # the points that differ in the value of the axis `across` only
    for point in result.points:
        name = ", ".join(value for axis, value in point.values.items() if axis != across)
        lines.setdefault(name, []).append(point)
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
        if scaled and min(where.values()) > 0 and max(where.values()) >= 8 * min(where.values()):
            axes.set_xscale("log")
            axes.minorticks_off()
        axes.set_xticks(list(where.values()), labels)
        axes.tick_params("x", rotation=0 if scaled else 20)
        axes.set(xlabel=across, ylabel=f"{result.split} accuracy in %" + (f", {seeds} seeds" if seeds > 1 else ""))
    return canvas


def _place(labels: Sequence[str]) -> tuple[dict[str, float], bool]:
    """Where each value of an axis is drawn: at its number if all are numbers (then True), else one beside the other."""
    try:
        return {label: float(label) for label in labels}, True
    except ValueError:
        return {label: float(place) for place, label in enumerate(labels)}, False
