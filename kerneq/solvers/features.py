"""Solving for v = Wz instead of z: the features are fewer than the state, four times on the largest branch of GEQ."""

import dataclasses
from typing import Any, Protocol, final

import torch
from torch import Tensor

from ..equation import AbstractEquation, Evaluation
from ..fused.residual import relative_residual
from ..solution import Solution, Status
from .anderson import Anderson
from .base import AbstractSolver, Map, looks
from .ledger import Ledger
from .proximal import Proximal

SHARPEN = 4  # how much closer v has to come when z turns out not to be close enough


class Solve(Protocol):
    """`kerneq.solve`, which calls this module."""

    def __call__(
        self, f: Map, z0: Tensor, solver: AbstractSolver[Any], *, tol: float, max_steps: int, check_every: int | None
    ) -> Solution: ...


@final
@dataclasses.dataclass(frozen=True)
class InFeatures:
    """Let `solver` iterate in the space of the features: forward as the solver of a layer, backward of `Implicit`.

    Forward it looks for v = W σ(Wᵀm(v) + ∂S/∂z), whose σ(…) is z; that z is then checked in the equation itself, so
    that the residual reported is the usual one. Backward it solves y = WDg ± WDWᵀNy, with w = D(g ± WᵀNy) after it.
    For kernels through which z acts by v = Wz alone, the Gaussian and the linear one. Forward it pays where the solver
    remembers states.
    """

    solver: AbstractSolver[Any] = Anderson(memory=3)  # `Picard()` is cheaper and enough where the equation contracts

    def __post_init__(self) -> None:
        if not isinstance(self.solver, AbstractSolver) or isinstance(self.solver, Proximal):
            raise TypeError(f"`solver` must be Picard, Anderson or Broyden in the features, got {self.solver!r}.")


def solve_in_features(
    f: Map, z0: Tensor | None, how: InFeatures, tol: float, max_steps: int, check_every: int | None, solve: Solve
) -> tuple[Ledger, Tensor]:
    """z from the v that is found, checked by one evaluation of f; once more, and closer, where that fails."""
    features = f.in_features() if isinstance(f, AbstractEquation) else None
    if features is None:
        raise TypeError(
            "`InFeatures` needs the equation of a cell with a Gaussian or a linear kernel; give the solver itself for "
            f"others, got {type(f).__name__}."
        )
    v, aim, left = features.start(z0), tol, max_steps
    used = torch.zeros(len(v), dtype=torch.int64, device=v.device)
    blind = looks(check_every, v) >= max_steps
    while True:
        ends = torch.full_like(used, Status.MAX_STEPS.code)
        if left > 1:
            found = solve(features, v, how.solver, tol=aim, max_steps=left - 1, check_every=check_every)
            v, used, ends = found.value, used + found.steps, found.codes
        z = features.state(v)
        page = Ledger.single(0, *relative_residual(Evaluation(z, f(z))), tol)
        page.steps = used = used + 1
        missed = page.codes == Status.MAX_STEPS.code
        page.codes = torch.where(missed & (ends == Status.PRECISION.code), ends, page.codes)
        if blind:
            return page, z
        left = max_steps - int(used.max())
        if left < 1 or not bool((missed & (ends == Status.CONVERGED.code)).any()):  # v was found, z is not good enough
            return page, z
        v, aim = features.start(z), aim / SHARPEN
