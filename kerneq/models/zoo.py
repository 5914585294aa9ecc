"""Every model of the papers and the baselines they are compared with, by name: the entries of zoo.toml."""

import dataclasses
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from .. import settings as tables
from ..tensors import check_whole
from .baselines import MDEQ, MDEQConfig, ResNet, ResNetConfig
from .certified import CertifiedClassifier, CertifiedConfig
from .classifier import AbstractModel, Classifier, ClassifierConfig, DenseClassifier, DenseConfig, KernelConfig
from .lipschitz import LipschitzClassifier

ModelConfig = KernelConfig | CertifiedConfig | MDEQConfig | ResNetConfig

# The models that have the defaults of their class; all others are changes of these.
DEFAULTS: dict[str, ModelConfig] = {
    "geq-5m": ClassifierConfig(),
    "mdeq-10m": MDEQConfig(),
    "resnet18": ResNetConfig(),
    "geq-dense-tiny": DenseConfig(),
    "certified-small": CertifiedConfig(),
}
CLASSES: dict[type, Callable[[Any, int, int], AbstractModel]] = {
    ClassifierConfig: Classifier,
    DenseConfig: DenseClassifier,
    CertifiedConfig: CertifiedClassifier,
    MDEQConfig: MDEQ,
    ResNetConfig: ResNet,
}
# What the papers call parts of a data set; `unknown` are the sub-classes that were not trained on.
PARTS = {
    ("cifar10", "first-five-classes"): "five-classes",
    ("cifar100-coarse", "four-of-five-subclasses"): "super-classes",
    ("cifar100-coarse", "unknown"): "unseen-classes",
}


@dataclasses.dataclass(frozen=True)
class Published:
    """An accuracy as a paper gives it, in percent, and its ± where there is one."""

    percent: float
    std: float | None = None

    def __str__(self) -> str:
        return f"{self.percent}" if self.std is None else f"{self.percent} ± {self.std}"


@dataclasses.dataclass(frozen=True)
class Measured:
    """A test accuracy of ours, with its records' folders; the runs may have changed settings of the model."""

    accuracy: float
    std: float | None  # over the seeds; None for one
    seeds: int
    parameters: int
    epochs: int
    runs: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model of the zoo: its settings, its paper and the published accuracies by `task`."""

    config: ModelConfig
    paper: str
    published: Mapping[str, Published]

    @property
    def equation(self) -> str:
        """The equation whose solution the model computes."""
        return self.config.equation


def _read() -> dict[str, Entry]:
    """Read the entries of zoo.toml, where a base stands above the entries that change it."""
    found: dict[str, Entry] = {}
    for name, table in tomllib.loads(Path(__file__).with_name("zoo.toml").read_text(encoding="utf-8")).items():
        base = found[table["base"]].config if "base" in table else DEFAULTS[name]
        config = tables.build(type(base), table.get("settings", {}), current=base)
        published = {of: Published(*numbers) for of, numbers in table.get("published", {}).items()}
        found[name] = Entry(config, table["paper"], published)
    return found


MODELS = _read()


def build(
    name: str, *, classes: int = 10, channels: int = 3, settings: Mapping[str, Any] | None = None
) -> AbstractModel:
    """Return the named model, freshly initialised; `settings` change its config, and an unknown one raises an error.

    They are the tables of an experiment file, `{"kernel": {"gamma": 0.2}, "solver": {"name": "picard"}}`, or hold the
    values themselves, `{"solver": Picard()}`.
    """
    config = find(name).config
    return from_config(tables.build(type(config), settings or {}, current=config), classes, channels)


def from_config(config: ModelConfig, classes: int, channels: int = 3) -> AbstractModel:
    """Return the model with these settings, freshly initialised."""
    check_whole("classes", classes)
    check_whole("channels", channels)
    if isinstance(config, ClassifierConfig) and config.lipschitz:
        return LipschitzClassifier(config, classes, channels)
    return CLASSES[type(config)](config, classes, channels)


def find(name: str) -> Entry:
    """Return the entry of a model; the error for an unknown name lists the known ones."""
    if name not in MODELS:
        hint = tables.suggestion(name, MODELS)
        raise tables.ConfigError(f"There is no model {name!r}.{hint} There are: {', '.join(MODELS)}.")
    return MODELS[name]


def names() -> tuple[str, ...]:
    """Return the name of every model that `build` knows."""
    return tuple(MODELS)


def our_accuracies() -> dict[str, dict[str, Measured]]:
    """Test accuracies by model and task, of several the one that counts: results.json, which `make results` writes."""
    found = json.loads(Path(__file__).with_name("results.json").read_text(encoding="utf-8"))
    return {model: {of: Measured(**numbers) for of, numbers in tasks.items()} for model, tasks in found.items()}


def task(data: str, subset: str, split: str = "test") -> str:
    """Return what an accuracy is measured on: a data set, or the papers' name for a part of one."""
    part = "unknown" if split == "unknown" else subset
    return data if part == "all" else PARTS.get((data, part), f"{part} of {data}")


def parameters(model: nn.Module) -> int:
    """Return the number of trainable parameters."""
    return sum(p.numel() for p in model.parameters())
