"""The solver that cannot diverge, and the default: accelerated steps, each checked against a step that cannot fail."""

import dataclasses
from typing import final

import torch
from torch import Tensor

from ..equation import Equation, averaged_step
from ..maps import AbstractMap
from ..spaces import AbstractSpace, Evaluation, FeatureSpace, ProximalSpace
from ..tensors import check_nonnegative, check_share, check_whole, working_dtype
from .anderson import EnergyGuard, GapGuard, Guard, History
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
    residual checks at every second step or fewer, the steps to the first one (three at most) are plain: most solves
    end there.

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

    def delays(self, space: AbstractSpace) -> bool:
        """Where f contracts, plain steps cannot fail either."""
        return self.memory > 0 and isinstance(space, FeatureSpace) and not space.energy

    def space(self, f: AbstractMap) -> AbstractSpace:
        if not isinstance(f, Equation):
            raise TypeError(
                f"`Proximal` descends an energy, so it needs an equation from `cell.bind(x)`, got {type(f).__name__}. "
                "Use `Picard`, `Anderson` or `Broyden` for a plain function."
            )
        if self.memory and f.kernel.through_features:
            return FeatureSpace(f, energy=f.contraction is None)
        return ProximalSpace(f, energy=self.memory > 0)

    def init(self, space: AbstractSpace, z0: Tensor) -> History | None:
        if self.memory == 0:
            return None
        assert isinstance(space, FeatureSpace | ProximalSpace)
        return History.empty(z0, max(2, self.memory), *self._choose_guard(space, z0))

    def _choose_guard(self, space: FeatureSpace | ProximalSpace, z0: Tensor) -> tuple[Tensor | None, Guard]:
        """Return the relaxation of what is mixed (None: 1) and the guard that goes with it."""
        dtype = working_dtype(z0.dtype)
        L, accepted = space.f.bound.to(dtype), z0.new_zeros(z0.shape[0], dtype=torch.bool)
        if not space.energy:
            return None, GapGuard(accepted, averaged_step(L), (1 - self.fraction * (1 - L).clamp_min(0)).square())
        ceiling = z0.new_full((z0.shape[0],), torch.inf, dtype=dtype)
        if isinstance(space, ProximalSpace):  # T is a whole step
            average = z0.new_ones((), dtype=dtype)
            return None, EnergyGuard(accepted, average, 0.5 * average, self.fraction, ceiling)
        average = averaged_step(L)
        rate = (0.5 * average.square() / space.f.stretch).to(dtype)
        relaxation = (3 / L).clamp_max(1.0)  # few steps are too long then
        return relaxation, EnergyGuard(accepted, average, rate, self.fraction, ceiling)

    def step(self, space: AbstractSpace, at: Evaluation, memory: History | None) -> tuple[Tensor, History | None]:
        if memory is None:
            return at.image, None
        mixture, memory = memory.extrapolate(at, self.ridge)
        if isinstance(space, ProximalSpace):
            mixture = space.f.prox(mixture, 0.0)  # it may have left the domain of φ
        return mixture, memory
