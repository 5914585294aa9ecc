"""Accuracy, loss and solver metrics of a trained run on the test images."""

import dataclasses
from pathlib import Path
from typing import final

from ..training import metrics
from ..training.build import Builder, build_model
from ..training.metrics import Scores, validate
from .parts import Part, measure_part
from .trained import TrainedRun


@final
@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """Scores on the test images; where sub-classes were kept out of training, on the `unknown` ones too."""

    model: str
    data: str
    checkpoint: str
    epoch: int
    parameters: int
    scores: dict[str, Scores]

    def summary(self) -> list[tuple[str, str]]:
        lines = [("test images", str(self.scores["test"]["images"]))]
        return lines + [(metric.title, metric.text(self.scores["test"])) for metric in metrics.METRICS]


def evaluate(path: Path, which: str = "best", device: str = "auto", build: Builder = build_model) -> EvaluationResult:
    """Evaluate the best or the last weights of the run in `path` and write RUN/evaluation.json."""
    trained = TrainedRun.open(path, which, device, build)
    measured = measure_part(trained, "scores", SCORES)
    measured.write(trained.run)
    return measured.evidence


def measure_scores(trained: TrainedRun) -> EvaluationResult:
    """The scores of a trained run; nothing is written."""
    config = trained.config
    images = {"test": trained.test}
    unknown = trained.unknown()
    if unknown is not None and config.data.subset == "four-of-five-subclasses":
        images["unknown"] = unknown
    scores: dict[str, Scores] = {}
    for name, some in images.items():
        scores[name] = validate(trained.model, trained.batches(some), trained.process, config.training.amp)
    return EvaluationResult(
        config.model.name, config.data.name, trained.which, trained.epoch, trained.parameters, scores
    )


SCORES = Part(measure_scores, "accuracy, loss and solver on the test images", usual=True)
