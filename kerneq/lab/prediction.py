"""What a trained run says about picture files that are not in its data set."""

import dataclasses
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import final

import torch
from PIL import Image
from torch import Tensor

from ..certificates import certify
from ..solution import Solution, Status
from ..tensors import check_whole
from .data import SUFFIXES, DataError, decode, grey, pictures_in
from .evaluate import TrainedRun
from .evaluate.saliency import contact_sheet, map_each

SHOWN = 16  # pictures of which `draw_predictions` makes a sheet


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
    labels: tuple[int, ...] = dataclasses.field(kw_only=True)  # of the classes, two of which may show the same name

    @property
    def converged(self) -> bool:
        """Whether the prediction comes from equilibria that were found (or from a model that has none)."""
        return self.status in (None, Status.CONVERGED)


def predict(
    run: Path | str,
    pictures: Path | str | Sequence[Path | str],
    checkpoint: str = "best",
    top: int = 5,
    device: str | torch.device = "auto",
) -> list[Prediction]:
    """The `top` likeliest classes of each picture file, or each in a folder, by the best or last weights of a run.

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
    files = [file for path in named for file in find_pictures(Path(path))]
    return predictor.predict([(path, predictor.read(path)) for path in files], top)


@final
class Predictor:
    """The best or last weights of a run, which looks at picture files and stays open; its data set is not needed."""

    def __init__(self, run: Path | str, checkpoint: str = "best", device: str | torch.device = "auto"):
        self.trained = TrainedRun.open(run, checkpoint, str(device))

    def read(self, path: Path | str) -> Tensor:
        """The pixels (channels, side, side) of a picture file; a `DataError` says why there are none."""
        channels, side, _ = self.trained.seen.shape
        return read_picture(Path(path), channels, side)

    def predict(
        self, pictures: Sequence[tuple[Path | str, Tensor]], top: int = 5, certified: bool = False
    ) -> list[Prediction]:
        """The `top` likeliest classes of pictures that `read` gave; `certified`: each with its radius, slowly.

        A model that has no certificates is a `TypeError`.
        """
        check_whole("top", top)
        if not pictures:
            return []
        paths, pixels = zip(*pictures, strict=True)
        labels = torch.zeros(len(paths), dtype=torch.int64)  # nobody looks at them
        images = dataclasses.replace(self.trained.seen, pixels=torch.stack(pixels), labels=labels)
        found: list[Prediction] = []
        for x, _, logits, solutions in self.trained.outputs(images):
            best = logits.double().softmax(1).topk(min(top, logits.shape[1]))
            here = paths[len(found) : len(found) + len(x)]
            outcomes = _outcomes(list(solutions.values()), len(x))
            radii = self._radii(x, best.indices[:, 0]) if certified else [None] * len(x)
            columns = (here, best.indices.tolist(), best.values.tolist(), outcomes, radii)
            for path, row, shares, outcome, radius in zip(*columns, strict=True):
                names = tuple(self.trained.classes[label] for label in row)
                found.append(Prediction(Path(path), names, tuple(shares), *outcome, radius, labels=tuple(row)))
        return found

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


def draw_predictions(predictor: Predictor, predictions: Sequence[Prediction]) -> tuple[Image.Image, int]:
    """Where the model looks for the likeliest class of each picture, under every map; the first few of them.

    Returns the sheet and how many pictures are on it. They are read again: their pixels were not kept.
    """
    trained, shown = predictor.trained, predictions[:SHOWN]
    pixels = torch.stack([predictor.read(p.path) for p in shown])
    labels = torch.tensor([p.labels[0] for p in shown])
    images = dataclasses.replace(trained.seen, pixels=pixels, labels=labels)
    maps = {name: some for name, some in map_each(trained, images).items() if "branch" not in name}
    names = [f"{p.classes[0]}, {p.probabilities[0]:.0%}: {p.path.name}" for p in shown]
    return contact_sheet(pixels, names, maps), len(shown)


def find_pictures(path: Path) -> list[Path]:
    """The picture files of a folder and of the folders in it, hidden ones left out; a file stands for itself."""
    if not os.path.isdir(path):  # which does not mind that it may be too long for a name; whoever reads it will say so
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
