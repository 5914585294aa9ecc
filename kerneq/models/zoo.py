"""Every model of the papers and the baselines they are compared with, by name."""

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from .. import settings as tables
from ..kernels import Adaptive, Gaussian, Linear, Polynomial, Sigmoid
from ..tensors import check_whole
from .baselines import MDEQ, MDEQConfig, ResNet, ResNetConfig
from .classifier import Classifier, ClassifierConfig, DenseClassifier, DenseConfig

ModelConfig = ClassifierConfig | DenseConfig | MDEQConfig | ResNetConfig


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model and what is said of it; accuracies are percentages as published, by data set."""

    config: ModelConfig
    equation: str
    paper: str
    published: Mapping[str, float] = dataclasses.field(default_factory=dict)
    ours: Mapping[str, str] = dataclasses.field(default_factory=dict)  # with what it was measured on; docs/recipe.md


_GAUSSIAN = "z = relu(Wᵀm), mᵢ = exp(−γ‖rᵢW_h‖²) rᵢW_hW_hᵀ, r = Ux + b − Wz"
_LINEAR = "z = relu(Ux + b + WᵀWz)"
_POLYNOMIAL = "z = relu(k(⟨a, z⟩ + c)ᵏ⁻¹a + WᵀWz), a = Ux + b"
_SIGMOID = "z = relu((1 − tanh²⟨a, z⟩)a + WᵀWz), a = Ux + b"
_MDEQ = "z = multi-scale residual block (z; x)"

# γ follows the data in GEQ and is fixed in KerDEQ, whose patches on larger pictures are larger, too.
_GEQ = Gaussian(Adaptive(0.2), patch=2, split=8, hidden=64)
_KERDEQ = Gaussian(0.5, patch=2, split=8, hidden=64)
_GEQ_IMAGENET = replace(_GEQ, hidden=128)
_KERDEQ_IMAGENET = Gaussian(0.5, patch=4, split=4, hidden=128)

_GEQ_5M = ClassifierConfig(kernel=_GEQ)
_GEQ_8M = ClassifierConfig(kernel=_GEQ, width=320, features=(80, 160, 160, 160, 320, 320))
# The widths are those of the papers' appendix; with our stem they make 4.3 and 9.7 M parameters, not 6 and 13 M.
_GEQ_6M = ClassifierConfig(kernel=_GEQ_IMAGENET, stem="imagenet", features=(32, 64, 128, 128, 256, 256))
_GEQ_13M = ClassifierConfig(kernel=_GEQ_IMAGENET, stem="imagenet", width=384, features=(48, 96, 192, 192, 384, 384))
# a = Ux + b lives in the state here, so U is larger: the same proportions at width 288 give 8M. Below norm 1 an
# equilibrium exists whatever the input.
_MOPTEQ = ClassifierConfig(kernel=Linear(), width=288, features=(72, 144, 144, 144, 288, 288), norm=0.9)
# One branch at 16 × 16; with as many features as state channels both kernels have the same parameters.
_OPTEQ = ClassifierConfig(kernel=Linear(), features=(256,), scales=(2,), fusion=2, norm=0.9)
_TINY = ClassifierConfig(
    kernel=replace(_GEQ, hidden=32), width=32, features=(16, 16), scales=(1, 2), fusion=2, stem="plain"
)
_MOPTEQ_TINY = replace(_TINY, kernel=Linear(), norm=0.9)
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
    "kerdeq-5m": Entry(replace(_GEQ_5M, kernel=_KERDEQ), _GAUSSIAN, "KerDEQ"),
    "kerdeq-8m": Entry(replace(_GEQ_8M, kernel=_KERDEQ), _GAUSSIAN, "KerDEQ"),
    "kerdeq-6m-imagenet": Entry(replace(_GEQ_6M, kernel=_KERDEQ_IMAGENET), _GAUSSIAN, "KerDEQ"),
    "kerdeq-13m-imagenet": Entry(replace(_GEQ_13M, kernel=_KERDEQ_IMAGENET), _GAUSSIAN, "KerDEQ"),
    "kerdeq-single": Entry(replace(_OPTEQ, kernel=_KERDEQ, norm=1.0), _GAUSSIAN, "KerDEQ"),
    "opteq": Entry(_OPTEQ, _LINEAR, "OptEq; KerDEQ Table 3"),
    "mopteq-8m": Entry(_MOPTEQ, _LINEAR, "MOptEq", {"cifar10": 94.6, "cifar100": 75.6}),
    "mopteq-polynomial-8m": Entry(replace(_MOPTEQ, kernel=Polynomial()), _POLYNOMIAL, "GEQ Tables 4, 5"),
    "mopteq-sigmoid-8m": Entry(replace(_MOPTEQ, kernel=Sigmoid()), _SIGMOID, "GEQ Tables 4, 5"),
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
    "kerdeq-tiny": Entry(replace(_TINY, kernel=replace(_KERDEQ, hidden=32)), _GAUSSIAN, "(tests, demo)"),
    "opteq-tiny": Entry(replace(_MOPTEQ_TINY, features=(32,), scales=(2,)), _LINEAR, "(tests, demo)"),
    "mopteq-tiny": Entry(_MOPTEQ_TINY, _LINEAR, "(tests, demo)"),
    "mopteq-polynomial-tiny": Entry(replace(_MOPTEQ_TINY, kernel=Polynomial()), _POLYNOMIAL, "(tests, demo)"),
    "mopteq-sigmoid-tiny": Entry(replace(_MOPTEQ_TINY, kernel=Sigmoid()), _SIGMOID, "(tests, demo)"),
    "mdeq-tiny": Entry(_MDEQ_TINY, _MDEQ, "(tests, demo)"),
    "resnet-tiny": Entry(ResNetConfig(blocks=(1, 1), width=16), "none: explicit", "(tests, demo)"),
}


def build(
    name: str, *, classes: int = 10, channels: int = 3, settings: Mapping[str, Any] | None = None
) -> Classifier | DenseClassifier | MDEQ | ResNet:
    """The named model, freshly initialised; `settings` change its config, and an unknown one is refused.

    They are the tables of an experiment file, `{"kernel": {"gamma": 0.2}, "solver": {"name": "picard"}}`, or hold the
    values themselves, `{"solver": Picard()}`.
    """
    config = find(name).config
    return from_config(tables.build(type(config), settings or {}, standing=config), classes, channels)


def from_config(config: ModelConfig, classes: int, channels: int = 3) -> Classifier | DenseClassifier | MDEQ | ResNet:
    """The model with these settings, freshly initialised."""
    check_whole("classes", classes)
    check_whole("channels", channels)
    match config:
        case ClassifierConfig():
            return Classifier(config, classes, channels)
        case DenseConfig():
            return DenseClassifier(config, classes, channels)
        case MDEQConfig():
            return MDEQ(config, classes, channels)
        case ResNetConfig():
            return ResNet(config, classes, channels)


def find(name: str) -> Entry:
    """The entry of a model; an unknown name lists the known ones."""
    if name not in MODELS:
        hint = tables.suggestion(name, MODELS)
        raise tables.ConfigError(f"There is no model {name!r}.{hint} There are: {', '.join(MODELS)}.")
    return MODELS[name]


def names() -> tuple[str, ...]:
    """The name of every model that `build` knows."""
    return tuple(MODELS)


def parameters(model: nn.Module) -> int:
    """How many numbers training may change."""
    return sum(p.numel() for p in model.parameters())
