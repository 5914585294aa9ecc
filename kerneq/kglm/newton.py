"""Newton's method on the inner problem, damped so that the objective never rises; the same as IRWLS."""

import dataclasses

import torch
from torch import Tensor

from kerneq.kglm.problem import Problem
from kerneq.kglm.system import CHOLESKY, AbstractSystem


@dataclasses.dataclass(frozen=True)
class Fit:
    """Where Newton's method stopped, per sample."""

    alpha: Tensor  # (batch, n), representer coefficients: f = k(·, X)α
    eta: Tensor  # (batch, n), canonical parameters at the coordinates
    residual: Tensor  # (batch,), ‖r‖ / max(‖T‖, 1)
    converged: Tensor  # (batch,), bool
    steps: int
    objective: Tensor  # (steps + 1, batch), J before every step and at the end


def newton(
    problem: Problem,
    *,
    system: AbstractSystem = CHOLESKY,
    start: Tensor | None = None,
    tol: float = 1e-12,
    max_steps: int = 50,
) -> Fit:
    """Minimise J from `start` (default α = 0) until ‖r‖ ≤ tol·max(‖T‖, 1) or rounding stops the descent.

    The step is p = (λI + DK)⁻¹ r = (r − S(λI + SKS)⁻¹S K r)/λ. It is halved, per sample, until J falls by a
    quarter of what its slope promises: J is convex, so Newton's method then converges from anywhere.
    """
    alpha = torch.zeros_like(problem.t) if start is None else start.clone()
    eta = problem.canonical(alpha)
    value = problem.objective(alpha, eta)
    if not bool(value.isfinite().all()):
        raise ValueError("The objective is not finite at the start; check the offset and the targets.")
    scale = problem.t.norm(dim=-1).clamp(min=1)
    history, active = [value], torch.ones_like(value, dtype=torch.bool)
    residual = problem.residual(alpha, eta)
    for step in range(max_steps + 1):
        before = residual.norm(dim=-1)
        active = active & (before > tol * scale)
        if step == max_steps or not bool(active.any()):
            break
        p, Kp, slope = _direction(problem, eta, residual, system)
        alpha, eta, new = _descend(problem, alpha, eta, p, Kp, value, slope, active)
        residual = problem.residual(alpha, eta)
        # a sample whose objective and residual both stand still has reached the floor of its dtype
        active = active & ((new < value) | (residual.norm(dim=-1) < 0.5 * before))
        value = new
        history.append(value)
    relative = residual.norm(dim=-1) / scale
    floor = 1e3 * torch.finfo(alpha.dtype).eps
    return Fit(alpha, eta, relative, relative <= max(tol, floor), len(history) - 1, torch.stack(history))


def _direction(problem: Problem, eta: Tensor, r: Tensor, system: AbstractSystem) -> tuple[Tensor, Tensor, Tensor]:
    """p, Kp and the slope of J along p (−rᵀKp, never positive)."""
    s, Kr = problem.weights(eta).sqrt(), r @ problem.K
    x = system.solve(problem.K, s, problem.lam, s * Kr)
    p = (r - s * x) / problem.lam
    Kp = p @ problem.K
    return p, Kp, -(r * Kp).sum(-1)


def _descend(
    problem: Problem,
    alpha: Tensor,
    eta: Tensor,
    p: Tensor,
    Kp: Tensor,
    value: Tensor,
    slope: Tensor,
    active: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The longest step of 1, ½, ¼ … whose objective falls enough, per sample; no step where none does."""
    length = active.to(alpha.dtype)
    rounding = problem.rounding(alpha, eta)
    for _ in range(60):
        trial, trial_eta = alpha + length[:, None] * p, eta + length[:, None] * Kp
        new = problem.objective(trial, trial_eta)
        refused = (length > 0) & ~(new <= value + 0.25 * length * slope + rounding)
        if not bool(refused.any()):
            break
        length = torch.where(refused, 0.5 * length, length)
    stay = (refused | (length == 0))[:, None]
    alpha, eta = torch.where(stay, alpha, trial), torch.where(stay, eta, trial_eta)
    return alpha, eta, torch.where(stay[:, 0], value, new)
