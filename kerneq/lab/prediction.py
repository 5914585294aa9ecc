"""Predictions of a trained run for picture files that are not in its data set, as a table, CSV and JSON."""

import csv
import dataclasses
import io
import math
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, final

import torch
from rich import box
from rich.progress import Progress
from rich.table import Column, Table
from rich.text import Text
from torch import Tensor

from ..certificates import certify
from ..models.classifier import AbstractModel
from ..solution import Solution, Status
from ..tensors import check_whole
from .console import numbers, plain, printable
from .data import SUFFIXES, DataError, Images, decode, grey, pictures_in
from .evaluate import NotApplicableError, TrainedRun, check_certifiable
from .evaluate.saliency import contact_sheet, map_each
from .evaluate.scores import FEWEST
from .evaluate.sheet import png
from .run import files
from .run.config import ConfigError

SHOWN = 16  # pictures on the sheet that `draw_maps` makes
PROVED = (
    "No change of the pixels, in [0, 1], that is shorter (ℓ2) than its radius changes a picture's class: proved, for "
    "equilibria solved exactly."
)
TOGETHER = 256  # picture files that `predict_files` has in memory at once


@final
@dataclasses.dataclass(frozen=True)
class Prediction:
    """The likeliest classes, best first. With several equilibrium layers, the worst of each number.

    `status`, `steps` and `residual` are None for a model without an equilibrium.
    """

    path: Path
    classes: tuple[str, ...]
    probabilities: tuple[float, ...]
    status: Status | None
    steps: int | None  # of the layer that took the most
    residual: float | None  # ‖f(z) − z‖ / ‖f(z)‖ of the layer that is furthest from its equilibrium
    radius: float | None = None  # ℓ2, for pixels in [0, 1]: nearer pictures provably have this class; if asked for
    known: bool | None = None  # whether it is as confident as the threshold wants; None without one
    labels: tuple[int, ...] = dataclasses.field(kw_only=True)  # of the classes, two of which may show the same name

    @property
    def converged(self) -> bool:
        """Whether the prediction comes from equilibria that were found (or from a model that has none)."""
        return self.status in (None, Status.CONVERGED)

    def row(self) -> dict[str, Any]:
        """The prediction as JSON and CSV have it."""
        top = zip(self.classes, self.probabilities, strict=True)
        return dict(
            path=str(self.path),
            top=[{"class": name, "probability": share} for name, share in top],
            none_of_them=None if self.known is None else not self.known,
            converged=self.converged if self.status is not None else None,
            status=self.status.name.lower() if self.status is not None else None,
            steps=self.steps,
            residual=self.residual,
            certified_radius=self.radius,
        )


def predict(
    run: Path | str,
    pictures: Path | str | Sequence[Path | str],
    checkpoint: str = "best",
    top: int = 5,
    device: str | torch.device = "auto",
    threshold: float | str = "",
) -> list[Prediction]:
    """The `top` likeliest classes of each picture file, or each in a folder, by the best or last weights of a run.

    With a `threshold`, a confidence or "auto" for the one that the evaluation chose, `Prediction.known` says whether
    the answer is one of the classes, or none of them.

    A file that is not a readable picture is a `DataError`; a `Predictor` lets you skip it, and stays open.
    """
    named = [*pictures] if isinstance(pictures, Iterable) and not isinstance(pictures, str) else [pictures]
    for one in named:
        if not isinstance(one, Path | str):
            raise TypeError(
                f"`pictures` are files or folders by name, got {type(one).__name__}: `kerneq.load` gives the model, "
                "which takes tensors."
            )
    predictor = Predictor(run, checkpoint, device)
    least = predictor.find_threshold(threshold)
    found, failures = predictor.predict_files([Path(one) for one in named], top, threshold=least)
    if failures:
        raise DataError(failures[0][1])
    return found


@final
class Predictor:
    """The best or last weights of a run, kept open to classify picture files; its data set is not needed."""

    def __init__(
        self,
        run: Path | str,
        checkpoint: str = "best",
        device: str | torch.device = "auto",
        progress: Progress | None = None,
    ):
        self.trained = TrainedRun.open(run, checkpoint, str(device), progress=progress)

    def read(self, path: Path | str) -> Tensor:
        """The pixels (channels, side, side) of a picture file; a `DataError` says why there are none."""
        channels, side, _ = self.trained.seen.shape
        return read_picture(Path(path), channels, side)

    def predict(
        self,
        pictures: Sequence[tuple[Path | str, Tensor]],
        top: int = 5,
        certified: bool = False,
        threshold: float | None = None,
    ) -> list[Prediction]:
        """The `top` likeliest classes of pictures that `read` gave; `certified`: each with its radius, slowly.

        A model that has no certificates is a `TypeError`. Predictions less confident than the `threshold` are of none
        of the classes.
        """
        check_whole("top", top)
        if not pictures:
            return []
        images = self._images([pixels for _, pixels in pictures])
        found: list[Prediction] = []
        for x, _, logits, solutions in self.trained.outputs(images):
            best = logits.double().softmax(1).topk(min(top, logits.shape[1]))
            outcomes = _outcomes(list(solutions.values()), len(x))
            radii = self._radii(x, best.indices[:, 0]) if certified else [None] * len(x)
            for row, shares, outcome, radius in zip(
                best.indices.tolist(), best.values.tolist(), outcomes, radii, strict=True
            ):
                path, names = Path(pictures[len(found)][0]), tuple(self.trained.classes[label] for label in row)
                known = None if threshold is None else shares[0] >= threshold
                found.append(Prediction(path, names, tuple(shares), *outcome, radius, known, labels=tuple(row)))
        return found

    def find_threshold(self, asked: float | str) -> float | None:
        """The confidence below which a picture shows none of the classes; None where none was asked for ("")."""
        if asked == "":
            return None
        if asked == "auto":
            chosen = self.trained.run.evaluation().get("threshold")
            if not isinstance(chosen, dict):
                raise NotApplicableError(
                    f"No threshold was chosen for {self.trained.run.path}: kerneq evaluate does it on {FEWEST} or more "
                    "held-out pictures. Give a confidence between 0 and 1 instead of auto."
                )
            asked = str(chosen.get("confidence"))
        try:
            least = float(asked)
        except ValueError:
            least = math.nan
        if not 0 <= least <= 1:
            raise ConfigError(f"`threshold` must be auto or a confidence between 0 and 1, got {asked!r}.")
        return least

    def predict_files(
        self, paths: Sequence[Path], top: int = 5, certified: bool = False, threshold: float | None = None
    ) -> tuple[list[Prediction], list[tuple[Path, str]]]:
        """Predict picture files, and those in folders; returns also which cannot be read, each with the reason.

        `certified`: a model about which nothing can be proved is a `NotApplicableError`, before it takes minutes.
        """
        if certified:
            check_certifiable(self.trained)
        failures: list[tuple[Path, str]] = []
        predictions: list[Prediction] = []
        for readable in self._read(paths, failures):
            predictions += self.predict(readable, top, certified, threshold)
        return predictions, failures

    @torch.no_grad()
    def extract_features(self, paths: Sequence[Path]) -> tuple[Tensor, list[Path], list[tuple[Path, str]]]:
        """What the model's head sees of picture files, and of those in folders, (files, features), and which file is
        in which row; also which files cannot be read, each with the reason."""
        model = self.trained.model
        assert isinstance(model, AbstractModel)
        rows, files, failures = [], list[Path](), list[tuple[Path, str]]()
        for readable in filter(None, self._read(paths, failures)):
            files += [path for path, _ in readable]
            batches = self.trained.batches(self._images([pixels for _, pixels in readable]))
            rows += [model.features(x).float().cpu() for x, _ in batches.epoch(0)]
        return torch.cat(rows) if rows else torch.empty(0, 0), files, failures

    def _read(self, paths: Sequence[Path], failures: list[tuple[Path, str]]) -> Iterator[list[tuple[Path, Tensor]]]:
        """Read picture files, and those in folders, some at a time; those that cannot be read go to `failures`."""
        files: list[Path] = []
        for path in paths:
            try:
                files += find_pictures(path)
            except DataError as error:
                failures.append((path, str(error)))
        starts = range(0, len(files), TOGETHER)
        for start in self.trained.track(starts, f"{len(files)} pictures", len(starts)):
            readable = []
            for path in files[start : start + TOGETHER]:
                try:
                    readable.append((path, self.read(path)))
                except DataError as error:
                    failures.append((path, str(error)))
            yield readable

    def _images(self, pixels: Sequence[Tensor]) -> Images:
        """Pictures as the model takes them, without labels."""
        labels = torch.zeros(len(pixels), dtype=torch.int64)  # not used
        return dataclasses.replace(self.trained.seen, pixels=torch.stack([*pixels]), labels=labels)

    def _radii(self, x: Tensor, classes: Tensor) -> list[float]:
        """The certified radius of each picture, 0 where what is proved is about another class than was predicted: a
        few steps, or half precision, may see another one than the equilibrium does."""
        proved = certify(self.trained.model, x, std=self.trained.seen.std)
        assert proved.pixel_radius is not None
        radii: list[float] = torch.where(proved.prediction == classes, proved.pixel_radius, 0.0).tolist()
        return radii


def _outcomes(solves: list[Solution], count: int) -> list[tuple[Status | None, int | None, float | None]]:
    """For each picture the worst status, number of steps and residual among its equilibrium layers."""
    if not solves:
        return [(None, None, None)] * count
    statuses = list(Status)
    codes = torch.stack([solve.codes for solve in solves]).amax(0).tolist()
    steps = torch.stack([solve.steps for solve in solves]).amax(0).tolist()
    residuals = torch.stack([solve.residual.float() for solve in solves]).amax(0).tolist()
    return [(statuses[code], taken, gap) for code, taken, gap in zip(codes, steps, residuals, strict=True)]


def draw_maps(predictor: Predictor, predictions: Sequence[Prediction]) -> bytes:
    """Draw where the model looks for the likeliest class of the first SHOWN pictures, under every map, as a PNG file.

    The pictures are read again, because their pixels were not kept.
    """
    trained, shown = predictor.trained, predictions[:SHOWN]
    pixels = torch.stack([predictor.read(p.path) for p in shown])
    labels = torch.tensor([p.labels[0] for p in shown])
    images = dataclasses.replace(trained.seen, pixels=pixels, labels=labels)
    names = [f"{p.classes[0]}, {p.probabilities[0]:.0%}\n{p.path.name}" for p in shown]
    return png(contact_sheet(pixels, names, map_each(trained, images)))


def find_pictures(path: Path) -> list[Path]:
    """The picture files of a folder and of the folders in it, hidden ones left out; a file stands for itself."""
    if not os.path.isdir(path):  # False, not an error, for a name that is too long: `read_picture` says so
        return [path]
    found = pictures_in(path, unlisted=True)
    if not found:
        raise DataError(f"{path} holds no pictures: it has no file that ends in {', '.join(sorted(SUFFIXES))}.")
    return found


def read_picture(path: Path, channels: int, side: int) -> Tensor:
    """The largest central square of the picture, resized to uint8 (channels, side, side), as training reads it.

    What is not one readable picture is a `DataError`.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.parts[0] in ("http:", "https:"):
            raise DataError(f"{path.parts[0]}//{Path(*path.parts[1:])} is no file: download it first.") from None
        raise DataError(f"There is no file {path}: check its name.") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{path} cannot be read ({reason}): check its name.") from None
    if stat.S_ISDIR(mode):
        pictures_in(path)  # says why it could not be listed
    if not stat.S_ISREG(mode):
        raise DataError(f"{path} is a folder or a device, not a picture: name picture files.")
    pixels = decode(path, side)
    return pixels if channels == 3 else grey(pixels[None])[0].to(torch.uint8)


def make_table(predictions: Sequence[Prediction], title: str) -> Table:
    """A few rows per picture: its likeliest classes, one a row, and how its equilibrium was found.

    A class stands in a row of its own with its probability, so that no fold can part them. All fits into 80 columns.
    """
    longest = max((len(plain(name)) for p in predictions for name in p.classes), default=0)
    certified = any(p.radius is not None for p in predictions)
    table = Table(
        Column("picture", overflow="fold", min_width=12),
        Column("class", overflow="fold", min_width=min(longest, 16)),
        *numbers("share", "steps", "residual"),
        Column("equilibrium", no_wrap=True),
        *(numbers("radius") if certified else ()),
        title=plain(title),
        caption=PROVED if certified else None,
        box=box.HORIZONTALS,
        show_edge=False,
        padding=0,
    )
    for p in predictions:
        outcome = [Text("–")] * 3
        if p.status is not None:
            word = Text("converged", "green") if p.converged else Text("not converged", "bold red")
            outcome = [Text(f"{p.steps}"), Text(f"{p.residual:.1e}"), word]
        if certified:
            outcome.append(Text("–" if p.radius is None else f"{p.radius:.3f}"))
        path = plain(p.path)
        if p.known is False:
            table.add_row(path, Text("none of them", "bold yellow"), "", *outcome)
            path, outcome = Text(), []
        for name, share in zip(p.classes, p.probabilities, strict=True):
            table.add_row(path, plain(name), f"{share:.2%}", *outcome)
            path, outcome = Text(), []
        table.add_section()
    return table


def describe_doubts(predictions: Sequence[Prediction], named: bool) -> list[str]:
    """Warnings about equilibria that were not found, radii of 0, and classes without names (not `named`)."""
    missed = Counter(p.status.value for p in predictions if p.status is not None and not p.converged)
    total = f"of {len(predictions)} predictions come from an unfinished equilibrium."
    doubts = [f"{count} {total} {reason}" for reason, count in missed.items()]
    if missed and any(p.radius for p in predictions):
        doubts.append(
            "The radii are of a longer solve of their own, in float64: an error that it leaves makes a radius smaller, "
            "not untrue."
        )
    if all(p.radius == 0 for p in predictions):
        doubts.append("Radius 0: of these pictures nothing is proved. The models `certified-…` are made for it.")
    if not named:
        doubts.append("The names of the classes are not known without the folder of pictures that it was trained on.")
    return doubts


def format_csv(predictions: Sequence[Prediction], top: int) -> str:
    """A row for each picture, its `top` likeliest classes and their probabilities in pairs of columns."""
    pairs = [f"{word} {place}" for place in range(1, top + 1) for word in ("class", "probability")]
    outcome = ("none_of_them", "converged", "steps", "residual", "certified_radius")
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["picture", *pairs, *outcome])
    for row in (files.replace_nonfinite(prediction.row()) for prediction in predictions):
        cells = [row["path"], *(cell for entry in row["top"] for cell in entry.values()), *map(row.get, outcome)]
        table.writerow([_as_cell(cell) for cell in cells])
    return text.getvalue()


def _as_cell(value: object) -> object:
    """A cell of CSV that is no formula to a spreadsheet and nothing to a terminal, whatever a name is."""
    text = printable(value) if isinstance(value, str) else ""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text or value


def format_json(
    trained: TrainedRun, run: Path, predictions: Sequence[Prediction], failures: Sequence[tuple[Path, str]]
) -> str:
    """Everything about the predictions of a run, named as the user did."""
    header = {"run": str(run), "checkpoint": trained.checkpoint, "epoch": trained.epoch, "named": trained.named}
    rows = [prediction.row() for prediction in predictions]
    problems = [{"path": str(path), "problem": problem} for path, problem in failures]
    return files.to_json(header | {"predictions": rows, "failures": problems}, indent=2)
