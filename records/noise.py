"""How far two accuracies are apart, and how sure that is: picture by picture, over seeds, by t, and over many tests."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import final

from scipy.special import stdtr

from kerneq.lab.report.results import Result


@final
@dataclasses.dataclass(frozen=True)
class Churn:
    """What another seed moves an accuracy by, pooled over all models and data sets that have seeds.

    In units of the standard error of a share of so many pictures, in which models and data sets agree; a deviation of
    one model over three seeds is luck.
    """

    share: float
    df: int  # degrees of freedom

    def variance(self, found: Result) -> float:
        """Return the variance that the seeds leave in an accuracy, of one run as of a mean."""
        return self.share**2 * binomial(found) / found.seeds


def pool_churn(results: Sequence[Result]) -> Churn:
    """Return the churn of all groups of seeds among the results."""
    groups = [(found.seeds - 1, found.std**2 / binomial(found)) for found in results if found.std is not None]
    df = sum(weight for weight, _ in groups)
    return Churn(math.sqrt(sum(weight * ratio for weight, ratio in groups) / df) if df else 0.5, max(df, 1))


@final
@dataclasses.dataclass(frozen=True)
class Difference:
    """A difference of two accuracies, its standard error and the degrees of freedom of that."""

    value: float
    error: float
    df: float

    def p(self, expected: float = 0.0, error: float = 0.0) -> float:
        """Return the two-sided p of a value that is `expected`, itself known with an error."""
        t = abs(self.value - expected) / math.hypot(self.error, error) if self.value != expected else 0.0
        return float(2 * stdtr(self.df, -t))

    def describe(self) -> str:
        """Return it in points, with its standard error."""
        return f"{format_points(100 * self.value)} ± {100 * self.error:.2f}"


def subtract(a: Result, b: Result, churn: Churn) -> Difference:
    """Return a less b. The variance is that of pictures and that of seeds; as a picture that only some seeds get right
    is in both, it is a little too large.
    """
    seeds = churn.variance(a) + churn.variance(b)
    return add_noise(a.accuracy - b.accuracy, compare_pictures(a, b), seeds, min(a.images, b.images), churn)


def add_noise(value: float, pictures: float, seeds: float, images: int, churn: Churn) -> Difference:
    """Return a difference with the variances of so many pictures and of seeds; df by Satterthwaite, the seeds' few."""
    df = (pictures + seeds) ** 2 / (seeds**2 / churn.df + pictures**2 / max(images - 1, 1))
    return Difference(value, math.sqrt(pictures + seeds), df)


def compare_pictures(a: Result, b: Result) -> float:
    """Return the variance that the choice of pictures leaves in a difference: picture by picture where both say which
    were wrong, of the seeds that do; else as of two samples.
    """
    every = [[find_wrong(found, place) for place in range(found.seeds)] for found in (a, b)]
    lists = [[wrong for wrong in wrongs if wrong is not None] for wrongs in every]
    if a.images != b.images or not all(lists):
        return binomial(a) + binomial(b)
    apart: dict[int, float] = collections.defaultdict(float)  # by picture: the share of seeds wrong, a's less b's
    for sign, wrongs in zip((1, -1), lists, strict=True):
        for place in itertools.chain.from_iterable(wrongs):
            apart[place] += sign / len(wrongs)
    mean, square = sum(apart.values()) / a.images, sum(share**2 for share in apart.values()) / a.images
    return (square - mean**2) / a.images


def find_wrong(found: Result, place: int) -> Sequence[int] | None:
    """Return the pictures that one run of a result is wrong about; None if they were not recorded."""
    return found.runs[place].evaluation.get("classification", {}).get(found.split, {}).get("wrong")


def binomial(found: Result) -> float:
    """Return the variance of a share of so many pictures."""
    return found.accuracy * (1 - found.accuracy) / max(found.images, 1)


def adjust(ps: Sequence[float]) -> list[float]:
    """Return Holm's p of several tests: below 0.05, the chance that any of them is wrong is below 0.05."""
    order = sorted(range(len(ps)), key=ps.__getitem__)
    steps = itertools.accumulate(((len(ps) - rank) * ps[place] for rank, place in enumerate(order)), max)
    adjusted = dict(zip(order, steps, strict=True))
    return [min(1.0, adjusted[place]) for place in range(len(ps))]


def format_points(points: float, form: str = ".2f") -> str:
    """Return a difference in points, with its sign."""
    return f"{points:+{form}}".replace("-", "−")


def format_p(p: float) -> str:
    """Return a p with two digits."""
    return "< 0.0001" if p < 1e-4 else f"{p:.2g}" if p < 0.1 else f"{p:.2f}"
