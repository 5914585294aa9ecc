"""The papers' tables with our accuracies in them, and whether the orders that they publish are found here, too."""

import collections
import dataclasses
import itertools
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Literal, final

from kerneq.lab.report.page import DASH, Paragraph, Section, Table, format_number
from kerneq.lab.report.results import NOISE, Reported, Result
from kerneq.lab.run.config import differences
from kerneq.lab.run.folder import INCIDENTAL
from kerneq.models import MODELS, Published, task

# Where a difference lies: above the noise, within it or below it. The difference of two models may also be within the
# noise and smaller than published, or of runs that do not compare. The words are those for a figure, and for an order.
Kind = Literal["above", "within", "below", "smaller", "unlike"]
FIGURES: dict[Kind, str] = {"above": "higher", "within": "as published", "below": "lower"}
ORDERS: dict[Kind, str] = {
    "below": "reversed",
    "above": "confirmed",
    "smaller": "smaller than published",
    "within": "undecided",
    "unlike": "not compared",
}
# How these tables are made, a paragraph each.
HOW = (
    "Runs of experiments whose names end in -paper follow the papers' recipes, all others our own, some with other "
    "parts in the model (the last column says which): a figure above the published one confirms no recipe.",
    "Of a model's results one counts: the settings of its experiment file or the nearest to them, training that came "
    "to its end, runs whose weights are here before others; what a run reached on the test images plays no part. "
    "Below it is the nearest to each other experiment, such as -paper; all runs are in the chapters. Ours is the mean "
    "± standard deviation over seeds, or one run with its 95 % interval; the last column repeats it.",
    "An order is published where two figures differ by more than the ± of their difference; it is looked for in "
    "the two results whose settings outside [model] differ least, of several such pairs in the one with the most "
    "seeds, and where the settings differ it is not compared. Undecided is what lies within the noise; smaller "
    "than published, where besides the published lead is ruled out. Where no seeds are named it is one run.",
    "Noise is 1.96 standard errors: those of a share of so many images (for an order, of differences picture by "
    "picture where records of both have them), of the seeds, and the papers' ±, which is also taken for what "
    "another seed would change where there is one run of ours; where none is published (five-classes) that is left "
    "out.",
    "five-classes: classes 0 to 4 of CIFAR-10; super-classes, unseen-classes: the 20 super-classes of CIFAR-100, "
    "in pictures of the sub-classes that were, and were not, trained on.",
)


@final
@dataclasses.dataclass(frozen=True)
class Order:
    """Two models of which one is published to be ahead, and the results of ours that say whether it is."""

    kind: Kind
    pictures: str  # on which
    gap: float  # published, in points
    ahead: Result
    behind: Result
    unlike: Sequence[str]  # settings in which the two differ, outside the model

    def row(self) -> tuple[str, ...]:
        """Return the order as a row of a table."""
        a, b = self.ahead, self.behind
        gaps = (format_points(self.gap, "g"), format_points(100 * (a.accuracy - b.accuracy)))
        words = ORDERS[self.kind] + (f": another {', '.join(self.unlike)}" if self.unlike else "")
        return (f"{a.model} before {b.model}", self.pictures, *gaps, words, describe(a), describe(b))


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

    def section(self) -> Section:
        """Return the papers' table with ours in it."""
        heads = ("model", "parameters", "epochs", "published, %", "ours, %", "difference")
        last = ("verdict", "runs", "kerneq train …")
        rows: list[tuple[str, ...]] = []
        kinds = self.judge_figures()
        for model, published in self.published.items():
            if model not in self.reached:
                rows.append((model, DASH, DASH, f"{published}", "not run yet", DASH, DASH, DASH, DASH))
                continue
            counting, *_ = self.reached[model]
            nearest = {found.settings[:1]: found for found in reversed(self.reached[model])}
            for found in reversed(nearest.values()):
                rows.append(make_row(found, published, kinds.get(model) if found is counting else None))
        larger = Paragraph("The papers' pictures have another size: only orders compare.")
        note = [] if self.name == self.pictures else [larger]
        return Section(f"Published and ours on {self.pictures}", [*note, Table((*heads, *last), rows, last)])

    def judge_figures(self) -> dict[str, Kind]:
        """Return whether ours is higher, the same or lower, for each model with a run on the papers' pictures."""
        kinds = {}
        for model, (found, *_) in self.reached.items():
            if found.published is not None:
                variance = found.variance + self.another_seed(found) + self.spread(model)
                kinds[model] = judge(found.accuracy - found.published, variance)
        return kinds

    def judge_orders(self) -> list[Order]:
        """Return whether the order of two models with runs is found, undecided or reversed, where one is published.

        Undecided, the difference may still be smaller than published, if the pictures are the papers'.

        Compared are the two results whose settings outside [model] differ least, of several such pairs the one with the
        most seeds: 1/n + 1/m is what seeds leave of the variance. Where the settings do differ they may be what makes
        the difference, and there is no verdict.
        """
        orders = []
        for high, low in itertools.permutations(self.reached, 2):
            papers = [self.published[high], self.published[low]]
            gap = round(papers[0].percent - papers[1].percent, 2)
            if gap > math.hypot(*(paper.std or 0 for paper in papers)):
                pairs = itertools.product(self.reached[high], self.reached[low])
                a, b = min(pairs, key=lambda pair: (len(list_unlike(*pair)), sum(1 / found.seeds for found in pair)))
                unlike, difference, variance = list_unlike(a, b), a.accuracy - b.accuracy, self.variance(a, b)
                kind: Kind = "unlike" if unlike else judge(difference, variance)
                if kind == "within" and self.name == self.pictures:
                    theirs = self.spread(high) + self.spread(low)
                    kind = "smaller" if judge(difference - gap / 100, variance + theirs) == "below" else kind
                orders.append(Order(kind, self.pictures, gap, a, b, unlike))
        return orders

    def spread(self, model: str) -> float:
        """Return the variance over seeds that is published of a model."""
        return ((self.published[model].std or 0) / 100) ** 2

    def another_seed(self, found: Result) -> float:
        """Return the variance that another seed would add to one run, which cannot say it itself: the published one."""
        return self.spread(found.model) if found.std is None else 0.0

    def variance(self, a: Result, b: Result) -> float:
        """Return the variance of the difference of two accuracies.

        It is that picture by picture where both have runs that recorded which pictures were wrong. Fewer seeds than are
        in the mean differ more, so the variance is not too small.
        """
        seeds = self.another_seed(a) + self.another_seed(b)
        every = [[read_wrong(one, found.split) for one in found.runs] for found in (a, b)]
        lists = [[wrong for wrong in wrongs if wrong is not None] for wrongs in every]
        if a.images != b.images or not all(lists):
            return a.variance + b.variance + seeds
        apart: dict[int, float] = collections.defaultdict(float)  # by picture: the share of seeds wrong, a's less b's
        for sign, wrongs in zip((1, -1), lists, strict=True):
            for place in itertools.chain.from_iterable(wrongs):
                apart[place] += sign / len(wrongs)
        mean, square = sum(apart.values()) / a.images, sum(share**2 for share in apart.values()) / a.images
        return (square - mean**2) / a.images + a.seed_variance + b.seed_variance + seeds


def compare(results: Sequence[Result]) -> list[Section]:
    """Return the chapter about the papers' figures; none where no run was evaluated on a task of theirs."""
    tasks = group_by_task(results)
    if not tasks:
        return []
    orders = sorted((o for one in tasks for o in one.judge_orders()), key=lambda order: [*ORDERS].index(order.kind))
    first = Section("The papers' figures", [Paragraph(summarize_verdicts(tasks, orders))], chapter=True)
    last = Section("How these tables are made", [Paragraph(text) for text in HOW])
    sections = [first, *(one.section() for one in tasks)]
    if orders:
        heads = ("order", "on", "published", "ours", "verdict", "the first", "the second")
        table = Table(heads, [order.row() for order in orders], ("on", *heads[4:]))
        sections.append(Section("Published orders of two models", [table]))
    return [*sections, last]


def summarize_verdicts(tasks: Sequence[Task], orders: Sequence[Order]) -> str:
    """Return how many figures and orders are found here, and on which tasks there is no run."""
    words = [count_verdicts("figures", FIGURES, [kind for one in tasks for kind in one.judge_figures().values()])]
    if orders:
        words.append(count_verdicts("orders of two models", ORDERS, [order.kind for order in orders]))
    reached = {one.name for one in tasks}
    if absent := [name for name in list_tasks() if name not in reached]:
        words.append(f"No run yet on {', '.join(absent)}.")
    return " ".join(words)


def list_tasks() -> list[str]:
    """Return the names of all tasks on which figures are published, in the order of the zoo."""
    return list(dict.fromkeys(name for entry in MODELS.values() for name in entry.published))


def group_by_task(results: Sequence[Result]) -> list[Task]:
    """Return the results on test images by task, where the model's figure is published; tasks in the zoo's order."""
    reached: dict[tuple[str, str], dict[str, list[Result]]] = {}
    for found in results:
        pictures = task(found.data, found.subset, found.split)
        name = pictures.partition(" at ")[0]
        if found.split != "validation" and found.model in MODELS and name in MODELS[found.model].published:
            reached.setdefault((name, pictures), {}).setdefault(found.model, []).append(found)
    return [Task(*key, reached[key]) for key in sorted(reached, key=lambda key: list_tasks().index(key[0]))]


def count_verdicts(what: str, words: Mapping[Kind, str], kinds: Sequence[Kind]) -> str:
    """Return how many verdicts are of each kind, as a sentence."""
    many = [f"{kinds.count(kind)} {word}" for kind, word in words.items() if kind in kinds]
    return f"Of {len(kinds)} published {what}: {', '.join(many) or 'none'}."


def make_row(found: Result, published: Published, kind: Kind | None) -> tuple[str, ...]:
    """Return a result as a row of the papers' table."""
    first, *others = found.runs
    gap = DASH if found.published is None else format_points(100 * (found.accuracy - found.published))
    numbers = (format_number(found.parameters, ","), first.epochs, f"{published}", format_ours(found), gap)
    names = ", ".join((first.label, *(one.label.replace(first.label, "…") for one in others)))
    seeds = ", ".join(f"{one.config.seed}" for one in others)
    command = (shlex.join(found.settings) or DASH) + (f" (and seed={seeds})" if seeds else "")
    return (found.model, *numbers, FIGURES[kind] if kind else DASH, names, command)


def describe(found: Result) -> str:
    """Return an accuracy, and the runs it is of."""
    seeds = f", {found.seeds} seeds" if found.seeds > 1 else ""
    return f"{100 * found.accuracy:.2f} of {found.runs[0].label}{seeds}"


def format_ours(found: Result) -> str:
    """Return an accuracy in percent, with its deviation over seeds or, of one run, its 95 % interval."""
    if found.std is not None:
        return f"{100 * found.accuracy:.2f} ± {100 * found.std:.2f}, {found.seeds} seeds"
    interval = found.runs[0].interval(found.split)
    return f"{100 * found.accuracy:.2f}" + (f" ({100 * interval[0]:.2f}–{100 * interval[1]:.2f})" if interval else "")


def format_points(points: float, form: str = ".2f") -> str:
    """Return a difference in points, with its sign."""
    return f"{points:+{form}}".replace("-", "−")


def judge(difference: float, variance: float) -> Kind:
    """Return where a difference lies, with a noise of 95 %."""
    noise = NOISE * math.sqrt(variance)
    return "within" if abs(difference) <= noise else "above" if difference > 0 else "below"


def list_unlike(a: Result, b: Result) -> list[str]:
    """Return the settings outside [model] in which two results differ; one may have ended before its last epoch."""
    keys = differences(a.runs[0].config, b.runs[0].config)
    if a.epochs != b.epochs and "training.epochs" not in keys:
        keys.append("number of epochs trained")
    return [key for key in keys if key not in ("seed", *INCIDENTAL) and not key.startswith("model.")]


def read_wrong(one: Reported, split: str) -> Sequence[int] | None:
    """Return the places of the images that a run is wrong about; None if they were not recorded."""
    return one.evaluation.get("classification", {}).get(split, {}).get("wrong")
