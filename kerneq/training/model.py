"""What the training loop asks of a model, and how it gets one."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from kerneq.models import from_config
from kerneq.run.config import Config, ConfigError
from kerneq.training.data import Pictures
from kerneq.training.process import Process

Builder = Callable[[Config, Pictures], nn.Module]


class Trainable(Protocol):
    """Beyond `model(x) -> logits` and `model(x, solutions=True) -> (logits, {name: Solution})`."""

    def compile_map(self) -> None:
        """torch.compile the part that a solve evaluates again and again."""

    def diagnostics(self) -> dict[str, float]:
        """Numbers to follow over a run: norm bounds, E at the last equilibrium, γ."""


def build_model(config: Config, images: Pictures) -> nn.Module:
    """The configured model of the zoo, for pictures and classes like these."""
    try:
        return from_config(config.model.settings, classes=len(images.classes), channels=images.shape[0])
    except ValueError as error:
        raise ConfigError(f"[model] {error}") from None


def place(model: nn.Module, config: Config, process: Process) -> nn.Module:
    """The model on its device, in its memory format, its norms joined over the processes."""
    model = model.to(process.device)
    if config.training.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return process.synchronise_norms(model)
