"""Every row of the papers' tables has a -paper file, and it says what the papers state and nothing else."""

import pytest
import torch

from kerneq.gradients import Phantom
from kerneq.kernels import Adaptive, Gaussian, Linear, Polynomial, Sigmoid
from kerneq.lab.data import Augment
from kerneq.lab.run.config import EXPERIMENTS, check, load
from kerneq.models import ClassifierConfig, MDEQConfig, from_config, parameters
from kerneq.solvers import Anderson

SCALES = (1, 2, 4, 4, 8, 8)  # of 32 (CIFAR), of 64 after two downsampling convolutions (256 pixels)
WIDTHS = {  # output channels and mid channels: GEQ A.7, KerDEQ A.4
    "5M": (256, (64, 128, 128, 128, 256, 256)),
    "8M": (320, (80, 160, 160, 160, 320, 320)),
    "6M": (256, (32, 64, 128, 128, 256, 256)),
    "13M": (384, (48, 96, 192, 192, 384, 384)),
}
PUBLISHED_GAMMA = Adaptive(0.2, floor=0.0, samples=None)  # 0.2/M, M the minimum among all patches
GEQ, GEQ_LARGE = (Gaussian(PUBLISHED_GAMMA, patch=2, split=8, hidden=hidden) for hidden in (64, 128))
KERDEQ, KERDEQ_LARGE = Gaussian(0.5, patch=2, split=8, hidden=64), Gaussian(0.5, patch=4, split=4, hidden=128)
COLUMNS = {  # data set of a table → accuracies in percent by model; KerDEQ's tables repeat the baselines of GEQ's
    "cifar10": {"resnet18": 93.5, "resnet50": 95.2, "mdeq-10m": 94.2, "mopteq-8m": 94.6, "geq-5m": 94.8}
    | {"geq-8m": 95.6, "kerdeq-5m": 94.7, "kerdeq-8m": 95.3},
    "cifar100": {"resnet18": 74.5, "resnet50": 77.9, "mdeq-10m": 74.7, "mopteq-8m": 75.6, "geq-5m": 76.4}
    | {"geq-8m": 78.2, "kerdeq-5m": 76.5, "kerdeq-8m": 77.8, "mopteq-polynomial-8m": 75.1, "mopteq-sigmoid-8m": 76.1},
    "imagenette": {"resnet18": 92.3, "resnet50": 93.0, "mdeq-10m": 91.5, "mopteq-10m": 92.4, "geq-6m": 92.9}
    | {"geq-13m": 93.2, "kerdeq-6m": 92.9, "kerdeq-13m": 93.2},
    "imagenet100": {"resnet18": 80.9, "resnet50": 81.7, "mdeq-10m": 81.3, "mopteq-13m": 81.5, "geq-6m": 82.2}
    | {"geq-13m": 83.9, "kerdeq-6m": 82.2, "kerdeq-13m": 83.9},
    "superclass": {"mopteq-8m": 80.1, "geq-8m": 80.9},
    "five-classes": {"opteq": 90.56, "kerdeq-single": 92.42},
}
DATA = {"superclass": ("cifar100-coarse", "four-of-five-subclasses"), "five-classes": ("cifar10", "first-five-classes")}
ROWS = [(model, data) for data, column in COLUMNS.items() for model in column]


def kernel(model: str, large: bool) -> object:
    """The kernel of a row."""
    family = model.removesuffix("-" + model.split("-")[-1])
    kernels = {"geq": GEQ_LARGE if large else GEQ, "mopteq": Linear(), "mopteq-sigmoid": Sigmoid()}
    kernels |= {"kerdeq": KERDEQ_LARGE if large else KERDEQ, "mopteq-polynomial": Polynomial(2, offset=0.0)}
    return kernels.get(family, Linear())  # OptEq


def test_there_is_one_file_for_every_row_and_no_other():
    bases = {"cifar10", "cifar100", "imagenette", "imagenet100"}
    found = {path.stem.removesuffix("-paper") for path in EXPERIMENTS.glob("*-paper.toml")}
    assert found - bases == {f"{model}-{data}" for model, data in ROWS}
    assert len(ROWS) == 38


@pytest.mark.parametrize(("model", "data"), ROWS)
def test_a_paper_file_says_what_the_papers_state(model, data):
    name, large = f"{model}-{data}-paper", data.startswith("imagenet")
    config = load(name)
    check(config)
    head = (EXPERIMENTS / f"{name}.toml").read_text().splitlines()[0]
    assert f"{COLUMNS[data][model]:g}" in head or f"{COLUMNS[data][model]:.1f}" in head

    # "SGD with momentum and step learning rate schedule for all the models. RandomAug for all the models."
    assert config.schedule.kind == "step" and config.optimizer.momentum > 0
    shifts = {"area": config.augment.area, "crop": config.augment.crop, "flip": True}  # not stated: ours
    assert config.augment == Augment(randaugment=2, magnitude=9.0, **shifts)  # no cutout, mixup, CutMix
    assert (config.training.label_smoothing, config.training.ema, config.data.validation) == (0, 0, 0)
    assert (config.data.name, config.data.subset) == DATA.get(data, (data, "all"))
    assert config.data.size == (256 if large else 0)

    settings = config.model.settings
    if not isinstance(settings, ClassifierConfig):  # ResNet, MDEQ, which down-sample at 256 pixels, too
        assert settings.stem == ("imagenet" if large else "cifar")
        if isinstance(settings, MDEQConfig):
            assert settings.gradient == Phantom(
                5, relaxation=0.5, advance=True
            )  # MDEQ's own: Algorithm 1, which has 0.8, is GEQ's
        return
    assert isinstance(settings.solver, Anderson) and settings.gradient == Phantom(5, relaxation=0.8, advance=True)
    assert settings.length == 1.0  # so that γ acts
    assert settings.stem == ("imagenet" if large else "paper")
    assert settings.output == ("features" if model.startswith("mopteq") else "state")
    if data == "five-classes":
        assert settings.scales == (2,)  # "one branch"
        return
    assert settings.kernel == kernel(model, large)
    assert settings.scales == SCALES
    size = model.split("-")[-1].upper()
    if size in WIDTHS:  # MOptEq's 10M fits none of them
        assert (settings.width, settings.features) == WIDTHS[size]
    with torch.device("meta"):
        millions = parameters(from_config(settings, classes=100 if data.endswith("100") else 10)) / 1e6
    assert abs(millions - int(size[:-1])) < 0.3
