"""Every model of the papers and the baselines they are compared with, by name."""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from .classifier import Classifier
from .config import ClassifierConfig
from .dense import DenseClassifier, DenseConfig
from .mdeq import MDEQConfig
from .multiscale import MDEQ
from .resnet import ResNet, ResNetConfig

Config = ClassifierConfig | DenseConfig | MDEQConfig | ResNetConfig


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model and what is said of it; accuracies are percentages as published, by data set."""

    config: Config
    equation: str
    paper: str
    published: Mapping[str, float] = dataclasses.field(default_factory=dict)
    ours: Mapping[str, str] = dataclasses.field(default_factory=dict)  # with what it was measured on; docs/recipe.md


_GAUSSIAN = "z = relu(Wᵀm), mᵢ = exp(−γ‖rᵢW_h‖²) rᵢW_hW_hᵀ, r = Ux + b − Wz"
_LINEAR = "z = relu(Ux + b + WᵀWz)"
_POLYNOMIAL = "z = relu(k(⟨a, z⟩ + c)ᵏ⁻¹a + WᵀWz), a = Ux + b"
_SIGMOID = "z = relu((1 − tanh²⟨a, z⟩)a + WᵀWz), a = Ux + b"
_MDEQ = "z = multi-scale residual block (z; x)"

_GEQ_5M = ClassifierConfig()
_GEQ_8M = ClassifierConfig(width=320, features=(80, 160, 160, 160, 320, 320))
_KERDEQ: dict[str, Any] = {"adaptive": False, "gamma": 0.5}
_IMAGENET = {"stem": "imagenet", "hidden": 128}
# The widths are those of the papers' appendix; with our stem they make 4.3 and 9.7 M parameters, not 6 and 13 M.
_GEQ_6M = ClassifierConfig(features=(32, 64, 128, 128, 256, 256), **_IMAGENET)  # type: ignore[arg-type]
_GEQ_13M = ClassifierConfig(width=384, features=(48, 96, 192, 192, 384, 384), **_IMAGENET)  # type: ignore[arg-type]
# a = Ux + b lives in the state here, so U is larger: the same proportions at width 288 give 8M. Below norm 1 an
# equilibrium exists whatever the input.
_MOPTEQ = ClassifierConfig(kernel="linear", width=288, features=(72, 144, 144, 144, 288, 288), norm=0.9)
# One branch at 16 × 16; with as many features as state channels both kernels have the same parameters.
_OPTEQ = ClassifierConfig(kernel="linear", features=(256,), scales=(2,), fusion=2, norm=0.9)
_TINY = ClassifierConfig(width=32, features=(16, 16), scales=(1, 2), fusion=2, stem="plain", hidden=32)
_MDEQ_TINY = MDEQConfig(widths=(8, 16), head=(4, 8), final=32, expansion=2, groups=4)


MODELS: dict[str, Entry] = {
    "geq-5m": Entry(
        _GEQ_5M,
        _GAUSSIAN,
        "GEQ",
        {"cifar10": 94.8, "cifar100": 76.4},
        {"cifar10": "95.2 % (validation)", "cifar100": "74.5 % (validation)"},
    ),
    "geq-8m": Entry(_GEQ_8M, _GAUSSIAN, "GEQ", {"cifar10": 95.6, "cifar100": 78.2}),
    "geq-6m-imagenet": Entry(_GEQ_6M, _GAUSSIAN, "GEQ", {"imagenette": 92.9, "imagenet100": 82.2}),
    "geq-13m-imagenet": Entry(_GEQ_13M, _GAUSSIAN, "GEQ"),
    "kerdeq-5m": Entry(replace(_GEQ_5M, **_KERDEQ), _GAUSSIAN, "KerDEQ"),
    "kerdeq-8m": Entry(replace(_GEQ_8M, **_KERDEQ), _GAUSSIAN, "KerDEQ"),
    "kerdeq-6m-imagenet": Entry(replace(_GEQ_6M, patch=4, split=4, **_KERDEQ), _GAUSSIAN, "KerDEQ"),
    "kerdeq-13m-imagenet": Entry(replace(_GEQ_13M, patch=4, split=4, **_KERDEQ), _GAUSSIAN, "KerDEQ"),
    "kerdeq-single": Entry(replace(_OPTEQ, kernel="gaussian", norm=1.0, **_KERDEQ), _GAUSSIAN, "KerDEQ"),
    "opteq": Entry(_OPTEQ, _LINEAR, "OptEq; KerDEQ Table 3"),
    "mopteq-8m": Entry(_MOPTEQ, _LINEAR, "MOptEq", {"cifar10": 94.6, "cifar100": 75.6}),
    "mopteq-polynomial-8m": Entry(replace(_MOPTEQ, kernel="polynomial"), _POLYNOMIAL, "GEQ Tables 4, 5"),
    "mopteq-sigmoid-8m": Entry(replace(_MOPTEQ, kernel="sigmoid"), _SIGMOID, "GEQ Tables 4, 5"),
    "mdeq-10m": Entry(MDEQConfig(), _MDEQ, "MDEQ"),
    "resnet18": Entry(ResNetConfig(), "none: explicit", "ResNet", {"cifar10": 93.5, "cifar100": 74.5}),
    "resnet50": Entry(
        ResNetConfig(blocks=(3, 4, 6, 3), bottleneck=True), "none: explicit", "ResNet", {"cifar10": 95.2}
    ),
    "resnet18-imagenet": Entry(ResNetConfig(stem="imagenet"), "none: explicit", "ResNet"),
    "resnet50-imagenet": Entry(
        ResNetConfig(blocks=(3, 4, 6, 3), bottleneck=True, stem="imagenet"), "none: explicit", "ResNet"
    ),
    "geq-dense-tiny": Entry(DenseConfig(), _GAUSSIAN, "(tests, demo)"),
    "geq-tiny": Entry(_TINY, _GAUSSIAN, "(tests, demo)"),
    "kerdeq-tiny": Entry(replace(_TINY, **_KERDEQ), _GAUSSIAN, "(tests, demo)"),
    "opteq-tiny": Entry(
        replace(_TINY, kernel="linear", features=(32,), scales=(2,), norm=0.9),
        _LINEAR,
        "(tests, demo)",
    ),
    "mopteq-tiny": Entry(replace(_TINY, kernel="linear", norm=0.9), _LINEAR, "(tests, demo)"),
    "mopteq-polynomial-tiny": Entry(replace(_TINY, kernel="polynomial", norm=0.9), _POLYNOMIAL, "(tests, demo)"),
    "mopteq-sigmoid-tiny": Entry(replace(_TINY, kernel="sigmoid", norm=0.9), _SIGMOID, "(tests, demo)"),
    "mdeq-tiny": Entry(_MDEQ_TINY, _MDEQ, "(tests, demo)"),
    "resnet-tiny": Entry(ResNetConfig(blocks=(1, 1), width=16), "none: explicit", "(tests, demo)"),
}

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def build(
    name: str, *, classes: int = 10, channels: int = 3, settings: Mapping[str, Any] | None = None
) -> Classifier | DenseClassifier | MDEQ | ResNet:
    """The named model, freshly initialised; `settings` change fields of its config, and an unknown one is refused."""
    if name not in MODELS:
        raise ValueError(f"There is no model {name!r}.{_hint(name, list(MODELS))} There are: {', '.join(MODELS)}.")
    for what, value in (("classes", classes), ("channels", channels)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"`{what}` must be a whole number, at least 1, got {value!r}.")
    config = configure(name, settings or {})
    match config:
        case ClassifierConfig():
            return Classifier(config, classes, channels)
        case DenseConfig():
            return DenseClassifier(config, classes, channels)
        case MDEQConfig():
            return MDEQ(config, classes, channels)
        case ResNetConfig():
            return ResNet(config, classes, channels)


def configure(name: str, settings: Mapping[str, Any]) -> Config:
    """The config of a named model with some fields changed."""
    config = MODELS[name].config
    known = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    changes: dict[str, Any] = {}
    for key, value in settings.items():
        if key not in known:
            raise ValueError(f"{name} has no setting `{key}`.{_hint(key, list(known))} It has: {', '.join(known)}.")
        changes[key] = _convert(key, value, known[key])
    return replace(config, **changes)


def _convert(key: str, value: Any, default: Any) -> Any:
    """The value in the type of the default: whole numbers pass for decimals, lists for tuples."""
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(default, tuple):  # all of them count something
        if isinstance(value, list | tuple) and all(type(entry) is int and entry > 0 for entry in value):
            return tuple(value)
        raise ValueError(f"`{key}` must be a list of whole numbers, each at least 1, got {value!r}.")
    if type(value) is not type(default):
        raise ValueError(f"`{key}` must be {_WORDS[type(default)]}, got {value!r}.")
    return value


def _hint(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
