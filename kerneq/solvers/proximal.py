"""Proximal gradient descent on the hidden problem: the solver that cannot diverge."""

import dataclasses
from typing import final

import torch
from torch import Tensor

from ..equation import AbstractMap, Evaluation
from ..fused.iterates import History
from ..tensors import check_nonnegative, check_share, check_whole, per_sample, working_dtype
from .base import AbstractSolver


@dataclasses.dataclass(frozen=True)
class Descent:
    """Where the last accepted point leads, and how low the energy must fall for the next one to be accepted."""

    history: History
    safe: Tensor  # T(z) of the last accepted z
    target: Tensor  # per sample


@final
@dataclasses.dataclass(frozen=True)
class Proximal(AbstractSolver[Descent | None]):
    """z ← T(z) = prox_{αφ}((1 − α) z + α d(z)), α = 2 / (2 + L): lowers E at every step, for any weights.

    Accelerated by default: Anderson on T, whose proposal is accepted when it lowers E by a fraction of what the
    plain step guarantees; otherwise the plain step is taken and that sample's history forgotten. E comes with the
    evaluation that is needed anyway. `memory=0` is the bare step. Needs an equation from a cell (drive, energy,
    bound), not just a function. Memory: 2m + 1 states a sample.
    """

    memory: int = 5  # m; 0 for the bare step
    ridge: float = 1e-10
    fraction: float = 0.1  # of the guaranteed decrease that a proposal must achieve

    def __post_init__(self) -> None:
        check_whole("memory", self.memory, least=0)
        check_nonnegative("ridge", self.ridge)
        check_share("fraction", self.fraction)

    @property
    def steady(self) -> bool:
        return self.memory == 0

    @property
    def needs_drive(self) -> bool:
        return True

    @property
    def needs_energy(self) -> bool:
        return self.memory > 0

    def init(self, f: AbstractMap, z0: Tensor) -> Descent | None:
        if self.memory == 0:
            return None
        target = z0.new_full((len(z0),), torch.inf, dtype=working_dtype(z0.dtype))
        return Descent(History.empty(z0, self.memory), safe=z0, target=target)

    def step(self, f: AbstractMap, at: Evaluation, memory: Descent | None) -> tuple[Tensor, Descent | None]:
        plain = f.descend(at)
        if memory is None:
            return plain, None
        assert at.energy is not None and at.rounding is not None
        accepted = at.energy <= memory.target + at.rounding
        mixture, history = memory.history.extrapolate(Evaluation(at.z, plain), self.ridge, accepted=accepted)
        proposal = f.project(mixture)
        target = at.energy - self.fraction * 0.5 * history.square
        here = per_sample(accepted, at.z)
        if not (accepted.is_cuda or torch.compiler.is_exporting()) and bool(accepted.all()):
            safe, z = plain, proposal
        else:
            safe, z = torch.where(here, plain, memory.safe), torch.where(here, proposal, memory.safe)
        target = torch.where(accepted, target, torch.inf)  # the plain step itself is always accepted
        return z, Descent(history, safe, target)
