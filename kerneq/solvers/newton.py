"""Damped Newton: for maps whose slope has no bound, on states small enough for a dense Jacobian."""

import dataclasses
from typing import Self, final

import torch
from torch import Tensor

from ..maps import AbstractMap, Point, linearise
from ..tensors import per_sample, per_sample_norm
from .base import (
    AbstractSolver,
    AbstractSpace,
    Evaluation,
    Measurement,
    StateSpace,
    evaluate_start,
    may_meet,
    measure_state,
    relative_residual,
)

HALVINGS = 60
DECREASE = 1e-4  # of the slope of ‖f(z) − z‖ along p, which a step must achieve (Armijo)


@final
@dataclasses.dataclass(frozen=True)
class NewtonSpace(AbstractSpace):
    """Iterates z ↦ z + p, p = (I − J)⁻¹(f(z) − z), the error of z to first order; its fixed points are those of f."""

    f: AbstractMap

    @property
    def doubtful(self) -> bool:
        return may_meet(self.f)

    def evaluate(self, z: Tensor) -> Evaluation:
        """A solve that ends at z returns the step from there, whose f(z) − z is of the order of ‖p‖² where t = 1."""
        system = linearise(self.f, z.detach())
        image = system.image.detach()
        image = (z + system.solve(image - z)).to(image.dtype)
        z = z.to(image.dtype)
        return Evaluation(z, image, Point(self._damped(z, image)))

    def start(self, z0: Tensor | None) -> Evaluation:
        if z0 is None:
            return self.evaluate(StateSpace(self.f).start(None).z.contiguous())
        return evaluate_start(self, z0, self.f)

    def measure(self, at: Evaluation, tol: float | None = None) -> Measurement:
        """Measure ‖p‖ / ‖z + p‖, and ‖f(z) − z‖ at the point that is returned."""
        return Measurement(relative_residual(at.z, at.image, at.gap)[0], self._distance(at.point.z), at.point)

    def remeasure(self, z: Tensor) -> Measurement:
        """Where Newton's method failed, p is not the error."""
        return measure_state(self.f, z)

    def rows(self, index: Tensor) -> Self | None:
        rest = self.f.rows(index)
        return None if rest is None else dataclasses.replace(self, f=rest)

    def _damped(self, z: Tensor, image: Tensor) -> Tensor:
        """Return z + tp with the first t of 1, ½, ¼ … that lowers ‖f(z) − z‖ enough, for each sample.

        p is a direction of descent. Where it is no number, or so short that rounding decides, or no t will do, t = 1.
        """
        p = image - z
        here = self._distance(z)
        at_rest = ~(per_sample_norm(p) > torch.finfo(p.dtype).eps ** 0.5 * per_sample_norm(image))
        length = torch.ones_like(here)
        for _ in range(HALVINGS):
            trial = z + per_sample(length, p).to(p.dtype) * p
            refused = ~(self._distance(trial) <= (1 - DECREASE * length) * here) & ~at_rest
            if not bool(refused.any()):
                return trial
            length = torch.where(refused, 0.5 * length, length)
        return torch.where(per_sample(refused, p), image, trial)

    def _distance(self, z: Tensor) -> Tensor:
        """Return ‖f(z) − z‖ of each sample, (batch,)."""
        return per_sample_norm(self.f(z) - z)


@final
@dataclasses.dataclass(frozen=True)
class Newton(AbstractSolver[None]):
    """z ← z + t(I − J)⁻¹(f(z) − z), J = ∂f/∂z, t = 1, ½, ¼ … until ‖f(z) − z‖ falls; 1 where no t makes it fall.

    Converges from anywhere, in the end quadratically, where f is smooth, I − J regular and ‖f(z) − z‖ keeps z bounded:
    as for every kernel GLM with a semi-definite K, whatever A″ (docs/theory.md, fact 11). At the kinks of ReLU it may
    cycle, far from z*: start it near. Its residual is ‖p‖ / ‖z + p‖, the error of z to first order, which rounding in a
    steep f does not hide; it returns z + p, whose error is about the square of that, and `error_bound` is that of
    z + p. As the solver of `Implicit` it solves the adjoint system directly. For n entries a state, a step costs n
    products with J and n³ operations, and n² numbers a sample; it evaluates f at every trial, so it is not for CUDA
    graphs.
    """

    def space(self, f: AbstractMap) -> AbstractSpace:
        return NewtonSpace(f)

    def init(self, space: AbstractSpace, z0: Tensor) -> None:
        return None

    def step(self, space: AbstractSpace, at: Evaluation, memory: None) -> tuple[Tensor, None]:
        return at.point.z, None
