"""The exponential moving average of a model's weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn


@final
class Average:
    """ā ← δ ā + (1 − δ) a for every parameter and floating-point buffer a; other buffers are copied.

    The decay starts small, δ = min(decay, (1 + t)/(10 + t)) at update t, so that the random
    initial weights are forgotten at once.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.values = {name: value.detach().clone() for name, value in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        weight = 1 - min(self.decay, (1 + step) / (10 + step))
        averages, currents = [], []
        for name, value in model.state_dict().items():
            if value.shape != self.values[name].shape:  # a buffer that takes its shape from the first pictures
                self.values[name] = value.clone()
            elif value.is_floating_point():
                averages.append(self.values[name])
                currents.append(value)
            else:
                self.values[name].copy_(value)
        torch._foreach_lerp_(averages, currents, weight)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Put the average into the model for a while; the model's own weights come back bit for bit.

        What the model has worked out about the average, the norms of its operators, stays with the average.
        """
        own = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(self.values)
        try:
            yield
            self.restore(model.state_dict())
        finally:
            model.load_state_dict(own)

    def restore(self, values: dict[str, Tensor]) -> None:
        """Continue from saved values, each in the memory layout of the present ones."""
        for name, value in values.items():
            own = self.values[name]
            if own.shape == value.shape:
                own.copy_(value)
            else:
                self.values[name] = value.to(own)
