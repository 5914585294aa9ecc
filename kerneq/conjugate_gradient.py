"""Conjugate gradient for symmetric positive definite systems, sample by sample."""

from collections.abc import Callable

import torch
from torch import Tensor

from .solution import Solution, Status, final_codes
from .tensors import per_sample, per_sample_dot


def conjugate_gradient(
    matvec: Callable[[Tensor], Tensor], b: Tensor, tol: float, max_steps: int, check_every: int
) -> Solution:
    """Solve A x = b, A symmetric positive definite per sample, to ‖b − Ax‖ ≤ tol·‖b‖, each sample on its own.

    A sample that has converged, or that meets a direction of negative curvature, keeps its x from then on.
    """
    size = per_sample_dot(b, b)
    limit = tol**2 * size
    x, r, p, rr = torch.zeros_like(b), b, b, size
    active = rr > limit
    broken = torch.zeros_like(active)
    steps = torch.zeros(len(b), dtype=torch.long, device=b.device)
    for step in range(1, max_steps + 1):
        if check_every < max_steps and step % check_every == 0 and not bool(active.any()):
            break
        Ap = matvec(p)
        curvature = per_sample_dot(p, Ap)
        positive = curvature > 0
        broken |= active & ~positive
        active = active & positive
        alpha = torch.where(active, rr / torch.where(active, curvature, 1.0), 0.0)
        x = torch.addcmul(x, per_sample(alpha, x), p)
        r = torch.addcmul(r, per_sample(alpha, r), Ap, value=-1)
        new = per_sample_dot(r, r)
        beta = torch.where(active, new / torch.where(active, rr, 1.0), 0.0)
        p = torch.addcmul(r, per_sample(beta, p), p)
        rr = torch.where(active, new, rr)
        steps = torch.where(active, step, steps)
        active = active & (rr > limit)
    residual = (rr / size.clamp_min(torch.finfo(size.dtype).tiny)).sqrt()
    codes = torch.where(broken & residual.isfinite(), Status.BREAKDOWN.code, final_codes(residual, tol))
    return Solution(x, residual, steps, codes, tol)
