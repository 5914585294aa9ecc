"""Limited-memory Broyden."""

import dataclasses
from typing import final

import torch
from torch import Tensor

from ..tensors import check_whole, is_channels_last
from .anderson import flatten_sample, inner_products, unflatten_sample
from .base import AbstractSolver, AbstractSpace, Evaluation


@dataclasses.dataclass(frozen=True)
class Secants:
    """H = I + Σ uᵢvᵢᵀ, an approximation of (I − J)⁻¹; the buffers are written in place."""

    u: Tensor  # (batch, m, numbers)
    v: Tensor  # (batch, m, numbers)
    z: Tensor  # the previous iterate, flat
    gap: Tensor  # and its f(z) − z
    started: bool = False
    used: int = 0
    channels_last: bool = False  # the numbers stand in channels-last order, as the first image did

    def apply(self, left: Tensor, right: Tensor, x: Tensor) -> Tensor:
        """Return x + Σ leftᵢ⟨rightᵢ, x⟩: H x, or Hᵀx with the factors exchanged."""
        if self.used == 0:
            return x
        weights = inner_products(right[:, : self.used], x).to(x.dtype)
        return x + torch.bmm(weights.unsqueeze(1), left[:, : self.used]).squeeze(1)


@final
@dataclasses.dataclass(frozen=True)
class Broyden(AbstractSolver[Secants]):
    """z ← z + H(f(z) − z), H the "good" Broyden approximation of (I − ∂f/∂z)⁻¹ from the last steps (Broyden, 1965).

    Superlinear near a fixed point, contraction or not; no guarantee far from one. After `memory` pairs it starts
    afresh from H = I. Memory: 2m states a sample.
    """

    memory: int = 10  # m

    def __post_init__(self) -> None:
        check_whole("memory", self.memory)

    def init(self, space: AbstractSpace, z0: Tensor) -> Secants:
        numbers = z0[0].numel()
        empty = z0.new_zeros(z0.shape[0], numbers)
        pairs = z0.new_zeros(2, z0.shape[0], self.memory, numbers)
        return Secants(pairs[0], pairs[1], empty, empty)

    def step(self, space: AbstractSpace, at: Evaluation, memory: Secants) -> tuple[Tensor, Secants]:
        last = memory.channels_last if memory.started else is_channels_last(at.image)
        z, gap = flatten_sample(at.z, last), flatten_sample(at.gap, last)
        if memory.started and memory.used == self.memory:
            memory = dataclasses.replace(memory, used=0)
        elif memory.started:
            memory = self._update(z - memory.z, memory.gap - gap, memory)
        memory = dataclasses.replace(memory, z=z, gap=gap, started=True, channels_last=last)
        return unflatten_sample(z + memory.apply(memory.u, memory.v, gap), at.image, last), memory

    def _update(self, dz: Tensor, y: Tensor, memory: Secants) -> Secants:
        """Add the rank-one change that makes H y = Δz, except where it would divide by (nearly) nothing."""
        v = memory.apply(memory.v, memory.u, dz)
        miss = dz - memory.apply(memory.u, memory.v, y)
        curvature = inner_products(v.unsqueeze(1), y)
        scale = torch.linalg.vector_norm(v, dim=1, keepdim=True) * torch.linalg.vector_norm(y, dim=1, keepdim=True)
        safe = curvature.abs() > 1e-6 * scale
        u = torch.where(safe, miss / torch.where(safe, curvature, 1.0), 0.0)
        memory.u[:, memory.used] = u
        memory.v[:, memory.used] = v
        return dataclasses.replace(memory, used=memory.used + 1)
