"""What our runs say about each published figure and each order of two models, by the rule at the end of results.md.

The rule was written before the runs of docs/results/queue.toml.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import final

from kerneq.gradients import Unrolled
from kerneq.lab.report.results import Result, load_experiments
from kerneq.lab.run.config import differences
from kerneq.lab.run.folder import INCIDENTAL
from kerneq.models import MODELS, ClassifierConfig, Published, task

from .noise import Churn, Difference, add_noise, adjust, binomial, format_p, format_points, subtract

NINE = "nine residual blocks"
PARTS = {"refinements": NINE, "stem": "another stem", "norm": "another norm", "kernel.gamma": "another γ"}
UNSTATED = {"model.max_steps", "model.check_every", "model.kernel.gamma.floor"}  # by the papers
UNTUNED = ("resnet50", "mdeq-10m")  # the recipe was made for GEQ; their rates were never chosen
TWINS = {"kerdeq-5m": "geq-5m"}  # by our recipe they differ in γ, a unit of length: one function before training


@final
@dataclasses.dataclass(frozen=True)
class Figure:
    """A published accuracy and one of ours, or none."""

    model: str
    pictures: str
    published: Published
    found: Result | None
    verdict: str  # higher, as published, lower, not compared; empty for pictures of another size, and where no run is

    @property
    def grade(self) -> str:
        """A to D, as results.md says."""
        if self.found is None:
            return "D"
        whole = self.found.settings[:1] == (f"{self.name}-paper",) and self.deviates.issubset(UNSTATED)
        return ("A" if self.found.seeds >= 3 else "B") if whole else "C"

    @property
    def name(self) -> str:
        """The experiment file that is nearest to ours, without -paper."""
        return self.found.settings[0].removesuffix("-paper") if self.found and self.found.settings else ""

    @property
    def deviates(self) -> set[str]:
        """The settings that are not those of the -paper file."""
        assert self.found is not None
        keys = differences(load_experiments()[f"{self.name}-paper"], self.found.runs[0].config)
        return {key for key in keys if key not in ("seed", *INCIDENTAL)}

    def list_changes(self) -> list[str]:
        """Return in what ours is not the papers': recipe, model, epochs, pictures."""
        assert self.found is not None
        if f"{self.name}-paper" not in load_experiments():
            return ["no file of the papers' recipe"]
        keys, epochs = self.deviates, load_experiments()[f"{self.name}-paper"].training.epochs
        recipe = any(key.split(".")[0] in ("augment", "optimizer", "schedule") for key in keys)
        model = [words for part, words in PARTS.items() if f"model.{part}" in keys]
        model += ["another γ"] if any(key.startswith("model.kernel.gamma.") for key in keys) else []
        if not recipe:
            model += ["other solver steps"] if "model.max_steps" in keys else []
            model += ["another gradient"] if any(key.startswith("model.gradient.") for key in keys) else []
            model += [f"{self.found.epochs} of {epochs} epochs"] if self.found.epochs < epochs else []
            return ["the papers' way, but " + ", ".join(dict.fromkeys(model))] if keys else []
        twin = [f"before training the same function as {TWINS[self.model]}"] if self.model in TWINS else []
        size = ["smaller pictures"] if " px" in self.pictures else []
        return ["our recipe", *dict.fromkeys(model), *twin, *size]

    def row(self) -> tuple[str, ...]:
        """Return it as a row of the table of all published figures."""
        first = (self.model, self.pictures, f"{self.published}")
        if self.found is None:
            return (*first, "", "", "", "", "D", "no run")
        verdict = f" {self.verdict}" if self.verdict else ""
        gap = format_points(100 * self.found.accuracy - self.published.percent) + verdict if self.verdict else "–"
        ours = f"{100 * self.found.accuracy:.2f} ± {100 * self.found.std:.2f}" if self.found.std else ""
        ours = ours or f"{100 * self.found.accuracy:.2f}"
        reason = [*self.list_changes(), *(["untuned"] if self.model in UNTUNED else [])]
        return (*first, ours, gap, f"{self.found.epochs}", f"{self.found.seeds}", self.grade, ", ".join(reason))


@final
@dataclasses.dataclass(frozen=True)
class Order:
    """Two models of which one is published to be ahead, and the two results of ours that are compared."""

    pictures: str
    gap: float  # published, in points
    spread: float  # the published ± of the gap, in points
    ahead: Result
    behind: Result
    unlike: Sequence[str]  # settings in which the two differ, outside the model
    ours: Difference

    @property
    def name(self) -> str:
        return f"{self.ahead.model} before {self.behind.model}"

    @property
    def alone(self) -> list[Result]:
        """The results of one run."""
        return [found for found in (self.ahead, self.behind) if found.seeds == 1]

    def judge_sign(self, p: float) -> str:
        """Return the verdict about the sign, by Holm's p."""
        return "undecided" if p >= 0.05 else "confirmed" if self.ours.value > 0 else "reversed"

    def judge_size(self) -> str:
        """Return how the difference compares with the published one; a dash where the pictures are others."""
        if " px" in self.pictures:
            return "–"
        same = self.ours.p(self.gap / 100, self.spread / 100) >= 0.05
        return "compatible" if same else "larger" if self.ours.value > self.gap / 100 else "smaller"

    def row(self, p: float) -> tuple[str, ...]:
        """Return it as a row of the table of orders."""
        seeds = f"{self.ahead.seeds}, {self.behind.seeds}"
        numbers = (format_points(self.gap, "g"), self.ours.describe(), format_p(self.ours.p()), format_p(p))
        recipe = f"{'Muon' if self.ahead.runs[0].config.optimizer.muon else 'SGD'}, {self.ahead.epochs}"
        return (self.name, self.pictures, recipe, *numbers, self.judge_sign(p), self.judge_size(), seeds)


@final
@dataclasses.dataclass(frozen=True)
class Task:
    """What is published on a task, and what was reached here on its test images: for each model what counts first."""

    name: str
    pictures: str  # the name, with the side of our pictures where that is not the papers'
    reached: Mapping[str, Sequence[Result]]

    @property
    def published(self) -> dict[str, Published]:
        """The papers' figures by model."""
        return {model: entry.published[self.name] for model, entry in MODELS.items() if self.name in entry.published}

    def figures(self, churn: Churn) -> list[Figure]:
        """Return every published figure with the result that counts, and with the nearest to its -paper file."""
        found: list[Figure] = []
        for model, published in self.published.items():
            results = self.reached.get(model, ())
            papers = [one for one in results[1:] if one.settings and one.settings[0].endswith("-paper")]
            some: list[Result | None] = [*results[:1], *papers[:1]]
            for one in some or [None]:
                verdict = self.judge(one, published, churn) if one else ""
                found.append(Figure(model, self.pictures, published, one, verdict))
        return found

    def judge(self, found: Result, published: Published, churn: Churn) -> str:
        """Return whether a result is higher than published, lower, or neither."""
        if self.pictures != self.name:
            return ""
        pictures = binomial(found) + ((published.std or 0) / 100) ** 2
        gap = found.accuracy - published.percent / 100
        p = add_noise(gap, pictures, churn.variance(found), found.images, churn).p()
        nearest = load_experiments().get(found.settings[0]) if found.settings else None
        if p >= 0.05:
            return "as published"
        short = nearest is not None and 2 * found.epochs < nearest.training.epochs
        return "higher" if gap > 0 else "not compared" if short else "lower"

    def orders(self, churn: Churn) -> list[Order]:
        """Return the published orders of two models that both have runs, the pairs of results chosen by the rule."""
        orders = []
        for high, low in itertools.permutations(self.reached, 2):
            papers = [self.published[high], self.published[low]]
            gap = round(papers[0].percent - papers[1].percent, 2)
            spread = math.hypot(*(paper.std or 0 for paper in papers))
            if gap > spread:
                pairs = itertools.product(self.reached[high], self.reached[low])
                a, b = min(pairs, key=lambda pair: (len(list_unlike(*pair)), sum(1 / found.seeds for found in pair)))
                ours = subtract(a, b, churn)
                orders.append(Order(self.pictures, gap, spread, a, b, list_unlike(a, b), ours))
        return orders


def list_unlike(a: Result, b: Result) -> list[str]:
    """Return the settings outside [model] in which two results differ; one may have ended before its last epoch."""
    keys = differences(a.runs[0].config, b.runs[0].config)
    if a.epochs != b.epochs and "training.epochs" not in keys:
        keys.append("number of epochs trained")
    return [key for key in keys if key not in ("seed", *INCIDENTAL) and not key.startswith("model.")]


def is_control(found: Result) -> bool:
    """Return whether the model is a control, with no equilibrium in it, and so not the published one."""
    settings = found.runs[0].config.model.settings
    return isinstance(settings, ClassifierConfig) and (settings.explicit or isinstance(settings.gradient, Unrolled))


def group_by_task(results: Sequence[Result]) -> list[Task]:
    """Return all tasks on which figures are published, in the zoo's order, with our results on their test images."""
    names = list(dict.fromkeys(name for entry in MODELS.values() for name in entry.published))
    reached: dict[str, dict[str, dict[str, list[Result]]]] = {name: {} for name in names}
    for found in results:
        pictures = task(found.data, found.subset, found.split)
        name = pictures.partition(" at ")[0]
        known = found.model in MODELS and name in MODELS[found.model].published and not is_control(found)
        if found.split != "validation" and known:
            reached[name].setdefault(pictures, {}).setdefault(found.model, []).append(found)
    return [Task(name, *one) for name in names for one in (reached[name].items() or [(name, {})])]


def list_orders(tasks: Sequence[Task], churn: Churn) -> tuple[dict[str, list[tuple[Order, float]]], list[Order]]:
    """Return the compared orders with Holm's p, by the single run that they hang on (first those on none), and the
    orders that are not compared.
    """
    every = [order for one in tasks for order in one.orders(churn)]
    compared = [order for order in every if not order.unlike]
    ps = adjust([order.ours.p() for order in compared])
    count = collections.Counter(found.runs[0].label for order in compared for found in order.alone)
    groups: dict[str, list[tuple[Order, float]]] = {"": []}
    for order, p in zip(compared, ps, strict=True):
        hangs = max((found.runs[0].label for found in order.alone), key=lambda label: count[label], default="")
        groups.setdefault(hangs, []).append((order, p))
    some = sorted(groups.items(), key=lambda group: (group[0] != "", -len(group[1])))
    return dict(some), [order for order in every if order.unlike]
