"""The solver that cannot diverge, and the default: accelerated steps, each checked against a step that cannot fail."""

import dataclasses
from typing import final

import torch
from torch import Tensor

from ..equation import AbstractMap, Evaluation, FeatureMap
from ..fused.iterates import Guard, History
from ..tensors import check_nonnegative, check_share, check_whole, working_dtype
from .base import AbstractSolver


@final
@dataclasses.dataclass(frozen=True)
class Proximal(AbstractSolver[History | None]):
    """Anderson acceleration that falls back, sample by sample, on a step that cannot fail; for equations from a cell.

    It cannot diverge where E is bounded below (radial kernels for any weights, the linear one for norm < 1); elsewhere
    E may fall for ever. Memory: 2m features a sample, or as many states.

    It iterates v = Wz where it can. Where `norm` keeps L, the steepest slope of d, at most 1, f is nonexpansive: a
    proposal is accepted when it lowers ‖f(v) − v‖ by a fraction of what f guarantees; otherwise the averaged step
    (1 − β) v + β f(v), β = 2 / (2 + L), is taken, which converges (Krasnoselskii and Mann). That needs no energy. With
    looks at every second step or fewer, the steps to the first one (three at most) are plain: most solves end there.

    Elsewhere E decides, whatever the weights: that of z = σ(d), which a proposal must lower by a fraction of what the
    averaged step guarantees, β²‖f(v) − v‖² / 2‖W‖². Otherwise it returns to the last accepted z, and goes on by
    averaged steps until a z is low enough (docs/theory.md, fact 3). Kernels that see more of z than v are iterated by
    T(z) = prox_{αφ}((1 − α) z + α d(z)), α = 2 / (2 + L), in the same way; `memory=0` is T alone.
    """

    memory: int = 4  # m; 0 for the bare step
    ridge: float = 1e-10
    fraction: float = 0.1  # of the guaranteed decrease that a proposal must achieve

    def __post_init__(self) -> None:
        check_whole("memory", self.memory, least=0)
        check_nonnegative("ridge", self.ridge)
        check_share("fraction", self.fraction)

    @property
    def steady(self) -> bool:
        return self.memory == 0

    def waits(self, f: AbstractMap) -> bool:
        """Where f contracts, plain steps cannot fail either."""
        return self.memory > 0 and f.contraction is not None

    def needs(self, f: AbstractMap) -> tuple[bool, bool]:
        if self.memory == 0:
            return True, False
        return f.contraction is None and not isinstance(f, FeatureMap), f.contraction is None

    def space(self, f: AbstractMap) -> AbstractMap:
        return (f.in_features() or f) if self.memory else f

    def init(self, f: AbstractMap, z0: Tensor) -> History | None:
        if self.memory == 0:
            return None
        dtype, relaxation = working_dtype(z0.dtype), None
        ceiling = None if f.contraction is not None else z0.new_full((z0.shape[0],), torch.inf, dtype=dtype)
        if f.contraction is not None:
            L = f.contraction.to(dtype)
            average, rate = 2 / (2 + L), (1 - self.fraction * (1 - L).clamp_min(0)).square()
        elif isinstance(f, FeatureMap):
            L = f.bound.to(dtype)
            average, relaxation = 2 / (2 + L), (3 / L).clamp_max(1.0)  # few steps are too long then
            rate = (0.5 * average.square() / f.stretch).to(dtype)
        else:  # T is a whole step
            average = z0.new_ones((), dtype=dtype)
            rate = 0.5 * average
        accepted = z0.new_zeros(z0.shape[0], dtype=torch.bool)
        guard = Guard(accepted, average, rate, self.fraction, ceiling)
        return History.empty(z0, max(2, self.memory), relaxation, guard)

    def step(self, f: AbstractMap, at: Evaluation, memory: History | None) -> tuple[Tensor, History | None]:
        if memory is None:
            return f.descend(at), None
        if f.contraction is None and not isinstance(f, FeatureMap):
            at = dataclasses.replace(at, image=f.descend(at))
        mixture, memory = memory.extrapolate(at, self.ridge)
        return f.project(mixture), memory
