"""What a certificate needs to know of a model: the contract, and the reason why an equilibrium is unique."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

# A bound on what rounding in float64 adds to a layer's output, relative to the norm of the layer times the length of
# its input. An inner product of n terms is off by at most nε times that of the absolute values, which is at most √n
# times larger: 10⁻¹¹ for n = 2304.
ROUNDING = 1e-10


@final
@dataclasses.dataclass(frozen=True)
class LayerBound:
    """Why an equilibrium layer has one equilibrium: E is strongly convex, μ > 0, as long as L < `threshold`."""

    name: str
    lipschitz: float  # L, from above
    threshold: float | None  # None: for every L
    convexity: float  # μ, from below
    sensitivity: float  # the Lipschitz constant of input ↦ z*, the norm of the map x ↦ aW_h included

    @property
    def unique(self) -> bool:
        """Whether the equilibrium is unique, for every input."""
        return self.convexity > 0

    def __str__(self) -> str:
        limit = ", any L will do" if self.threshold is None else f" {'<' if self.unique else '≥'} {self.threshold:.3g}"
        return f"{self.name}: L = {self.lipschitz:.3g}{limit}"


class AbstractBounds(abc.ABC):
    """Lipschitz constants of a model in float64, for pictures of one size."""

    layers: tuple[LayerBound, ...]  # why each equilibrium is unique

    @property
    @abc.abstractmethod
    def lipschitz(self) -> Tensor:
        """How far a unit change of the pictures moves logit i − logit j, at most, (classes, classes)."""

    @abc.abstractmethod
    def margins(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logits of x, by how much each may be nearer to the largest than computed, both (batch, classes),
        and the largest error of an equilibrium, (batch,)."""

    @abc.abstractmethod
    def pixel_scale(self, std: Sequence[float]) -> float:
        """Return how much longer, at least, a change of normalised pictures is than that of their pixels, which were
        divided by `std`, in so far as the model sees it."""


def pairwise_distances(rows: Tensor) -> Tensor:
    """Return the length of the difference of every two rows."""
    return torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
