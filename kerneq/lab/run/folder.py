"""The folder of a run: training writes it, so that a kill loses nothing; everything else reads it."""

import dataclasses
import html
import io
import json
import os
import shutil
import sys
import time
import tomllib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from ...loading import (
    FREE,
    CheckpointError,
    TrainingError,
    check_settings,
    config_file,
    find_folder,
    read_checkpoint,
    read_small,
    read_weights,
)
from ..console import printable
from ..data import Images, fingerprint
from . import checkpoint
from .config import Config, ConfigError, differences, load, write
from .files import read_json, to_json, wait_for_lock, write_atomically, write_json
from .origin import machine

_WAYS = ("compile", "graph", "channels_last", "deterministic", "validate_epochs")
INCIDENTAL = (*FREE, "data.memory", *(f"training.{name}" for name in _WAYS))  # how it is computed, not what it learns

ROW: Mapping[str, Any] = {  # a line of metrics.jsonl; the values in its tables are numbers, or None
    "epoch": int,
    "step": int,
    "seconds": int | float,
    "train": dict,
    "validation": dict | None,
    "diagnostics": dict,
}


@final
@dataclasses.dataclass(frozen=True)
class Run:
    """A run by its folder, which need not exist yet.

    config.toml         every setting; a folder without this file is no run
    classes.json        the names of the classes, by label; mean, std and size of the pictures
    environment.json    where it came from, and every resumption
    metrics.jsonl       one line for each epoch
    checkpoints/        last, previous and best .safetensors
    evaluation.json     scores on the test images, once it has been evaluated
    evaluation/         other parts of an evaluation, PART.json, and pictures
    tensorboard/, lock  curves, and which process is using the folder

    Scores map the names of `training.metrics` to numbers; one that was not measured is None or absent, as in the
    folders of earlier versions.
    """

    path: Path

    # What the run is.

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.path.resolve().name

    @property
    def exists(self) -> bool:
        """Whether a run has been started in this folder."""
        return (self.path / "config.toml").exists()

    def config(self) -> Config:
        """The settings of an existing run; a folder that is none is a `TrainingError`."""
        return load(config_file(self.path))

    def environment(self) -> dict[str, Any]:
        """Where the run came from, as in environment.json; empty if it was not recorded, or is damaged."""
        found = read_json(self.path / "environment.json", needed=False)
        starts, images = found.get("resumed", []), found.get("images", [])
        whole = isinstance(starts, list) and all(isinstance(start, dict) for start in starts)
        whole = whole and isinstance(images, list) and all(isinstance(count, int) for count in images)
        return found if whole else {}

    def classes(self) -> tuple[str, ...]:
        """The names of the classes it was trained on, by label; empty if they were not stored, or are damaged."""
        names = read_json(self.path / "classes.json", needed=False).get("classes")
        return tuple(map(str, names)) if isinstance(names, list) else ()

    def counts(self) -> tuple[int, ...]:
        """How many training images each class had when the run was started; empty if that was not recorded."""
        return tuple(self.environment().get("images", ()))

    def renamed(self) -> bool:
        """Whether its folder of pictures has other names in it than when the run was started, if that was recorded.

        The names decide what is tested, and their order what is held out.
        """
        names = self.environment().get("names")
        return names is not None and names != fingerprint(self.config().data.name)

    @property
    def finished(self) -> bool:
        """Whether its training is known to have come to its end; earlier versions did not write that down."""
        environment = self.environment()
        return "seconds" in (environment.get("resumed") or [environment])[-1]

    # What training measured and saved.

    def rows(self) -> list[dict[str, Any]]:
        """The metrics of each completed epoch, as in metrics.jsonl; a line that is damaged is left out."""
        return [row for row in self._lines() if row is not None]

    def _lines(self) -> list[dict[str, Any] | None]:
        """Every line of metrics.jsonl, None where it is not the row of an epoch."""
        lines: list[bytes] = []
        with suppress(FileNotFoundError):
            lines = read_small(self.path / "metrics.jsonl").splitlines()
        return [_read_row(line) for line in lines]

    def seconds(self) -> float:
        """Time spent training, validation left out."""
        return float(sum(row["seconds"] for row in self.rows()))

    def best_accuracy(self) -> float | None:
        """The best accuracy on held-out images among the epochs of the run; None if nothing was held out."""
        found = [(row["validation"] or {}).get("accuracy") for row in self.rows()]
        return max((accuracy for accuracy in found if accuracy is not None), default=None)

    def checkpoint(self, which: str) -> Path:
        """The file of the `last`, `previous` or `best` checkpoint."""
        return self.path / "checkpoints" / f"{which}.safetensors"

    def trained_weights(self, which: str) -> tuple[dict[str, Tensor], int, int | None]:
        """The best or last weights by name, their epoch, and their step (None where that was not written down).

        Those of other settings than config.toml's are refused.
        """
        path, weights, facts = read_weights(self.path, which)
        check_settings(path, facts, tomllib.loads(write(self.config())))
        return weights, int(facts["epoch"]), facts.get("step")

    # What evaluation measured.

    def test(self) -> Mapping[str, Any]:
        """Scores on the test images; empty if the run was not evaluated."""
        return self.evaluation().get("scores", {}).get("test", {})

    def evaluation(self) -> dict[str, Any]:
        """The scores on the test images and what they belong to, as `part` gives them."""
        return self.part("scores")

    def part(self, name: str) -> dict[str, Any]:
        """A part of the evaluation by its name in `kerneq.lab.evaluate.PARTS`; empty if it was not measured.

        What was measured before the training went on and changed the weights is not counted, and a warning says so.
        """
        path = self.path / _part(name)
        found = read_json(path)
        which = str(found.get("checkpoint"))
        facts = found | checkpoint.read_facts(self.checkpoint(which))  # not all say of which step they are
        keys = ("epoch",) if found.get("step") is None else ("epoch", "step")  # earlier versions wrote no step
        then, now = (", ".join(f"{key} {table.get(key)}" for key in keys) for table in (found, facts))
        if now == then and name == "scores" and not _is_evaluation(found):
            raise TrainingError(f"{path} is damaged: evaluate the run again.")
        if now == then:
            return found
        warnings.warn(
            f"{path} is of the weights of {then}, and the {which} ones are of {now} now: it does not "
            "count; evaluate the run again.",
            stacklevel=1,
        )
        return {}

    def _repr_html_(self) -> str:
        """The run for a notebook: what it is, what it reached, and its curves."""
        import matplotlib.pyplot as plt  # slow to import, and only notebooks ask for it

        from ..plot import curves

        rows, cells, drawing = self.rows(), {"run": printable(str(self.path))}, io.StringIO()
        if self.exists:
            config = self.config()
            cells |= {"model": config.model.name, "data": config.data.described}
            cells["epochs"] = f"{len(rows)} of {config.training.epochs}"
        for words, accuracy in (("best, held-out", self.best_accuracy()), ("test", self.test().get("accuracy"))):
            cells |= {} if accuracy is None else {f"accuracy ({words} images)": f"{accuracy:.2%}"}
        if rows:
            with plt.ioff():
                curves(rows)
                plt.savefig(drawing, format="svg")
                plt.close()
        lines = (f"<tr><th>{name}</th><td>{html.escape(text)}</td></tr>" for name, text in cells.items())
        svg = drawing.getvalue()
        return f"<div><table>{''.join(lines)}</table>{svg[svg.find('<svg') :]}</div>"

    def write_part(self, name: str, table: Mapping[str, Any]) -> str:
        """Write a part of the evaluation, atomically; returns the file's name in the folder."""
        write_json(self.path / _part(name), table)
        return _part(name)

    def write_picture(self, name: str, png: bytes) -> str:
        """Write evaluation/NAME.png, atomically; returns the file's name in the folder."""
        write_atomically(self.path / "evaluation" / f"{name}.png", png)
        return f"evaluation/{name}.png"

    # Training, in the order of a run.

    @contextmanager
    def locked(self, patience: float = 0.0) -> Iterator[None]:
        """Hold the folder for this process; the lock dies with it, however it dies.

        A folder that was made for it and in which no run began is taken away again.
        """
        folders = (self.path / "checkpoints", self.path, *self.path.parents)
        try:
            made = [folder for folder in folders if not folder.exists()]
            folders[0].mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW  # a link might lead to another file
            file = os.fdopen(os.open(self.path / "lock", flags, 0o644), "r+", encoding="utf-8")
        except OSError as error:
            raise TrainingError(f"The run folder {self.path} cannot be used: {error.strerror}.") from None
        # A worker of a data loader, which may live on for seconds after a kill, would hold the lock with its parent.
        os.register_at_fork(after_in_child=file.close)
        with file:
            wait_for_lock(file, self.path, patience)
            try:
                yield
            finally:
                if made and not self.exists:
                    (self.path / "lock").unlink(missing_ok=True)
                    with suppress(OSError):  # what is not empty stays
                        for folder in made:
                            folder.rmdir()

    def find_start(
        self, config: Config, classes: Sequence[str], counts: Sequence[int], resume: bool
    ) -> tuple[bool, Path | None]:
        """Whether a run was begun here, and the checkpoint to continue from, if there is one.

        Refuse a folder that holds another run or something else, or a run that is not to be resumed. `counts` are the
        training images of each class, those held out among them.
        """
        newest, best, rows = self.newest(), self.checkpoint("best"), self.rows()
        if newest is None and not best.exists() and not rows:
            for file in (self.path / name for name in ("config.toml", "metrics.jsonl")):
                if not self.environment() and file.exists() and file.stat().st_size:
                    raise TrainingError(f"{file} is of no run, and would be overwritten: choose another --name.")
            return False, None
        if not resume:
            raise TrainingError(
                f"{self.path} already holds a run; add --resume (resume=True) to continue it, or --name for another."
            )
        self.check_same(config)
        self._check_images(classes, counts)
        if newest is not None:
            if facts := checkpoint.read_facts(newest):  # a damaged one is for those who restore it to refuse
                check_settings(newest, facts, tomllib.loads(write(config)))
        elif best.exists() and (self.finished or len(rows) > self.config().training.checkpoint_epochs):
            # One that was killed before its first checkpoint has no more epochs than lie between two, and repeats them.
            raise TrainingError(
                f"{self.path} has its best weights of {len(rows)} epochs, but no last checkpoint to go on from: it "
                "would begin anew and overwrite them. Start again under another --name."
            )
        return True, newest

    def newest(self) -> Path | None:
        """The checkpoint to continue from: the last, or the previous where somebody removed that."""
        return next((p for p in (self.checkpoint(which) for which in ("last", "previous")) if p.exists()), None)

    def check_same(self, config: Config) -> None:
        """Refuse other settings than the run's: continued with them, it would be neither the old run nor a new one."""
        if not self.exists:
            raise TrainingError(
                f"{self.path} holds checkpoints or metrics, but no config.toml that says of what: put it back, or take "
                "another --name."
            )
        try:
            before = self.config()
        except ConfigError as error:
            raise TrainingError(f"The run cannot be continued: {error}") from None
        changed = [key for key in differences(before, config) if key not in FREE]
        if changed:
            raise TrainingError(
                f"{self.path} was started with another value of {', '.join(f'`{key}`' for key in changed)}; "
                "resume it with the settings in its config.toml, or choose another --name."
            )

    def _check_images(self, classes: Sequence[str], counts: Sequence[int]) -> None:
        """Refuse other training images than those the run was started on.

        Other classes, or another order, are not what the labels of the weights stand for; with other numbers of images
        (`counts`, by class) or other names, others are held out, and some of those have been trained on.
        """
        numbers = zip(classes, self.counts() or counts, counts, strict=False)
        changed = [(name, then, now) for name, then, now in numbers if then != now]
        if self.classes() not in ((), tuple(classes)):
            then_and_now = f"the classes {', '.join(self.classes())}, and its data set now has {', '.join(classes)}"
        elif changed:
            name, then, now = changed[0]
            then_and_now = f"{then} training images of the class {name}, and its data set now has {now}"
        elif self.renamed():
            then_and_now = "training pictures of other names"
        else:
            return
        raise TrainingError(
            f"{self.path} was started on {then_and_now}: bring them back, or start again under another --name."
        )

    def advice(self, damaged: Path) -> str:
        """What to do about a checkpoint that does not load."""
        for which in ("previous", "best"):
            file = self.checkpoint(which)
            with suppress(CheckpointError):
                step = read_checkpoint(file)[1]["step"]
                if which == "previous" and damaged != file:
                    return f"Remove it to continue from {file}, which is whole (step {step})."
                return f"{file} is whole and can be evaluated."
        return "No other checkpoint of this run is whole; start again under another --name."

    def begin(
        self,
        config: Config,
        images: Images,
        counts: Sequence[int],
        device: torch.device,
        processes: int,
        epoch: int,
        step: int,
    ) -> None:
        """Write down this start of the run, from its beginning (step 0) or from where a checkpoint left it."""
        self._repair(epoch)
        about = {"mean": list(images.mean), "std": list(images.std), "size": images.shape[2]}
        write_json(self.path / "classes.json", {"classes": list(images.classes), **about})
        origin = {
            **machine(device),
            "processes": processes,
            "seed": config.seed,
            "images": list(counts),
            "names": fingerprint(config.data.name),
            "command": sys.argv,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        written: dict[str, Any] = {**origin, "resumed": []}
        if step > 0:
            before = self.environment()
            if "resumed" not in before:
                warnings.warn(f"{self.path / 'environment.json'} was missing or damaged: begun anew.", stacklevel=2)
                before = written
            written = {**before, "resumed": [*before["resumed"], {**origin, "step": step}]}
        write_json(self.path / "environment.json", written)
        write_atomically(self.path / "config.toml", write(config).encode())  # last: with it the folder is a run

    def _repair(self, epoch: int) -> None:
        """Remove what a kill left half written, and forget the metrics past `epoch`, which is trained again."""
        ours = ("checkpoints/.*", ".config.toml.*", ".metrics.jsonl.*", ".classes.json.*", ".environment.json.*")
        for name in ours:
            for stray in self.path.glob(f"{name}.tmp"):  # who holds the lock writes them
                stray.unlink(missing_ok=True)
        lines = self._lines()
        damaged = [str(number) for number, row in enumerate(lines, start=1) if row is None]
        if damaged:
            path = self.path / "metrics.jsonl"
            warnings.warn(f"{path}: skipped what is no row of metrics, line {', '.join(damaged)}.", stacklevel=3)
        self._write_rows([row for row in lines if row is not None and row["epoch"] <= epoch])

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Add the metrics of an epoch; they are on the disk when this returns.

        A folder that was moved or deleted meanwhile is not made again: without its settings it would be no run.
        """
        if not self.exists:
            raise TrainingError(
                f"{self.path} was moved or deleted while its run went on: the run ends here. What was saved before "
                "goes on with --resume from where it is now."
            )
        self._write_rows([*self.rows(), row])

    def _write_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        write_atomically(self.path / "metrics.jsonl", "".join(to_json(row) + "\n" for row in rows).encode())

    def save(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Make this the last checkpoint and keep the one before it; at every moment there is a last one."""
        last, previous = self.checkpoint("last"), self.checkpoint("previous")
        if last.exists():
            previous.unlink(missing_ok=True)
            try:
                os.link(last, previous)
            except OSError:  # a file system without links
                shutil.copyfile(last, previous)
        checkpoint.save(last, tensors, facts)

    def finish(self, seconds: Mapping[str, float]) -> None:
        """Write down where the time of this start of the run went."""
        written = self.environment()
        (written.get("resumed") or [written])[-1]["seconds"] = {name: round(s, 3) for name, s in seconds.items()}
        write_json(self.path / "environment.json", written)


def _part(name: str) -> str:
    """The file of a part of an evaluation, in the run's folder."""
    return "evaluation.json" if name == "scores" else f"evaluation/{name}.json"


def _read_row(line: bytes) -> dict[str, Any] | None:
    """The metrics of an epoch, None where the line holds something else."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    row.setdefault("validation", None)
    row.setdefault("diagnostics", {})
    if not all(isinstance(row.get(key), kind) for key, kind in ROW.items()):
        return None
    numbers = [value for key in ("train", "validation", "diagnostics") for value in (row[key] or {}).values()]
    return row if all(isinstance(value, int | float | None) for value in numbers) else None


def _is_evaluation(found: Mapping[str, Any]) -> bool:
    """Whether the tables of an evaluation.json are tables, with scores in them."""
    scores = found.get("scores", {})
    tables = [scores, *(found.get(key) or {} for key in ("classification", "calibration", "scaled"))]
    whole = all(isinstance(table, dict) for table in tables) and isinstance(found.get("parameters"), int | None)
    return whole and all(_are_scores(each) for each in scores.values())


def _are_scores(found: Any) -> bool:
    """Whether these are metrics of some images: numbers, the accuracy a share of them."""
    if not isinstance(found, dict) or not all(isinstance(value, int | float | None) for value in found.values()):
        return False
    return 0 <= (found.get("accuracy") or 0) <= 1 and (found.get("images") or 0) >= 0


def find_run(name: Path | str) -> Run:
    """The run in a folder, or the one that ships under this name; a folder of one's own goes first."""
    return Run(find_folder(name))


def find_runs(paths: Sequence[Path | str]) -> list[Run]:
    """The runs in some folders, each of which is one or holds some, or that ship under these names.

    In the order of `paths`, then of the names; a folder without any is a `TrainingError`.
    """
    found: dict[Path, Run] = {}
    for path in (find_run(path).path for path in paths):
        if not path.is_dir():
            raise TrainingError(f"{path} is not a run folder: it has no config.toml. kerneq train makes one.")
        runs = _list_runs(path)
        found |= {run.path.resolve(): run for run in runs if run.path.resolve() not in found}
        if not runs:
            raise TrainingError(f"{path} holds no run: neither it nor a folder in it has a config.toml.")
    return list(found.values())


def _list_runs(folder: Path) -> list[Run]:
    """The run that is this folder, and those up to three folders below it, by name; without hidden folders.

    A sweep may lie in the folder of the run that it was named after. What may not be entered is passed over.
    """
    found = []
    for path in [folder, *sorted(inner for depth in (1, 2, 3) for inner in folder.glob("*/" * depth))]:
        with suppress(OSError):
            if Run(path).exists and not any(part.startswith(".") for part in path.relative_to(folder).parts):
                found.append(Run(path))
    return found
