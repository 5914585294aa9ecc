"""kGLM's Propositions 2, 4, 12, 13 and 14 as functions: "Declarative nets that are equilibrium models"."""

import dataclasses
import math
from typing import final

import torch
from torch import Tensor

from ...kglm import AbstractFamily, Prior, check_assumptions, spectral_norm
from ...kglm.families import FLAT
from ...maps import Map


def canonical(family: AbstractFamily, mean: Tensor) -> Tensor:
    """The link (A′)⁻¹ by bisection; a ValueError where no η has that mean."""
    low, high = torch.full_like(mean, -1.0), torch.full_like(mean, 1.0)
    for _ in range(60):  # 2⁶⁰: beyond it a mean that has not been crossed never will
        low = torch.where(family.mean(low) > mean, 2 * low, low)
        high = torch.where(family.mean(high) < mean, 2 * high, high)
    for _ in range(120):
        eta = 0.5 * (low + high)
        above = family.mean(eta) > mean
        low, high = torch.where(above, low, eta), torch.where(above, eta, high)
    missed = (family.mean(eta) - mean).abs() > torch.finfo(mean.dtype).eps ** 0.5 * (1 + mean.abs())
    if bool(missed.any()):
        raise ValueError(f"{family!r} has no canonical parameter of mean {mean[missed].flatten()[0].item():g}.")
    return eta


def jacobian_norm(f: Map, z: Tensor) -> Tensor:
    """‖DH‖ at each row of z (batch, n), for the map f of one state (n,)."""
    jacobian = torch.func.vmap(torch.func.jacrev(f))(z)
    return torch.linalg.matrix_norm(jacobian, ord=2)


def proposition2(f: Map, z1: Tensor, z2: Tensor, points: int = 64) -> tuple[float, float]:
    """Proposition 2: ‖H(z1) − H(z2)‖ / ‖z1 − z2‖ is at most the largest ‖DH‖ on the segment between; return both.

    So ‖DH‖ ≤ q < 1 on an open convex set makes H a contraction on its closure. ‖DH‖ < 1 at every point is not enough:
    tanh on (0, 1), the paper's Figure 2b, has ‖DH‖ → 1 at 0 and is no contraction. It has one fixed point all the same,
    because it shortens every distance and [0, 1] is compact (Edelstein, 1962).
    """
    ratio = (f(z1) - f(z2)).norm() / (z1 - z2).norm()
    t = torch.linspace(0, 1, points, dtype=z1.dtype)[:, None]
    return ratio.item(), jacobian_norm(f, z1 + t * (z2 - z1)).max().item()


def proposition4(K: Tensor, lam: float, family: AbstractFamily, prior: Prior = FLAT) -> float:
    """Proposition 4: below 1, Assumption 2's number ‖K/λ‖ sup A″ sup(1 + ρ′) bounds the contraction of the map."""
    return check_assumptions(K, lam, family, prior).contraction


def proposition12(A: Tensor, B: Tensor, y: Tensor, sigma: Map, lipschitz: float = 1.0) -> Tensor:
    """Proposition 12: a bound on ‖z₁ − z₂‖ for z₁ = σ(A(y − z₁)), z₂ = σ(B(y − z₂)), per row of y.

    L_σ‖y − σ(0)‖ ‖A − B‖ / ((1 − L_σ‖A‖)(1 − L_σ‖B‖)). The published ‖A‖, ‖B‖ < 1 is not needed: L_σ‖A‖ < 1
    is.
    """
    first, second = _contraction(A, lipschitz), _contraction(B, lipschitz)
    return lipschitz * _target_norm(y, sigma) * spectral_norm(A - B) / ((1 - first) * (1 - second))


def proposition13(A: Tensor, y: Tensor, sigma: Map, lipschitz: float = 1.0) -> tuple[Tensor, Tensor]:
    """Proposition 13: a positive semi-definite B near A, and a bound on ‖z₁ − z₂‖ per row of y.

    B is the positive part of (A + Aᵀ)/2. The bound is L_σ‖y − σ(0)‖ (ν + ‖(A − Aᵀ)/2‖) / (1 − L_σ‖A‖)², ν the
    size of the most negative eigenvalue of (A + Aᵀ)/2: not positive, and not symmetric, each cost their part.
    """
    constant = _contraction(A, lipschitz)
    symmetric, skew = (A + A.mT) / 2, (A - A.mT) / 2
    values, vectors = torch.linalg.eigh(symmetric)
    B = (vectors * values.clamp(min=0)) @ vectors.mT
    negative = (-values.min()).clamp(min=0)
    return B, lipschitz * _target_norm(y, sigma) * (negative + spectral_norm(skew)) / (1 - constant) ** 2


@final
@dataclasses.dataclass(frozen=True)
class RandomStart:
    """Proposition 14: how near a random Gaussian start is to some kernel GLM."""

    deviation: float  # ν, of the entries of A
    probability: float  # at least this
    mean_squared: float  # bound on min over B of ‖z₁ − z₂‖²/n


def proposition14(n: int, C: float, t: float, spread: float, lipschitz: float = 1.0) -> RandomStart:
    """Proposition 14: for A (n × n) of independent N(0, ν²), ν = C / (L_σ(2√n + t)), with probability 1 − 2e^{−t²/2}
    a semi-definite B has ‖z₁ − z₂‖²/n ≤ 4 D C² / (1 − C)⁴, where D = `spread` bounds ‖y − σ(0)‖²/n.
    """
    if not 0 < C < 1:
        raise ValueError(f"`C` must lie between 0 and 1, got {C}.")
    deviation = C / (lipschitz * (2 * math.sqrt(n) + t))
    return RandomStart(deviation, max(0.0, 1 - 2 * math.exp(-(t**2) / 2)), 4 * spread * C**2 / (1 - C) ** 4)


def _target_norm(y: Tensor, sigma: Map) -> Tensor:
    """‖y − σ(0)‖ per row of y."""
    return (y - sigma(torch.zeros_like(y))).norm(dim=-1)


def _contraction(A: Tensor, lipschitz: float) -> Tensor:
    """L_σ‖A‖, below 1."""
    constant = lipschitz * spectral_norm(A)
    if not constant < 1:
        raise ValueError(f"The map must contract; its constant is {constant:.3g}.")
    return constant
