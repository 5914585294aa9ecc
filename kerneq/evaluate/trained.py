"""A trained run, opened once for everything that is measured on it: the only place that reads the test images."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn

from ..data import Batches, Images, split_validation
from ..graphs import capture
from ..run import Run, checkpoint
from ..run.config import Config
from ..solution import Solution
from ..training.build import Builder, build_model, for_inference, make_batches, place, read_images
from ..training.process import Process


@final
@dataclasses.dataclass(frozen=True, eq=False)
class TrainedRun:
    """The model with its best or last weights on its device, in `eval()`, and the images to measure it on."""

    run: Run
    config: Config
    process: Process
    model: nn.Module
    test: Images  # test images of the classes it was trained on
    which: str
    epoch: int

    @classmethod
    def open(
        cls, path: Path | str, which: str = "best", device: str = "auto", build: Builder = build_model
    ) -> "TrainedRun":
        """Open the run in `path` with its best or last weights; its data set must be there."""
        run = Run(Path(path))
        config, process = for_inference(run.config(), device)
        test = read_images(config, "test")
        model = place(build(config, test), config, process)
        weights, epoch = run.trained_weights(which)
        checkpoint.load_weights(model, weights, run.checkpoint(which))
        return cls(run, config, process, model.eval(), test, which, epoch)

    @property
    def parameters(self) -> int:
        """How many numbers training could change."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def unknown(self) -> Images | None:
        """Test images of the classes, or sub-classes, that were kept out of training; None if none were."""
        return read_images(self.config, "test", known=False) if self.config.data.subset != "all" else None

    def held_out(self) -> Images | None:
        """The training images that the run held out for validation; None if it trained on all."""
        images = read_images(self.config, "train")
        count = round(self.config.data.validation * len(images))
        return split_validation(images, count, self.config.seed)[1] if count > 0 else None

    def batches(self, images: Images) -> Batches:
        """Every image once, in order, as the model saw pictures in training but not augmented."""
        return make_batches(images, self.config, self.process, train=False)

    @torch.no_grad()
    def outputs(self, images: Images) -> Iterator[tuple[Tensor, Tensor, Tensor, dict[str, Solution]]]:
        """For each batch its pictures x, labels, logits (float32) and solutions, all on the device."""
        fast = capture(self.model)
        for x, labels in self.batches(images).epoch(0):
            with torch.autocast(self.process.device.type, torch.bfloat16, enabled=self.config.training.amp):
                logits, solutions = fast(x, solutions=True)
            yield x, labels, logits.float(), solutions
