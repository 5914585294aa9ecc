"""The solver that cannot diverge, and the default: accelerated steps, each checked against a step that cannot fail.

With the two spaces that it iterates in: v = Wz, and z by the proximal gradient step of an equation.
"""

import dataclasses
from typing import Self, final

import torch
from torch import Tensor

from ..equation import Equation, averaged_step
from ..maps import AbstractMap, Point
from ..tensors import check_nonnegative, check_share, check_whole, working_dtype
from .anderson import EnergyGuard, GapGuard, Guard, History
from .base import (
    AbstractSolver,
    AbstractSpace,
    Evaluation,
    Measurement,
    check_start,
    evaluate_start,
    measure_state,
    relative_residual,
)

NEAR = 8.0  # times `tol`: from there on the residual of z is measured where v is iterated, at L = 1; less above


@final
@dataclasses.dataclass(frozen=True)
class ProximalSpace(AbstractSpace):
    """Iterates z ↦ T(z) = prox_{αφ}((1 − α) z + α d(z)), which lowers E at every step (see `Equation.descend`)."""

    f: Equation
    energy: bool  # whether E decides which of two points is the better one

    def evaluate(self, z: Tensor | None) -> Evaluation:
        v, image, drive, energy = self.f.evaluate(z, drive=True, energy=self.energy)
        assert drive is not None
        z = torch.zeros_like(image) if z is None else z
        return Evaluation(z, self.f.descend(z, drive), Point(z, v, image), energy)

    def start(self, z0: Tensor | None) -> Evaluation:
        return self.evaluate(None) if z0 is None else evaluate_start(self, z0, self.f)

    def measure(self, at: Evaluation, tol: float | None = None) -> Measurement:
        assert isinstance(at.point, Point) and at.point.image is not None
        merit, slack = (None, None) if at.energy is None else (at.energy.value, at.energy.slack)
        return Measurement(*relative_residual(at.z, at.point.image), at.point, merit, slack)

    def rows(self, index: Tensor) -> Self:
        return dataclasses.replace(self, f=self.f.rows(index))


@final
@dataclasses.dataclass(frozen=True)
class FeatureSpace(AbstractSpace):
    """Iterates v = Wz, which is smaller than z: v ↦ Wσ(Wᵀ∂S/∂v + ∂S/∂z), where σ(…) is z.

    For kernels through which z acts by v alone. As Lipschitz as the equation: ‖W‖² times ∂S/∂v. Its energy is that of
    z, the state of the image.
    """

    f: Equation
    energy: bool = False  # whether E decides which of two points is the better one

    @property
    def nearness(self) -> Tensor | float:
        """Times `tol`: the residual of v under which that of z is measured."""
        return NEAR if self.f.contraction is not None else NEAR / self.f.bound.clamp(1, NEAR)

    def evaluate(self, z: Tensor | None) -> Evaluation:
        """Evaluate at v = `z`; at v = 0, which needs no product, for None."""
        f, v = self.f, z
        z = f.state_at(v)
        image = f.operator(z)
        v = torch.zeros_like(image) if v is None else v
        point = Point(z, image)
        if not self.energy:
            return Evaluation(v, image, point)
        slope = f.kernel.differentiate(f.binding, z, image, value=True)
        return Evaluation(v, image, point, f.energy_of(z, slope, feasible=True), slope)

    def start(self, z0: Tensor | None) -> Evaluation:
        if z0 is None:
            return self.evaluate(None)
        check_start(z0, self.f)
        return self.evaluate(self.f.operator(z0))

    def answer(self, at: Evaluation, following: Tensor) -> Tensor:
        """Return z = σ(…), which is a step further than v already."""
        return at.point.z

    def measure(self, at: Evaluation, tol: float | None = None) -> Measurement:
        """Measure the residual of z in the equation itself, f(z) − z.

        That costs half an evaluation. With a `tol`, the residual of v stands for it in samples that are far from it:
        z is a step further than v, and mostly several times as near.
        """
        f, z, point = self.f, at.point.z, at.point
        near, gap = relative_residual(at.z, at.image, at.gap)
        merit, slack = (near, None) if at.energy is None else (at.energy.value, at.energy.slack)
        far = None if tol is None else near > self.nearness * tol
        if far is None or not bool(far.all()):
            slope = at.slope or f.kernel.differentiate(f.binding, z, at.image, value=False)
            image = f.image(slope, drive=False)[0]
            point = Point(z, at.image, image)
            residual, distance = relative_residual(z, image)
            near = residual if far is None else torch.where(far, near, residual)
            gap = distance if far is None else torch.where(far, gap, distance)
        return Measurement(near, gap, point, merit, slack)

    def remeasure(self, z: Tensor) -> Measurement:
        """The residual of a solve that failed may be that of v."""
        return measure_state(self.f, z)

    def rows(self, index: Tensor) -> Self:
        return dataclasses.replace(self, f=self.f.rows(index))


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

    def picard_steps(self, space: AbstractSpace) -> int | None:
        """Where f contracts, Picard steps cannot fail either."""
        return 0 if self.memory and isinstance(space, FeatureSpace) and not space.energy else None

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
        # Where slopes depend on the patch few steps of 3 / L are too long; `Squared` is as steep as L says everywhere.
        even = space.f.kernel.convex_loss and space.f.binding.gamma is None
        relaxation = average if even else (3 / L).clamp_max(1.0)
        return relaxation, EnergyGuard(accepted, average, rate, self.fraction, ceiling)

    def step(self, space: AbstractSpace, at: Evaluation, memory: History | None) -> tuple[Tensor, History | None]:
        if memory is None:
            return at.image, None
        mixture, memory = memory.extrapolate(at, self.ridge)
        if isinstance(space, ProximalSpace):
            mixture = space.f.prox(mixture, 0.0)  # it may have left the domain of φ
        return mixture, memory
