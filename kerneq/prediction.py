"""What a trained run says about picture files that are not in its data set."""

import dataclasses
import stat
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import final

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn

from .data import DataError, Images, decode, find, grey, normalise
from .graphs import capture
from .run import CheckpointError, Run, checkpoint
from .run.config import Config
from .solution import Solution, Status
from .tensors import check_whole
from .training.build import build_model, for_inference, place, read_images

BATCH = 64  # pictures in one forward pass, at most


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

    @property
    def converged(self) -> bool:
        """Whether the prediction comes from equilibria that were found (or from a model that has none)."""
        return self.status in (None, Status.CONVERGED)


def predict(
    run: Path, pictures: Sequence[Path], which: str = "best", top: int = 5, device: str = "auto"
) -> list[Prediction]:
    """The `top` likeliest classes of each picture file, by the best or last weights of a run.

    A file that is not a readable picture is a `DataError`; a `Predictor` lets you skip it, and stays open.
    """
    predictor = Predictor.open(run, which, device)
    return predictor.predict([(path, predictor.read(path)) for path in map(Path, pictures)], top)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Predictor:
    """The model with its weights on its device, in `eval()`, and what the pictures it was trained on looked like."""

    model: nn.Module
    config: Config
    images: Images  # none: only their shape, scale and classes
    named: bool  # whether the classes' names are known; otherwise they are numbers
    epoch: int

    @classmethod
    def open(cls, path: Path | str, which: str = "best", device: str = "auto") -> "Predictor":
        """Open the run in `path` with its best or last weights; its data set is not needed."""
        run = Run(Path(path))
        config, process = for_inference(run.config(), device)
        file = run.checkpoint(which)
        weights, epoch = run.trained_weights(which)
        if "head.bias" not in weights:
            raise CheckpointError(f"{file} belongs to another run: it has no `head.bias`.")
        images, named = trained_on(config, outputs=len(weights["head.bias"]))
        model = place(build_model(config, images), config, process)
        checkpoint.load_weights(model, weights, file)
        return cls(capture(model.eval()), config, images.to(process.device), named, epoch)

    def read(self, path: Path) -> Tensor:
        """The pixels (channels, side, side) of a picture file; a `DataError` says why there are none."""
        channels, side, _ = self.images.shape
        return read_picture(path, channels, side)

    @torch.no_grad()
    def predict(self, pictures: Sequence[tuple[Path, Tensor]], top: int = 5) -> list[Prediction]:
        """The `top` likeliest classes of pictures that `read` gave, in forward passes of at most 64."""
        check_whole("top", top)
        settings, device = self.config.training, self.images.labels.device
        mean, std = (torch.tensor(n, device=device)[:, None, None] for n in (self.images.mean, self.images.std))
        layout = torch.channels_last if settings.channels_last else torch.contiguous_format
        found: list[Prediction] = []
        for start in range(0, len(pictures), BATCH):
            paths, pixels = zip(*pictures[start : start + BATCH], strict=True)
            x = normalise(torch.stack(pixels).to(device), mean, std).contiguous(memory_format=layout)
            with torch.autocast(device.type, torch.bfloat16, enabled=settings.amp):
                logits, solutions = self.model(x, solutions=True)
            best = logits.double().softmax(1).topk(min(top, logits.shape[1]))
            names = [tuple(self.images.classes[label] for label in row) for row in best.indices.tolist()]
            rows = zip(paths, names, best.values.tolist(), _outcomes(list(solutions.values()), len(x)), strict=True)
            found += [Prediction(path, classes, tuple(shares), *outcome) for path, classes, shares, outcome in rows]
        return found


def _outcomes(solves: list[Solution], count: int) -> list[tuple[Status | None, int | None, float | None]]:
    """For each picture the worst status, number of steps and residual among its equilibrium layers."""
    if not solves:
        return [(None, None, None)] * count
    statuses = list(Status)
    codes = torch.stack([solve.codes for solve in solves]).amax(0).tolist()
    steps = torch.stack([solve.steps for solve in solves]).amax(0).tolist()
    residuals = torch.stack([solve.residual.float() for solve in solves]).amax(0).tolist()
    return [(statuses[code], taken, gap) for code, taken, gap in zip(codes, steps, residuals, strict=True)]


def trained_on(config: Config, outputs: int) -> tuple[Images, bool]:
    """No pictures, but the shape, scale and classes of those of the run; and whether the classes have their names.

    `outputs` is how many classes the run's model tells apart. A run does not store their names: where only its
    pictures' folder had them, and that is gone or has changed, they are numbered.
    """
    data_set = find(config.data.name)
    side = config.data.size or data_set.size
    classes = data_set.class_names or ()
    if not classes:
        with suppress(DataError):
            classes = read_images(config, "train").classes  # as the folder of pictures has them now
    if config.data.subset == "first-five-classes":
        classes = classes[:5]
    named = len(classes) == outputs
    if not named:
        classes = tuple(str(number) for number in range(outputs))
    pixels = torch.empty((0, len(data_set.mean), side, side), dtype=torch.uint8)
    labels = torch.empty(0, dtype=torch.int64)
    return Images(pixels, labels, classes, data_set.mean, data_set.std), named


def read_picture(path: Path, channels: int, side: int) -> Tensor:
    """The largest central square of the picture, resized to uint8 (channels, side, side).

    What the reader of picture folders does, after turning the picture as its EXIF data say and putting a transparent
    one on white. What is not one readable picture is a `DataError`.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise DataError(f"There is no file {path}: check its name.") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{path} cannot be read ({reason}): check its name.") from None
    if not stat.S_ISREG(mode):
        raise DataError(f"{path} is a folder or a device, not a picture: name picture files.")
    pixels = decode(path, side, convert=partial(_upright, path))
    return pixels if channels == 3 else grey(pixels[None])[0].to(torch.uint8)


def _upright(path: Path, picture: Image.Image) -> Image.Image:
    """The picture turned as its EXIF data say, in 8-bit colours, on white where one could see through it.

    A file whose picture or whose brightness is ambiguous is refused.
    """
    frames = getattr(picture, "n_frames", 1)
    if frames > 1 and picture.format != "MPO":  # a camera's JPEG with a second view behind the first
        raise DataError(f"{path} holds {frames} pictures, an animation or pages: save the one you mean by itself.")
    if picture.mode in ("I", "F"):
        raise DataError(f"{path} has 32 bits a pixel, and none of them says which value is white: save it with 8.")
    picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith("I;16"):  # Pillow would cut off whatever is brighter than 255
        return Image.fromarray((np.array(picture) // 257).astype(np.uint8)).convert("RGB")
    if picture.mode not in ("RGBA", "RGBa", "LA", "La", "PA") and "transparency" not in picture.info:
        return picture.convert("RGB")
    white = Image.new("RGBA", picture.size, "white")
    white.alpha_composite(picture.convert("RGBA"))
    return white.convert("RGB")
