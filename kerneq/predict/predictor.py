"""A trained run, opened once, that classifies pictures."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from kerneq.data import Images
from kerneq.evaluate import laid_out, restore
from kerneq.predict.picture import read_picture
from kerneq.predict.prediction import Prediction
from kerneq.predict.subject import subject
from kerneq.run.config import Config, load
from kerneq.solution import Solution, Status, check_whole
from kerneq.training.data import WIDER, plain_batches
from kerneq.training.errors import CheckpointError, TrainingError
from kerneq.training.folder import Folder
from kerneq.training.model import Builder, build_model, place
from kerneq.training.process import Process, choose

BATCH = 64  # pictures in one forward pass, at most


def predict(
    run: Path,
    pictures: Sequence[Path],
    which: str = "best",
    top: int = 5,
    device: str = "auto",
    build: Builder = build_model,
) -> list[Prediction]:
    """The `top` likeliest classes of each picture file, by the best or last weights of a run.

    A file that is not a readable picture is a `DataError`; a `Predictor` lets you skip it, and stays open.
    """
    predictor = Predictor.open(run, which, device, build)
    return predictor.predict([(path, predictor.read(path)) for path in map(Path, pictures)], top)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Predictor:
    """The model with its weights on its device, in `eval()`, and what the pictures it was trained on looked like."""

    model: nn.Module
    config: Config
    process: Process
    images: Images  # none: only their shape, scale and classes
    named: bool  # whether the classes' names are known; otherwise they are numbers
    epoch: int

    @classmethod
    def open(cls, run: Path, which: str = "best", device: str = "auto", build: Builder = build_model) -> "Predictor":
        folder = Folder(run)
        if not folder.config.exists():
            raise TrainingError(f"{run} is not a run folder: it has no config.toml.")
        process = Process(0, 1, choose(device))
        config = laid_out(load(folder.config), process)
        training = dataclasses.replace(config.training, batch_size=BATCH // WIDER)
        config = dataclasses.replace(config, training=training)
        images, named = subject(config, _outputs(folder.checkpoint(which)))
        model = place(build(config, images), config, process)
        epoch = restore(model, folder.checkpoint(which))
        return cls(model.eval(), config, process, images, named, epoch)

    def read(self, path: Path) -> Tensor:
        """The pixels of a picture file as the model takes them; a `DataError` says why there are none."""
        channels, side, _ = self.images.shape
        return read_picture(path, channels, side)

    def predict(self, pictures: Sequence[tuple[Path, Tensor]], top: int = 5) -> list[Prediction]:
        """The `top` likeliest classes of pictures that `read` gave, in forward passes of at most 64."""
        check_whole("top", top)
        if not pictures:
            return []
        pixels = torch.stack([pixels for _, pixels in pictures])
        labels = torch.zeros(len(pixels), dtype=torch.int64)  # nobody knows them, nothing here reads them
        given = dataclasses.replace(self.images, pixels=pixels, labels=labels)
        found: list[Prediction] = []
        for x, _ in plain_batches(given, self.config, self.process).epoch(0):
            paths = [path for path, _ in pictures[len(found) : len(found) + len(x)]]
            found += self._forward(x, paths, top)
        return found

    @torch.no_grad()
    def _forward(self, x: Tensor, paths: Sequence[Path], top: int) -> list[Prediction]:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.config.training.amp):
            logits, solutions = self.model(x, solutions=True)
        best = logits.double().softmax(1).topk(min(top, logits.shape[1]))
        names = [tuple(self.images.classes[label] for label in row) for row in best.indices.tolist()]
        rows = zip(paths, names, best.values.tolist(), _outcomes(list(solutions.values()), len(x)), strict=True)
        return [Prediction(path, classes, tuple(shares), *outcome) for path, classes, shares, outcome in rows]


def _outcomes(solves: list[Solution], count: int) -> list[tuple[Status | None, int | None, float | None]]:
    """For each picture the worst status, number of steps and residual among its equilibrium layers."""
    if not solves:
        return [(None, None, None)] * count
    codes = torch.stack([solve.codes for solve in solves]).amax(0).tolist()
    steps = torch.stack([solve.steps for solve in solves]).amax(0).tolist()
    residuals = torch.stack([solve.residual.float() for solve in solves]).amax(0).tolist()
    statuses = list(Status)
    return [(statuses[code], taken, gap) for code, taken, gap in zip(codes, steps, residuals, strict=True)]


def _outputs(path: Path) -> int:
    """How many classes the saved model tells apart; reads the head of the file only."""
    try:
        with safe_open(path, framework="pt") as file:
            return int(file.get_slice("model.head.bias").get_shape()[0])
    except FileNotFoundError:
        raise CheckpointError(f"There is no checkpoint {path}.") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or is no checkpoint ({error}).") from None
