"""A trained run on the test images: the only place that reads them."""

import dataclasses
from pathlib import Path
from typing import final

from .run import Run, checkpoint, write_atomically
from .run.folder import to_json
from .training.build import Builder, build_model, for_inference, make_batches, place, read_images
from .training.metrics import Scores, validate


@final
@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """Scores on the test images; where classes were kept out of training, on the `unknown` ones too."""

    model: str
    data: str
    checkpoint: str
    epoch: int
    parameters: int
    scores: dict[str, Scores]

    def write(self, run: Path) -> None:
        """Write RUN/evaluation.json."""
        write_atomically(run / "evaluation.json", (to_json(dataclasses.asdict(self), indent=2) + "\n").encode())


def evaluate(path: Path, which: str = "best", device: str = "auto", build: Builder = build_model) -> EvaluationResult:
    """Evaluate the best or the last weights of the run in `path` and write RUN/evaluation.json."""
    result = measure(path, which, device, build)
    result.write(Path(path))
    return result


def measure(path: Path, which: str = "best", device: str = "auto", build: Builder = build_model) -> EvaluationResult:
    """The scores of the best or the last weights of the run in `path`; nothing is written."""
    run = Run(Path(path))
    config, process = for_inference(run.config(), device)
    images = {"test": read_images(config, "test")}
    if config.data.subset == "four-of-five-subclasses":
        images["unknown"] = read_images(config, "test", known=False)
    model = place(build(config, images["test"]), config, process)
    weights, epoch = run.trained_weights(which)
    checkpoint.load_weights(model, weights, run.checkpoint(which))
    scores: dict[str, Scores] = {}
    for name, some in images.items():
        scores[name] = validate(model, make_batches(some, config, process, train=False), process, config.training.amp)
    size = sum(parameter.numel() for parameter in model.parameters())
    return EvaluationResult(config.model.name, config.data.name, which, epoch, size, scores)
