"""Layers that lengthen no difference: convolutions of norm at most 1, MaxMin, a head with rows of length 1.

A classifier made of them (`ClassifierConfig.lipschitz`) has a Lipschitz constant near 1 by construction, so that a
margin between two logits is a distance that no perturbation below it can bridge: `theory.certify` states it.
"""

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@final
class AlmostOrthogonal(nn.Conv2d):
    """A zero-padded 3×3 convolution whose weight is rescaled, an input channel each, so that its norm is at most 1.

    W ← W diag(d), dᵢ = (Σⱼ |WᵀW|ᵢⱼ)^{−½}: by Gershgorin's theorem ‖W diag(d)‖ ≤ 1 (Prach and Lampert, 2022). The sum
    over j is one over channels and shifts, of which the borders of a picture only leave some out. Training drives
    the columns towards orthogonality, where nothing is lost. It starts as an isometry of the channels.
    """

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, 3, padding=1)
        nn.init.zeros_(self.weight)
        nn.init.orthogonal_(self.weight[:, :, 1, 1])
        nn.init.zeros_(self.get_parameter("bias"))

    def rescaled(self) -> Tensor:
        """The weight that is used, of norm at most 1."""
        with torch.autocast(self.weight.device.type, enabled=False):
            columns = self.weight.transpose(0, 1)  # (inputs, outputs, k, k): one filter an input channel
            gram = F.conv2d(columns, columns, padding=self.weight.shape[-1] - 1)  # WᵀW, channel by channel and shift
            total = gram.abs().sum((1, 2, 3)).clamp_min(torch.finfo(gram.dtype).tiny)
            return self.weight * total.rsqrt()[:, None, None]

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.rescaled(), self.bias)


@final
class MaxMin(nn.Module):
    """Channels in pairs (c, c + C/2) ↦ their maximum and minimum: 1-Lipschitz, and it keeps the length of gradients.

    ReLU halves them (Anil, Lucas and Grosse, 2019).
    """

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, 1)
        return torch.cat([torch.maximum(first, second), torch.minimum(first, second)], 1)


@final
class UnitRows(nn.Module):
    """A linear head whose rows are rescaled to the length `gain`: a logit moves that much further than the features.

    One over the temperature of the softmax; it changes no radius, as margins grow by the same factor.
    """

    def __init__(self, inputs: int, outputs: int, gain: float):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.gain = gain

    def rescaled(self) -> Tensor:
        """The weight that is used."""
        return self.gain * F.normalize(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.rescaled(), self.bias)
