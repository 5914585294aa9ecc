"""The solver that cannot diverge, and the default: accelerated steps, each checked against a step that cannot fail."""

import dataclasses
from typing import final

import torch
from torch import Tensor

from ..equation import AbstractMap, Evaluation, FeatureMap
from ..fused.iterates import History
from ..tensors import check_nonnegative, check_share, check_whole, working_dtype
from .base import AbstractSolver

STEEP = 9.0  # L past which relaxed steps in the features are so short that E may fall for ever and arrive nowhere


@dataclasses.dataclass(frozen=True)
class Descent:
    """The points since the last rejected one, and how low the merit of the next one must be for it to be accepted.

    The step from a point that cannot fail is made of its entry, if the next one is rejected.
    """

    history: History
    target: Tensor  # per sample; infinite after a rejected point
    average: Tensor | None = None  # β of the averaged step, where f contracts
    demand: Tensor | None = None  # how many times its gap the next point may have there


@final
@dataclasses.dataclass(frozen=True)
class Proximal(AbstractSolver[Descent | None]):
    """Anderson acceleration that falls back, sample by sample, on a step that cannot fail; for equations from a cell.

    Where `norm` holds L under 1, f is nonexpansive: a proposal is accepted when it lowers ‖f(z) − z‖ by a fraction of
    what f guarantees; otherwise the averaged step (1 − β) z + β f(z), β = 2 / (2 + L), is taken, which converges
    (Krasnoselskii and Mann), and the history forgotten. That needs no energy, and happens for v = Wz where it can. With
    looks at every second step or fewer, the steps to the first one (three at most) are plain: most solves end there.

    Elsewhere E decides, whatever the weights: a proposal must lower it by a fraction of what
    T(z) = prox_{αφ}((1 − α) z + α d(z)), α = 2 / (2 + L), guarantees, otherwise T(z) is taken. A solve that looks at
    its residual tries v = Wz first, up to L = 9: a sample goes on there as long as E falls from look to look, and by T
    after that.
    `memory=0` is T alone. Memory: 2m states a sample, or as many features. Where E is bounded below (radial kernels
    for any weights, the linear one for norm < 1) it cannot diverge; elsewhere E may fall for ever.
    """

    memory: int = 5  # m; 0 for the bare step
    ridge: float = 1e-10
    fraction: float = 0.1  # of the guaranteed decrease that a proposal must achieve
    in_features: bool = True  # solve for v = Wz where that can be done; otherwise for z

    def __post_init__(self) -> None:
        check_whole("memory", self.memory, least=0)
        check_nonnegative("ridge", self.ridge)
        check_share("fraction", self.fraction)

    @property
    def steady(self) -> bool:
        return self.memory == 0

    @property
    def fallback(self) -> "Proximal | None":
        return dataclasses.replace(self, in_features=False) if self.in_features and self.memory else None

    def waits(self, f: AbstractMap) -> bool:
        """Where f contracts, plain steps cannot fail either."""
        return self.memory > 0 and f.contraction is not None

    def needs(self, f: AbstractMap) -> tuple[bool, bool]:
        descends = self.memory == 0 or f.contraction is None
        return descends, descends and self.memory > 0

    def space(self, f: AbstractMap, looks: bool) -> AbstractMap:
        if self.memory == 0 or not (self.in_features and f.has_features):
            return f
        if f.contraction is not None:
            return f.in_features()
        return f.in_features(guarded=True) if looks and f.limit <= STEEP else f

    def init(self, f: AbstractMap, z0: Tensor) -> Descent | None:
        if self.memory == 0:
            return None
        target = z0.new_full((len(z0),), torch.inf, dtype=working_dtype(z0.dtype))
        L, entries = f.contraction, max(2, self.memory)  # the newest and the one before, at least
        if L is not None:
            demand = 1 - self.fraction * (1 - L).clamp_min(0)
            return Descent(History.empty(z0, entries), target, (2 / (2 + L)).to(z0.dtype), demand.to(target.dtype))
        relaxation = None
        if isinstance(f, FeatureMap):  # few steps are too long then
            relaxation = (3 / f.bound).clamp_max(1.0).to(target.dtype)
        return Descent(History.empty(z0, entries, relaxation), target)

    def step(self, f: AbstractMap, at: Evaluation, memory: Descent | None) -> tuple[Tensor, Descent | None]:
        if memory is None:
            return f.descend(at), None
        if f.contraction is not None:
            return self._contract(f, at, memory)
        if isinstance(f, FeatureMap):
            mixture, history = memory.history.extrapolate(at, self.ridge)  # the looks see to it that E falls
            return mixture, dataclasses.replace(memory, history=history)
        plain = f.descend(at)
        assert at.energy is not None and at.rounding is not None
        accepted = at.energy <= memory.target + at.rounding
        mixture, history = memory.history.extrapolate(Evaluation(at.z, plain), self.ridge, accepted)
        target = torch.where(accepted, at.energy - self.fraction * 0.5 * history.square, torch.inf)
        return f.project(mixture), dataclasses.replace(memory, history=history, target=target)

    def _contract(self, f: AbstractMap, at: Evaluation, memory: Descent) -> tuple[Tensor, Descent]:
        """Where the gap of f(z) is at most L times that of z."""
        assert memory.average is not None and memory.demand is not None
        _, gap = at.measured
        accepted = gap <= memory.target
        mixture, history = memory.history.extrapolate(at, self.ridge, accepted, memory.average)
        target = torch.where(accepted, memory.demand * gap, torch.inf)
        return f.project(mixture), dataclasses.replace(memory, history=history, target=target)
