"""The Lipschitz constants of a `CertifiedClassifier`: each layer's is 1, so that errors are added up layer by layer."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Self, final

import torch
from torch import Tensor, nn

from ..equation import Equation
from ..equilibrium import Equilibrium
from ..maps import Point
from ..models import CertifiedClassifier
from ..models.certified import PotentialStep
from ..models.lipschitz import gershgorin_sum
from ..resolvent import Reflection
from ..solvers.loops import find_point
from ..tensors import per_sample_norm
from .bounds import ROUNDING, AbstractBounds, LayerBound, pairwise_distances
from .norms import conv_norm


@final
@dataclasses.dataclass(frozen=True, eq=False)
class ChainBounds(AbstractBounds):
    """The constants of a `CertifiedClassifier` for pictures of one size."""

    model: CertifiedClassifier
    layers: tuple[LayerBound, ...]
    stretches: tuple[float, ...]  # the Lipschitz constant of each module of the chain
    pairs: Tensor  # (classes, classes): of the mean over pixels ↦ logit i − logit j

    @classmethod
    def of(cls, model: CertifiedClassifier, x: Tensor) -> Self:
        """Find them, for pictures like x (1, channels, height, width)."""
        stretches, layers, given = [], list[LayerBound](), model.embed(x)
        for layer in model.chain:
            if isinstance(layer, Equilibrium):
                L = float(_bind(layer, given)[1].bound)
                layers.append(LayerBound(f"layer{len(layers)}", L, None, 1.0, 1.0))
                stretches.append(1.0)
            else:
                stretches.append(_stretch(layer, given))
                given = layer(given)
        pairs = pairwise_distances(model.head.rescale_weight())
        return cls(model, tuple(layers), tuple(stretches), pairs)

    @property
    def lipschitz(self) -> Tensor:
        return float(self.model.get_buffer("pixel_std").max()) * math.prod(self.stretches) * self.pairs

    def margins(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What was computed may be further from what is exact after each layer, by the layer's own error; the distance
        before it grows by no more than the layer's constant."""
        h = self.model.embed(x)
        total = ROUNDING * per_sample_norm(h)
        worst = torch.zeros_like(total)
        for layer, stretch in zip(self.model.chain, self.stretches, strict=True):
            if isinstance(layer, Equilibrium):
                h, error = reflect(layer, h)
                worst = torch.maximum(worst, error)
            else:
                given, h = h, layer(h)
                error = 10 * ROUNDING * (per_sample_norm(given) + per_sample_norm(h))
            total = stretch * total + error
        logits = self.model.read_out(h)
        length = self.model.head.gain * per_sample_norm(h)  # the mean of n pixels times √n is no longer than they are
        rounding = ROUNDING * (2 * length + logits.abs().amax(1))
        return logits, total[:, None] * self.pairs[logits.argmax(1)] + rounding[:, None], worst

    def pixel_scale(self, std: Sequence[float]) -> float:
        own = self.model.get_buffer("pixel_std").flatten()
        return float(own.max() / (own / torch.tensor(std, dtype=own.dtype, device=own.device)).max())


def reflect(layer: Equilibrium, a: Tensor) -> tuple[Tensor, Tensor]:
    """Return R(a) as it was computed, and how far it may be from the exact one, (batch,).

    p* is the minimum of the dual problem ρ*(p) − ⟨a, p⟩ + (½‖·‖² + φ)*(Wᵀp + b), which is as strongly convex as ρ* is;
    at p = m(a − v), whatever v, it has the subgradient Wσ(Wᵀp + b) − v. So ‖p − p*‖ is at most the length of that: no
    norm of W has to be known (docs/theory.md, fact 13). NaN where a number is not finite.
    """
    cell, f = _bind(layer, a)
    z = find_point(f, None, layer.solver, layer.limits)[0].value
    v = f.operator(z)
    following = f.state_at(v)
    size = per_sample_norm(a) + per_sample_norm(v) + per_sample_norm(following)
    if f.binding.bias is not None:
        size = size + float(torch.linalg.vector_norm(f.binding.bias.detach())) * (a.shape[2] * a.shape[3]) ** 0.5
    steepness = 1 + float(gershgorin_sum(f.operator.weight.detach()).max())  # at least 1 + ‖W‖²
    steepness *= 1 if f.binding.Q is None else 1 + float(torch.linalg.matrix_norm(f.binding.Q))
    gap = per_sample_norm(f.operator(following) - v) + 2 * ROUNDING * steepness * size
    return cell.output(f, Point(z, v)), 2 * gap


def _bind(layer: Equilibrium, a: Tensor) -> tuple[Reflection, Equation]:
    cell = layer.cell
    assert isinstance(cell, Reflection)
    return cell, cell.bind(a)


def _stretch(layer: nn.Module, given: Tensor) -> float:
    """Return the Lipschitz constant of an explicit layer: 1, unless the norm that a CPL divides by is too small."""
    if not isinstance(layer, PotentialStep) or layer.log_q is not None:
        return 1.0
    norm = conv_norm(layer.operator.weight, (given.shape[2], given.shape[3]))
    return max(1.0, 2 * norm**2 / float(layer.divisor(given)) - 1)
