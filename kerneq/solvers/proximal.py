"""Proximal gradient descent on the hidden problem: the solver that cannot diverge."""

import dataclasses
from typing import final

import torch
from torch import Tensor

from ..equation import AbstractEquation, Evaluation
from ..fused.history import History
from ..prox import AbstractProx
from ..solution import check_whole, per_sample
from .base import AbstractSolver, Map


@dataclasses.dataclass(frozen=True)
class Descent:
    """Where the last accepted point leads, and how low the energy must fall for the next one to be accepted."""

    prox: AbstractProx
    alpha: Tensor  # the step, 2 / (2 + L)
    history: History | None = None
    safe: Tensor | None = None  # T(z) of the last accepted z
    target: Tensor | None = None  # per sample


def descend(at: Evaluation, prox: AbstractProx, alpha: Tensor) -> Tensor:
    """T(z) = prox_{αφ}((1 − α) z + α d(z)): the relaxation is inside the prox, so its fixed points are those of f."""
    assert at.drive is not None
    alpha = alpha.to(at.z.dtype)
    return prox(torch.lerp(at.z, at.drive, alpha), alpha)


def safe_step(bound: Tensor) -> Tensor:
    """α = 2 / (2 + L): a step lowers E by at least ½‖T(z) − z‖², whatever the weights (docs/facts.md, fact 3)."""
    return 2 / (2 + bound)


@final
@dataclasses.dataclass(frozen=True)
class Proximal(AbstractSolver[Descent]):
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
        if not self.ridge >= 0:
            raise ValueError(f"`ridge` must not be negative, got {self.ridge}.")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"`fraction` must lie in (0, 1], got {self.fraction}.")

    @property
    def steady(self) -> bool:
        return self.memory == 0

    @property
    def needs_drive(self) -> bool:
        return True

    @property
    def needs_energy(self) -> bool:
        return self.memory > 0

    def init(self, f: Map, z0: Tensor) -> Descent:
        if not isinstance(f, AbstractEquation):
            raise TypeError(
                f"`Proximal` descends an energy, so it needs an equation from `cell.bind(x)`, got {type(f).__name__}. "
                "Use `Picard`, `Anderson` or `Broyden` for a plain function."
            )
        start = Descent(f.prox, safe_step(f.bound))
        if self.memory == 0:
            return start
        target = z0.new_full((len(z0),), torch.inf, dtype=torch.promote_types(z0.dtype, torch.float32))
        return dataclasses.replace(start, history=History.empty(z0, self.memory), safe=z0, target=target)

    def step(self, at: Evaluation, memory: Descent) -> tuple[Tensor, Descent]:
        plain = descend(at, memory.prox, memory.alpha)
        if memory.history is None or memory.safe is None or memory.target is None:
            return plain, memory
        assert at.energy is not None and at.rounding is not None
        accepted = at.energy <= memory.target + at.rounding
        mixture, history = memory.history.extrapolate(Evaluation(at.z, plain), self.ridge, accepted=accepted)
        # Mixing may leave the domain of φ: prox with scale 0 projects back onto it.
        proposal = memory.prox(mixture, 0.0)
        target = at.energy - self.fraction * 0.5 * history.square
        here = per_sample(accepted, at.z)
        if not (accepted.is_cuda or torch.compiler.is_exporting()) and bool(accepted.all()):
            safe, z = plain, proposal
        else:
            safe, z = torch.where(here, plain, memory.safe), torch.where(here, proposal, memory.safe)
        target = torch.where(accepted, target, torch.inf)  # the plain step itself is always accepted
        return z, dataclasses.replace(memory, history=history, safe=safe, target=target)
