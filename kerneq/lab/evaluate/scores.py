"""The main numbers of a trained run, on the test images: accuracy, calibration, the solver, and the worst mistakes."""

import dataclasses
from collections.abc import Hashable, Sequence
from statistics import fmean, stdev
from typing import final

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import cross_entropy

from ...models import parameters
from ...settings import rows
from ..data import DataError, Images
from ..run import Run
from ..run.folder import INCIDENTAL
from ..training import metrics
from ..training.metrics import Accumulator, Scores, describe_chance
from .classification import Calibration, Classification, calibrate, classify, extreme_classes, fit_temperature
from .sheet import draw_sheet, enlarge
from .trained import TrainedRun

MISTAKES = 24  # listed and drawn, the most confident first
FEWEST = 100  # held-out images to fit a temperature on; of fewer it is noise
REFUSED = 0.05  # share of the held-out images that may be taken for none of the classes
COLUMNS = 6  # of the sheet of mistakes


@final
@dataclasses.dataclass(frozen=True)
class Mistake:
    """A test image, by its index in the test split, with a confident wrong prediction."""

    index: int
    label: int
    predicted: int
    confidence: float


@final
@dataclasses.dataclass(frozen=True)
class Threshold:
    """A confidence below which the answer is "none of them", and what that costs on the test images."""

    confidence: float  # which all but a share REFUSED of the held-out images reach
    held_out: int  # on so many images it was chosen
    refused: float  # share of the test images that do not reach it
    accuracy: float | None  # on those that do


@final
@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """The main numbers on the test images, and on `unknown` ones where sub-classes were left out of the training.

    The temperature and the threshold are chosen on the images that the run held out (which also chose the best
    checkpoint), never on test images, and on no fewer than FEWEST.
    """

    model: str
    data: str
    checkpoint: str
    epoch: int
    parameters: int
    scores: dict[str, Scores]  # of `test` and `unknown` images: the metrics of `training.metrics`
    classes: tuple[str, ...]
    classification: dict[str, Classification]  # of `test` and `unknown` images
    calibration: Calibration  # of the test images, as trained
    scaled: Calibration | None  # after temperature scaling
    threshold: Threshold | None  # of "none of them"
    unscaled: str | None  # why there are neither
    mistakes: tuple[Mistake, ...]  # the most confident first

    def __str__(self) -> str:
        """The summary, a line each."""
        return "\n".join(f"{name:24}{value}" for name, value in self.summary())

    def summary(self) -> list[tuple[str, str]]:
        found = self.classification["test"]
        lines = [("model, data", f"{self.model}, {self.data}"), ("test images", str(found.images))]
        for metric in metrics.METRICS:
            if metric.name == "accuracy":
                lines.append((metric.title, f"{metric.text(self.scores['test'])}, {found.interval_text()}"))
                doubt = describe_chance(
                    round(found.accuracy * found.images), found.images, [*map(sum, found.confusion)]
                )
                lines += [("", f"this is {doubt}")] if doubt else []
                lines += [("top-5 accuracy", f"{found.top5:.2%}")] if found.top5 is not None else []
            elif metric.over != "adjoints":  # those are of training
                lines.append((metric.title, metric.text(self.scores["test"])))
        if "unknown" in self.classification:
            unknown = self.classification["unknown"]
            lines.append(("unseen sub-classes", f"{unknown.accuracy:.2%}, {unknown.interval_text()}"))
        (low, worst), (high, best) = extreme_classes(found.per_class, self.classes)
        lines.append(("classes", f"from {low:.1%} ({worst}) to {high:.1%} ({best})"))
        steps, temperature = [self.calibration], self.unscaled or ""
        if self.scaled is not None:
            steps.append(self.scaled)
            fitted = "fitted on the held-out images; figures before → after"
            temperature = f"T = {self.scaled.temperature:.3f}, {fitted}"
        numbers = " → ".join(f"{step.nll:.4f}, {step.brier:.4f}" for step in steps)
        errors = " → ".join(f"{step.ece:.4f}, {step.adaptive_ece:.4f}, {step.mce:.4f}" for step in steps)
        lines += [("temperature", temperature), ("NLL, Brier score", numbers), ("ECE, adaptive ECE, MCE", errors)]
        if (chosen := self.threshold) is not None:
            right = "" if chosen.accuracy is None else f", of the others {chosen.accuracy:.2%} are right"
            words = f"below a confidence of {chosen.confidence:.1%}: {chosen.refused:.1%} of the test images{right}"
            lines.append(("none of them", words))
        return lines


def measure_scores(trained: TrainedRun) -> EvaluationResult:
    """The main numbers of a trained run; nothing is written."""
    config = trained.config
    scores, logits = score(trained, trained.test)
    labels = trained.test.labels
    every: dict[str, Scores] = {"test": scores}
    classification = {"test": classify(logits, labels)}
    if config.data.subset == "four-of-five-subclasses":
        unknown = trained.unknown()
        assert unknown is not None
        every["unknown"], theirs = score(trained, unknown)
        classification["unknown"] = classify(theirs, unknown.labels)
    held_out, unscaled = score_held_out(trained)
    temperature = None if held_out is None else fit_temperature(*held_out)
    return EvaluationResult(
        model=config.model.name,
        data=config.data.pictures,
        checkpoint=trained.checkpoint,
        epoch=trained.epoch,
        parameters=parameters(trained.model),
        scores=every,
        classes=trained.classes,
        classification=classification,
        calibration=calibrate(logits, labels),
        scaled=calibrate(logits, labels, temperature) if temperature is not None else None,
        threshold=None if held_out is None else choose_threshold(held_out[0], logits, labels),
        unscaled=unscaled,
        mistakes=find_mistakes(logits, labels),
    )


def score_held_out(trained: TrainedRun) -> tuple[tuple[Tensor, Tensor] | None, str | None]:
    """The logits and labels of the held-out images, or why there are none to choose anything on."""
    try:
        held_out = trained.held_out()
    except DataError as error:
        return None, f"the held-out images are not there: {error}"
    if held_out is None:
        return None, "the run trained on every image and held none out to fit a temperature on"
    if len(held_out) < FEWEST:
        return None, f"not fitted, and no threshold chosen: {len(held_out)} held-out images, of {FEWEST} at least"
    return (score(trained, held_out)[1], held_out.labels), None


def choose_threshold(held_out: Tensor, logits: Tensor, labels: Tensor) -> Threshold:
    """The confidence that all but a share REFUSED of the held-out images reach, and what it does to the test images."""
    least = float(held_out.double().softmax(1).amax(1).quantile(REFUSED, interpolation="lower"))
    confidence, predicted = logits.double().softmax(1).max(1)
    kept = confidence >= least
    right = float((predicted == labels)[kept].double().mean()) if bool(kept.any()) else None
    return Threshold(least, len(held_out), float((~kept).double().mean()), right)


def score(trained: TrainedRun, images: Images) -> tuple[Scores, Tensor]:
    """The metrics of `training.metrics` on some images, and the logits, float32 (images, classes), on the host."""
    accumulator, found = Accumulator(trained.process.device), []
    for _, labels, logits, solutions in trained.outputs(images):
        accumulator.add(cross_entropy(logits, labels), logits, labels, solutions)
        found.append(logits.cpu())
    return accumulator.read(accumulator.sums), torch.cat(found)


def find_mistakes(logits: Tensor, labels: Tensor, count: int = MISTAKES) -> tuple[Mistake, ...]:
    """The images whose likeliest class is not theirs, the most confident first, at most `count`."""
    confidence, predicted = logits.double().softmax(1).max(1)
    wrong = (predicted != labels).nonzero().flatten()
    order = wrong[confidence[wrong].argsort(descending=True, stable=True)][:count].tolist()
    return tuple(Mistake(i, int(labels[i]), int(predicted[i]), float(confidence[i])) for i in order)


def draw_mistakes(trained: TrainedRun, result: EvaluationResult) -> dict[str, Image.Image]:
    """A sheet of the most confident mistakes, each with the prediction, its probability, and the label."""
    found, names = result.mistakes, result.classes
    pixels = trained.test.select(torch.tensor([mistake.index for mistake in found], dtype=torch.int64)).in_memory()
    tiles = []
    for mistake, picture in zip(found, pixels, strict=True):
        caption = f"{names[mistake.predicted]} ({mistake.confidence:.0%})\nlabel: {names[mistake.label]}"
        tiles.append((enlarge(picture), caption))
    wrong = len(result.classification["test"].wrong)
    title = f"{wrong} mistakes" if wrong != 1 else "1 mistake"
    title += f", the {len(found)} most confident" if wrong > len(found) else ", the most confident first"
    rows = [tiles[start : start + COLUMNS] for start in range(0, len(tiles), COLUMNS)]
    return {"mistakes": draw_sheet(f"{title}: prediction with its probability, and the label", rows)}


def spread(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and the sample standard deviation (n − 1), which is None for a single value."""
    return fmean(values), stdev(values) if len(values) > 1 else None


def over_seeds(runs: Sequence[Run]) -> list[list[Run]]:
    """The groups of at least two evaluated runs that differ only in their seed and in how they were computed.

    Of two runs with the same seed the first by path counts, since runs often come sorted by accuracy.
    """
    groups: dict[Hashable, dict[int, Run]] = {}  # by common settings, then by seed
    for run in sorted(runs, key=lambda run: run.path):
        if run.test():
            groups.setdefault(but_for_seed(run), {}).setdefault(run.config().seed, run)
    return [[*seeds.values()] for seeds in groups.values() if len(seeds) > 1]


def but_for_seed(run: Run) -> Hashable:
    """What a run has in common with its other seeds: the settings that matter, epochs, choice of weights."""
    config = run.config()
    settings = frozenset((key, value) for key, value, _ in rows(config) if key not in ("seed", *INCIDENTAL))
    # Without validation best and last are the same.
    return settings, len(run.rows()), run.evaluation().get("checkpoint") if config.data.validation else None
