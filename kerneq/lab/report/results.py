"""What runs reached: each run under a name of its own, and the means over seeds, beside the published figures."""

import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, final

import torch

from ...models import MODELS, Published, from_config, parameters, task
from ...settings import NOTHING, values
from ..data import DataError, find
from ..evaluate import over_seeds
from ..evaluate.classification import wilson_interval
from ..evaluate.scores import but_for_seed, spread
from ..run import Run, find_runs
from ..run.config import EXPERIMENTS, Config, ConfigError, differences, load
from ..run.folder import INCIDENTAL

NOISE = 1.96  # standard errors: 95 %
SUBSET_CLASSES = {"first-five-classes": 5, "four-of-five-subclasses": 20}  # other subsets have all classes


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Reported:
    """A run as a report shows it."""

    run: Run
    label: str  # its name, with as many of its folders as tell it from the others

    @functools.cached_property
    def config(self) -> Config:
        return self.run.config()

    @functools.cached_property
    def evaluation(self) -> dict[str, Any]:
        return self.run.evaluation()

    @functools.cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The metrics of each epoch."""
        return self.run.rows()

    @functools.cached_property
    def validation(self) -> float | None:
        """The best accuracy on held-out images."""
        return self.run.best_accuracy()

    @property
    def data(self) -> str:
        """What it was trained on, in words."""
        return self.config.data.described

    def scores(self, split: str) -> dict[str, Any]:
        """Return what was measured on the `test` images, or on those of `unknown` sub-classes; empty if nothing was."""
        return self.evaluation.get("scores", {}).get(split, {})

    def accuracy(self, split: str = "test") -> float | None:
        """Return the accuracy on a split, for `validation` the best of all epochs; None if it was not evaluated."""
        return self.validation if split == "validation" else self.scores(split).get("accuracy")

    def interval(self, split: str = "test") -> tuple[float, float] | None:
        """Return the accuracies that the images do not contradict, 95 %."""
        accuracy, images = (self.scores(split).get(name) for name in ("accuracy", "images"))
        return wilson_interval(round(accuracy * images), images) if accuracy is not None and images else None

    def published(self, split: str = "test") -> Published | None:
        """Return the paper's accuracy of the model of this name on this task; None for pictures of another size."""
        entry, data = MODELS.get(self.config.model.name), self.config.data
        return entry.published.get(task(data.pictures, data.subset, split)) if entry else None

    @functools.cached_property
    def settings(self) -> tuple[str, ...]:
        """The arguments of `kerneq train` that repeat it: the nearest experiment with this model, and changes of it.

        An experiment on the same data is nearer than any other. Empty where there is none, or where its changes are
        refused on the way.
        """

        def distance(name: str) -> tuple[bool, int, int]:
            data, own = load_experiments()[name].data, self.config.data
            elsewhere = (data.name, data.subset) != (own.name, own.subset)
            return elsewhere, len(list_changes(load_experiments()[name], self.config)), len(name)

        same = (name for name, config in load_experiments().items() if config.model.name == self.config.model.name)
        nearest, words = min(same, key=distance, default=None), list[str]()
        if nearest is None:
            return ()
        # Repeat, because a new `name` in a table resets the other settings of the table to its defaults.
        try:
            while more := [word for word in list_changes(load(nearest, words), self.config) if word not in words]:
                words += more
        except ConfigError:
            return ()
        return (nearest, *words)

    @functools.cached_property
    def parameters(self) -> int | None:
        """How many numbers training could change, from its evaluation or its settings; None for unknown classes."""
        if (known := self.evaluation.get("parameters")) is not None:
            return int(known)
        try:
            data_set = find(self.config.data.name)
        except DataError:
            return None
        classes = SUBSET_CLASSES.get(self.config.data.subset) or len(self.run.classes() or data_set.class_names or ())
        if classes == 0:
            return None
        with torch.device("meta"):
            return parameters(from_config(self.config.model.settings, classes, len(data_set.mean)))

    @property
    def epochs(self) -> str:
        """How many epochs were trained, and of how many if it ended early."""
        done, meant = len(self.rows), self.config.training.epochs
        return f"{done}" if done >= meant else f"{done} of {meant}"

    @property
    def weights(self) -> bool:
        """Whether it can be evaluated: records that were handed on without their weights cannot."""
        return any(self.run.checkpoint(which).exists() for which in ("best", "last"))

    @property
    def seconds(self) -> float:
        """Time of training on all its devices together: the epochs times the median one, as the first compiles."""
        processes, epochs = self.run.environment().get("processes"), [row["seconds"] for row in self.rows]
        return float(median(epochs or [0.0])) * len(epochs) * (processes if isinstance(processes, int) else 1)


def gather(folders: Sequence[Path]) -> list[Reported]:
    """Return the runs in some folders, or that ship under some names, by recipe, epochs, model and seed.

    Not by accuracy: what stands first would be the luckiest on these images.
    """
    runs = find_runs(folders)
    found = [Reported(run, label) for run, label in zip(runs, shorten([run.path for run in runs]), strict=True)]
    return sorted(found, key=order_run)


def order_run(one: Reported) -> tuple[object, ...]:
    """Return where a run stands among others: by recipe, epochs, model and seed, and by no accuracy."""
    model = one.config.model.name
    place = list(MODELS).index(model) if model in MODELS else len(MODELS)
    return (name_recipe(one), place, one.label.split("/")[-1], one.config.seed)


def name_recipe(one: Reported) -> str:
    """Return how a run was trained, in words."""
    config = one.config
    augment = config.augment
    tricks = [
        "Muon" if config.optimizer.muon else "SGD",
        "RandAugment" if augment.randaugment else "",
        f"CutMix on {100 * augment.mixed:.0f} %" if augment.cutmix else "",
        f"cutout {augment.cutout}" if augment.cutout else "",
        "1 epoch" if one.epochs == "1" else f"{one.epochs} epochs",
        f"{100 * config.data.validation:.0f} % of the pictures held out" if config.data.validation else "all pictures",
    ]
    return ", ".join(filter(None, tricks))


def shorten(paths: Sequence[Path]) -> list[str]:
    """Return the shortest endings of the paths that tell them apart."""
    parts = [path.resolve().parts for path in paths]

    def ending(own: tuple[str, ...]) -> str:
        lengths = range(1, len(own) + 1)
        unique = (n for n in lengths if sum(other[-n:] == own[-n:] for other in parts) == 1)
        return "/".join(own[-next(unique, len(own)) :])

    return [ending(own) for own in parts]


@functools.cache
def load_experiments() -> dict[str, Config]:
    """Return the experiments of the package by name."""
    return {file.stem: load(file.stem) for file in sorted(EXPERIMENTS.glob("*.toml"))}


def list_changes(first: Config, second: Config) -> list[str]:
    """Return the `key=value` that make the second run of the first, but for how it is computed."""
    wanted = {key: NOTHING if value is None else value for key, value in values(second).items()}
    keys = (key for key in differences(first, second) if key in wanted and key not in INCIDENTAL)
    return [f"{key}={json.dumps(wanted[key])}".replace('"', "") for key in keys]


@final
@dataclasses.dataclass(frozen=True)
class Result:
    """An accuracy of a model: of one run, or the mean of runs that differ in their seed only."""

    model: str
    data: str
    subset: str
    split: str  # test, unknown (test images of sub-classes that were not trained on) or validation
    accuracy: float
    std: float | None  # over the seeds; None for one
    seeds: int
    images: int  # that the accuracy is of; 0: not recorded
    parameters: int | None
    published: float | None
    epochs: int
    seconds: float  # of training on all devices together, without what is special to one epoch; the mean over the seeds
    device: str
    settings: tuple[str, ...]  # the nearest experiment of the package, and what was changed of it
    runs: tuple[Reported, ...]  # by their seeds

    @property
    def name(self) -> str:
        """The label of its run, or what those of its seeds have in common."""
        common = os.path.commonprefix([one.label for one in self.runs])
        return re.sub(r"[\W_]*(seed[\W_]*\d*)?$", "", common) if self.seeds > 1 else common

    @property
    def seed_variance(self) -> float:
        """The variance of the accuracy that the seeds leave."""
        return 0.0 if self.std is None else self.std**2 / self.seeds

    @property
    def variance(self) -> float:
        """Of the accuracy: that of a share of so many images, and that of the mean over the seeds.

        A picture that only some seeds get right is in both: with several seeds it is a little too large.
        """
        return self.accuracy * (1 - self.accuracy) / max(self.images, 1) + self.seed_variance

    @property
    def interval(self) -> tuple[float, float] | None:
        """The accuracies that images and seeds do not contradict, 95 %; None where the images are not recorded."""
        if self.std is None:
            return self.runs[0].interval(self.split)
        noise = NOISE * math.sqrt(self.variance)
        return (self.accuracy - noise, self.accuracy + noise) if self.images else None

    def row(self) -> dict[str, Any]:
        """Return the result as JSON has it, its runs by their folders."""
        return {**vars(self), "runs": [one.run.path.as_posix() for one in self.runs]}


def summarize(runs: Sequence[Reported]) -> list[Result]:
    """Return one result for each group of seeds and each run that is in none; runs without an accuracy are left out.

    Of a model's results the one that counts is first, and which that is no accuracy decides: the experiment with the
    shortest name, the fewest changes of its settings, training that came to its end, weights that are here.
    """
    found = []
    for group in group_seeds(runs):
        splits = [split for split in ("test", "unknown") if any(one.scores(split) for one in group)]
        for split in splits or ["validation"]:
            shares = {one: share for one in group if (share := one.accuracy(split)) is not None}
            found += [_average(split, shares)] if shares else []
    return sorted(found, key=_rank)


def group_seeds(runs: Sequence[Reported]) -> list[list[Reported]]:
    """Return the groups of runs that differ in their seed only, by their seeds; any other run is a group of its own.

    A copy of a run in a group, as one that was exported with its weights, is left out: it would be the seed that
    somebody chose, beside the mean.
    """
    by_path = {one.run.path: one for one in runs}
    groups = [[by_path[run.path] for run in group] for group in over_seeds([one.run for one in runs])]
    trained = {one: (but_for_seed(one.run), one.config.seed) for one in runs}
    grouped = {trained[one] for group in groups for one in group}
    groups += [[one] for one in runs if trained[one] not in grouped]
    return [sorted(group, key=lambda one: one.config.seed) for group in groups]


def _average(split: str, shares: Mapping[Reported, float]) -> Result:
    """Return the result of runs of one seed each, by their accuracies on a split."""
    first, (mean, std) = next(iter(shares)), spread([*shares.values()])
    published = first.published(split)
    return Result(
        model=first.config.model.name,
        data=first.config.data.pictures,
        subset=first.config.data.subset,
        split=split,
        accuracy=round(mean, 6),
        std=None if std is None else round(std, 6),
        seeds=len(shares),
        images=first.scores(split).get("images") or 0,
        parameters=first.parameters,
        published=published.percent / 100 if published else None,
        epochs=len(first.rows),
        seconds=round(fmean(one.seconds for one in shares), 1),
        device=str(first.run.environment().get("device", "unknown")),
        settings=first.settings,
        runs=tuple(shares),
    )


def _rank(found: Result) -> tuple[Any, ...]:
    """Return where a result stands among others: by its task and model, then by what counts."""
    first, words = found.runs[0], found.settings
    changed = sum(not word.startswith("seed=") for word in words)
    early = found.epochs < first.config.training.epochs
    absent = not any(one.weights for one in found.runs)
    counts = (len(words[0]) if words else math.inf, changed, early, absent, first.label)
    return (found.data, found.subset, found.model, found.split, *counts)
