"""What is known about f after the fit: Laplace's approximation at the mode, exact for the Gaussian family."""

import dataclasses
import math
from typing import final

import torch
from torch import Tensor

from kerneq.kglm.family import AbstractFamily
from kerneq.kglm.newton import Fit
from kerneq.kglm.prior import Flat
from kerneq.kglm.problem import Problem


@final
@dataclasses.dataclass(frozen=True)
class Posterior:
    """f(X2) ≈ N(mode, covariance), in canonical coordinates."""

    mode: Tensor  # (…, m)
    covariance: Tensor  # (…, m, m)
    family: AbstractFamily

    @property
    def deviation(self) -> Tensor:
        return self.covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()

    @property
    def mean(self) -> Tensor:
        """A′ at the mode: the response of the most probable f."""
        return self.family.mean(self.mode)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The central interval of the mean response: A′ is monotone, so it carries quantiles over exactly."""
        if not 0 < level < 1:
            raise ValueError(f"`level` must lie between 0 and 1, got {level}.")
        width = math.sqrt(2) * torch.erfinv(torch.tensor(level, dtype=self.mode.dtype)).item() * self.deviation
        return self.family.mean(self.mode - width), self.family.mean(self.mode + width)


def covariance(problem: Problem, fit: Fit, cross: Tensor, prior: Tensor) -> Tensor:
    """(k(X2,X2) − k(X2,X) S(λI + SKS)⁻¹S k(X,X2)) / λ at the mode; `cross` = k(X2,X), `prior` = k(X2,X2)."""
    s, factor = _factor(problem, fit)
    half = torch.linalg.solve_triangular(factor, (cross * s[:, None, :]).mT, upper=False)
    return (prior - half.mT @ half) / problem.lam


def log_evidence(problem: Problem, fit: Fit) -> Tensor:
    """log ∫ p(Y | f) p(f) df by Laplace, less Σ log h(y), which depends neither on the kernel nor on λ."""
    if not isinstance(problem.prior, Flat):
        raise ValueError("The evidence needs a normalised prior: it is available for the flat factor q only.")
    _, factor = _factor(problem, fit)
    log_det = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return -fit.objective[-1] - 0.5 * (log_det - problem.t.shape[-1] * math.log(problem.lam))


def _factor(problem: Problem, fit: Fit) -> tuple[Tensor, Tensor]:
    s = problem.weights(fit.eta).sqrt()
    matrix = s[:, :, None] * problem.K * s[:, None, :]
    matrix.diagonal(dim1=-2, dim2=-1).add_(problem.lam)
    return s, torch.linalg.cholesky(matrix)
