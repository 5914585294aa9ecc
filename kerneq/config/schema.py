"""Every setting of a training run, with its default; `kerneq train --show-config` prints them."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from kerneq.config.setting import ConfigError, setting
from kerneq.data import Augment


@dataclasses.dataclass(frozen=True)
class Data:
    name: str = setting("digits", "which data set; `kerneq data` lists them")
    size: int = setting(0, "side of the pictures in pixels, 0: as the data set has them", low=0)
    validation: float = setting(0.1, "share of the training images held out to validate on", low=0, high=0.9)
    subset: Literal["all", "first-five-classes", "four-of-five-subclasses"] = setting(
        "all",
        "which images are trained on: all, classes 0 to 4, or the first four sub-classes of a super-class",
    )


@dataclasses.dataclass(frozen=True)
class Model:
    name: str = setting("geq-tiny", "which model; `kerneq models` lists them")
    settings: Mapping[str, Any] = dataclasses.field(
        default_factory=dict, metadata={"meaning": "changes to the named model, for example norm = 8.0"}
    )


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Stochastic gradient descent with momentum."""

    lr: float = setting(0.1, "the highest learning rate of the schedule", above=0)
    momentum: float = setting(0.9, "", low=0, high=0.999999)
    nesterov: bool = setting(True, "")
    weight_decay: float = setting(5e-4, "", low=0)
    decay_all: bool = setting(False, "whether weight decay also acts on norms' scales and on biases")

    def __post_init__(self) -> None:
        if self.nesterov and self.momentum == 0:
            raise ConfigError("`optimizer.nesterov` needs `optimizer.momentum` above 0; set nesterov = false.")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How the learning rate moves from step to step, as a multiple of `optimizer.lr`."""

    kind: Literal["step", "cosine", "one-cycle"] = setting("cosine", "step, cosine or one-cycle")
    warmup: float = setting(0.0, "epochs of linear rise before a step or cosine schedule", low=0)
    milestones: tuple[float, ...] = setting((0.5, 0.75), "step: shares of the run after which the rate drops")
    factor: float = setting(0.1, "step: what the rate is multiplied by at a milestone", above=0, high=1)
    rise: float = setting(0.3, "one-cycle: share of the run in which the rate rises", above=0, high=0.99)
    final: float = setting(0.0, "cosine and one-cycle: the last rate, as a share of the highest", low=0, high=1)

    def __post_init__(self) -> None:
        shares = self.milestones
        if any(not 0 < share < 1 for share in shares) or list(shares) != sorted(set(shares)):
            raise ConfigError(
                "`schedule.milestones` are shares of the run: they must rise and lie between 0 and 1, "
                f"got {list(shares)}."
            )


@dataclasses.dataclass(frozen=True)
class Training:
    epochs: int = setting(20, "", low=1)
    batch_size: int = setting(128, "images per step, over all processes", low=1)
    label_smoothing: float = setting(0.0, "", low=0, high=0.99)
    ema: float = setting(0.0, "decay of the running average of the weights per step, 0: none", low=0, high=0.999999)
    amp: bool = setting(False, "bfloat16 autocast")
    clip: float = setting(0.0, "largest norm of the gradient, 0: unlimited", low=0)
    channels_last: bool = setting(False, "store images as NHWC")
    compile: bool = setting(False, "torch.compile of the equilibrium map")
    graph: bool = setting(False, "on a GPU, capture the step as one CUDA graph; solves may not look at their residual")
    deterministic: bool = setting(False, "only algorithms that give the same bits every time")
    checkpoint_epochs: int = setting(1, "epochs between checkpoints", low=1)
    checkpoint_steps: int = setting(0, "steps between checkpoints within an epoch, 0: none", low=0)


@dataclasses.dataclass(frozen=True)
class Config:
    seed: int = setting(0, "start of every random sequence", low=0, high=2**31 - 1)
    device: str = setting("auto", "auto, cpu, cuda or cuda:N; auto takes a GPU if there is one")
    data: Data = dataclasses.field(default_factory=Data)
    augment: Augment = dataclasses.field(default_factory=Augment)
    model: Model = dataclasses.field(default_factory=Model)
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    schedule: Schedule = dataclasses.field(default_factory=Schedule)
    training: Training = dataclasses.field(default_factory=Training)
