"""Accuracy with its uncertainty, and calibration, from logits (images, classes) and labels (images), in float64.

By hand, since torchmetrics, against which the tests check this, has no adaptive calibration error and does not give the
bins that the report draws.
"""

import dataclasses
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from ..run import TrainingError

BINS = 15  # as is usual since Guo et al. (2017)
TEMPERATURES = (0.05, 20.0)  # range of the temperature; for a network without mistakes the best would be 0
NORMAL = 1.959963984540054  # the 97.5 % quantile of a normal distribution


@final
@dataclasses.dataclass(frozen=True)
class Classification:
    """How often the likeliest class is the right one."""

    images: int
    accuracy: float
    interval: tuple[float, float]  # Wilson's, of 95 %
    top5: float | None  # whether the right class is among the five likeliest; None for five classes or fewer
    per_class: tuple[float | None, ...]  # accuracy on the images of each class; None where there are none
    confusion: tuple[tuple[int, ...], ...]  # row: the label, column: the prediction
    wrong: tuple[int, ...]  # indices of the images whose likeliest class is not the label

    def interval_text(self) -> str:
        return f"95 % interval {self.interval[0]:.2%} … {self.interval[1]:.2%}"


@final
@dataclasses.dataclass(frozen=True)
class ReliabilityBin:
    """Predictions with a confidence between `low` and `high`."""

    low: float
    high: float
    count: int
    confidence: float | None  # the mean; None in an empty bin
    accuracy: float | None

    @property
    def gap(self) -> float:
        """|accuracy − confidence|; 0 in an empty bin."""
        return 0.0 if self.accuracy is None or self.confidence is None else abs(self.accuracy - self.confidence)


@final
@dataclasses.dataclass(frozen=True)
class Calibration:
    """How well probabilities match frequencies of right predictions, at one temperature of the softmax."""

    temperature: float
    nll: float  # −log of the probability of the right class, mean
    brier: float  # Σ (pₖ − yₖ)² over the classes, mean; 0 … 2
    ece: float  # mean |accuracy − confidence| over bins of equal width, weighted by their counts
    adaptive_ece: float  # the same over bins of equal counts
    mce: float  # the largest of the bins of equal width
    bins: tuple[ReliabilityBin, ...]  # of equal width


def classify(logits: Tensor, labels: Tensor) -> Classification:
    """Accuracy over all images and class by class, with its interval, and the confusion matrix."""
    _check(logits, labels)
    count, classes = logits.shape
    predicted = logits.argmax(1)
    confusion = torch.bincount(labels * classes + predicted, minlength=classes**2).view(classes, classes)
    right, sizes = confusion.diagonal(), confusion.sum(1)
    rates = [hits / size if size else None for hits, size in zip(right.tolist(), sizes.tolist(), strict=True)]
    top5 = float((logits.topk(5).indices == labels[:, None]).any(1).double().mean()) if classes > 5 else None
    hits, table = int(right.sum()), tuple(map(tuple, confusion.tolist()))
    wrong = tuple((predicted != labels).nonzero().flatten().tolist())
    return Classification(count, hits / count, wilson_interval(hits, count), top5, tuple(rates), table, wrong)


def wilson_interval(hits: int, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share (1927), which is valid near 0 and 1, too.

    (h + q²/2 ± q √(h(n − h)/n + q²/4)) / (n + q²)
    """
    square = NORMAL**2
    spread = NORMAL * (hits * (trials - hits) / trials + square / 4) ** 0.5
    low, high = ((hits + square / 2 + sign * spread) / (trials + square) for sign in (-1, 1))
    return max(low, 0.0), min(high, 1.0)


def extreme_classes(rates: Sequence[float | None], classes: Sequence[str]) -> list[tuple[float, str]]:
    """The lowest and the highest accuracy among the classes, each with the names of the classes that have it."""
    known = [(rate, name) for rate, name in zip(rates, classes, strict=True) if rate is not None]
    ends = min(rate for rate, _ in known), max(rate for rate, _ in known)
    return [(end, ", ".join(name for rate, name in known if rate == end)) for end in ends]


def calibrate(logits: Tensor, labels: Tensor, temperature: float = 1.0, bins: int = BINS) -> Calibration:
    """The calibration of softmax(logits / temperature)."""
    _check(logits, labels)
    scaled = logits.double() / temperature
    probabilities = scaled.softmax(1)
    confidence, predicted = probabilities.max(1)
    correct = (predicted == labels).double()
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device=logits.device)
    place = torch.bucketize(confidence, edges[1:-1])
    wide = [_bin(place == i, confidence, correct, float(edges[i]), float(edges[i + 1])) for i in range(bins)]
    equal = confidence.argsort().tensor_split(min(bins, len(labels)))
    gaps = [len(part) * abs(float(correct[part].mean() - confidence[part].mean())) for part in equal]
    return Calibration(
        temperature=temperature,
        nll=float(cross_entropy(scaled, labels)),
        brier=float((probabilities - one_hot(labels, logits.shape[1])).square().sum(1).mean()),
        ece=sum(part.count * part.gap for part in wide) / len(labels),
        adaptive_ece=sum(gaps) / len(labels),
        mce=max(part.gap for part in wide),
        bins=tuple(wide),
    )


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The temperature T at which softmax(logits / T) has the lowest NLL (Guo et al., 2017).

    NLL is convex in β = 1/T; its slope, the mean of Σₖ pₖlₖ − l_label, changes sign once: bisection, in log T.
    """
    _check(logits, labels)
    logits = logits.double()
    own = logits.gather(1, labels[:, None])[:, 0]
    cold, hot = (torch.tensor(t, dtype=torch.float64).log() for t in TEMPERATURES)
    for _ in range(50):
        middle = (cold + hot) / 2
        expected = ((logits / middle.exp().to(logits)).softmax(1) * logits).sum(1)
        if float((expected - own).mean()) > 0:  # a smaller β, that is a higher temperature, is better
            cold = middle
        else:
            hot = middle
    return float(((cold + hot) / 2).exp())


def _bin(inside: Tensor, confidence: Tensor, correct: Tensor, low: float, high: float) -> ReliabilityBin:
    count = int(inside.sum())
    means = [float(values[inside].mean()) if count else None for values in (confidence, correct)]
    return ReliabilityBin(low, high, count, *means)


def _check(logits: Tensor, labels: Tensor) -> None:
    """Raise an error where there are no images, or where logits are infinite or NaN."""
    if logits.dim() != 2 or labels.shape != logits.shape[:1] or len(labels) == 0:
        got = f"{tuple(logits.shape)} and {tuple(labels.shape)}"
        raise ValueError(
            f"`logits` must be (images, classes) and `labels` (images,), of at least one image, got {got}."
        )
    if not bool(logits.isfinite().all()):
        raise TrainingError("The model gave infinite or NaN logits: there is nothing to score. Train it anew.")
