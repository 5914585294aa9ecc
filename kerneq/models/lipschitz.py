"""A classifier of layers that lengthen no difference: convolutions of norm at most 1, MaxMin, a head of unit rows.

Its Lipschitz constant is near 1 by construction, so that a margin between two logits is a distance that no shorter
perturbation can bridge: `kerneq.certify` states it.
"""

import math
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cells import ConvCell
from ..kernels import AbstractRadialKernel
from ..kernels.radial import PatchParameters
from ..solution import Solution
from .classifier import (
    AbstractBranchedModel,
    ClassifierConfig,
    Levels,
    change_scale,
    make_equilibrium,
    make_stem,
    mean_of,
)


def gershgorin_sum(weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return Tᵢ = Σⱼ |WᵀW|ᵢⱼqⱼ/qᵢ of a convolution, (inputs,): diag(T) ⪰ WᵀW for every scale q > 0, (inputs,).

    The sum over j runs over channels and shifts; at the borders of a picture some terms are missing.
    """
    with torch.autocast(weight.device.type, enabled=False):
        columns = weight.transpose(0, 1)  # (inputs, outputs, k, k): one filter an input channel
        gram = F.conv2d(columns, columns, padding=weight.shape[-1] - 1)  # WᵀW, channel by channel and shift
        sums = gram.abs().sum((2, 3))
        total = sums.sum(1) if scale is None else sums @ scale / scale
        return total.clamp_min(torch.finfo(gram.dtype).tiny)


@final
class AlmostOrthogonal(nn.Conv2d):
    """A zero-padded 3×3 convolution whose weight is rescaled, an input channel each, so that its norm is at most 1.

    W ← W diag(T)^{−½}, Tᵢ = Σⱼ |WᵀW|ᵢⱼ: by Gershgorin's theorem its norm is at most 1 (Prach and Lampert, 2022).
    The layer starts as an isometry of the channels.
    """

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, 3, padding=1)
        nn.init.zeros_(self.weight)
        nn.init.orthogonal_(self.weight[:, :, 1, 1])
        nn.init.zeros_(self.get_parameter("bias"))

    def rescale_weight(self) -> Tensor:
        """Return the weight that is used, of norm at most 1."""
        return self.weight * gershgorin_sum(self.weight).rsqrt()[:, None, None]

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.rescale_weight(), self.bias)


@final
class MaxMin(nn.Module):
    """Channels in pairs (c, c + C/2) ↦ their maximum and minimum, 1-Lipschitz (Anil, Lucas and Grosse, 2019)."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, 1)
        return torch.cat([torch.maximum(first, second), torch.minimum(first, second)], 1)


@final
class UnitRows(nn.Module):
    """A linear head whose rows are rescaled to the length `gain`: a logit moves at most that much times the features.

    The gain is one over the temperature of the softmax. It changes no radius, as margins grow by the same factor.
    """

    def __init__(self, inputs: int, outputs: int, gain: float):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.gain = gain

    def rescale_weight(self) -> Tensor:
        """Return the weight that is used."""
        return self.gain * F.normalize(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.rescale_weight(), self.bias)


def fold_conv_sort(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """Return a layer of the stem; instead of a stride, squares of pixels become channels, so that nothing is lost."""
    if outputs % 2:
        raise ValueError(f"`lipschitz` sorts channels in pairs: the stem needs even numbers of them, got {outputs}.")
    return nn.Sequential(nn.PixelUnshuffle(stride), AlmostOrthogonal(inputs * stride**2, outputs), MaxMin())


@final
class LipschitzBranch(nn.Module):
    """A `Branch` without batch norms, rescaled to be 1-Lipschitz.

    Pooling by s shrinks differences to 1/s of their length, at least, up-sampling stretches them by s; and the
    equilibrium, from a to z*, by `kernel.input_lipschitz` · ‖W_h‖ at most.
    """

    def __init__(self, config: ClassifierConfig, scale: int, features: int):
        super().__init__()
        self.scale, self.fusion = scale, config.fusion
        self.equilibrium = make_equilibrium(config, features, lambda *sizes: nn.Sequential(AlmostOrthogonal(*sizes)))
        assert isinstance(config.kernel, AbstractRadialKernel)
        self.sensitivity = config.kernel.input_lipschitz(config.norm)  # the Lipschitz constant of aW_h ↦ z*
        if config.output == "features" or self.sensitivity == math.inf:
            raise ValueError("`lipschitz` needs `output` = state and a `norm` at which the equilibrium is unique.")

    def forward(self, x: Tensor) -> tuple[Tensor, Solution]:
        solution: Solution = self.equilibrium(self.scale * x)
        gain = self.fusion / (self.scale * self.sensitivity * self.projection_norm())
        return change_scale(solution.value * gain, self.scale, self.fusion), solution

    def projection_norm(self) -> Tensor:
        """Return ‖W_h‖."""
        cell = self.equilibrium.cell
        assert isinstance(cell, ConvCell) and isinstance(cell.similarity, PatchParameters)
        return cell.similarity.gain()


@final
class LipschitzClassifier(AbstractBranchedModel):
    """The 1-Lipschitz counterpart of `Classifier`: branches joined → MaxMin, mean over pixels, head of unit rows."""

    def __init__(self, config: ClassifierConfig, classes: int, channels: int = 3):
        super().__init__(config, channels)
        self.stem = make_stem(config, channels, fold_conv_sort)
        self.levels = Levels(config)
        self.branches = nn.ModuleList(LipschitzBranch(config, *branch) for branch in config.branches)
        self.norm = MaxMin()
        self.head = UnitRows(config.width, classes, config.gain)

    def read_out(self, values: list[Tensor]) -> Tensor:
        joined = mean_of(values)
        pixels = joined.shape[2] * joined.shape[3]
        # The mean of n pixels shrinks differences to 1/√n.
        logits: Tensor = self.head(self.norm(joined).mean((2, 3)) * pixels**0.5)
        return logits
