"""Propositions, lemmas and remarks of GEQ, theorems of KerDEQ: as printed, and as they can be proved.

Notation: z = σ(βWᵀr), r = a − Wz, a = Ux + b, β = e^{−γ‖r‖²} (GEQ, KerDEQ) and z = σ(WᵀWz + a) (OptEq), σ = ReLU. The
proofs are in docs/theory.md, the counter-examples to what is printed in docs/errata.md; `kerneq verify` checks both.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from ...kernels import AbstractRadialKernel, Gaussian
from ...kernels.radial import input_lipschitz
from ...solvers import Picard, solve
from .constants import Constants

HALVINGS = 60


@final
@dataclasses.dataclass(frozen=True)
class Bound:
    """The right-hand side of one statement: as printed, were it negative, and as it can be proved."""

    published: float
    corrected: float


@final
@dataclasses.dataclass(frozen=True)
class Comparison:
    """A statement about both models."""

    geq: Bound
    opteq: Bound


# Infinite width


@final
@dataclasses.dataclass(frozen=True)
class Expansion:
    """S = (1/2γ)e^{−γ‖a−v‖²} as an inner product of features up to order k, per row of a and v."""

    kernel: Tensor  # S itself
    published: Tensor  # λ⟨Φ(a), Φ(v)⟩ as printed
    corrected: Tensor  # ⟨Ψ(a), Ψ(v)⟩, Ψ of order k
    error: Tensor  # |kernel − corrected| is at most this
    slope: Tensor  # ∂⟨Ψ(a), Ψ(v)⟩/∂v; of S it is e^{−γ‖a−v‖²}(a − v)
    slope_error: Tensor  # the length of their difference is at most this


def feature_map(v: Tensor, gamma: float, order: int) -> Tensor:
    """Ψ(v) = (2γ)^{−1/2} e^{−γ‖v‖²} [√((2γ)ⁱ/i!) v⊗…⊗v]ᵢ≤ₖ, Φ of Proposition 1 (7), (8) as it can be proved.

    v is (batch, n), Ψ(v) (batch, 1 + n + … + nᵏ).
    """
    power, parts = torch.ones_like(v[:, :1]), []
    for i in range(order + 1):
        parts.append(math.sqrt((2 * gamma) ** i / math.factorial(i)) * power)
        power = (power[:, :, None] * v[:, None, :]).flatten(1)
    return torch.cat(parts, dim=1) * torch.exp(-gamma * v.square().sum(1, keepdim=True)) / math.sqrt(2 * gamma)


def proposition1(a: Tensor, v: Tensor, gamma: float, order: int) -> Expansion:
    """GEQ Proposition 1, (7), (8): a linear kernel on infinitely many features, S(a, v) = ⟨Ψ(a), Ψ(v)⟩ as k → ∞.

    a and v are (batch, n), k is `order`, Ψ is `feature_map`. With t = 2γ⟨a, v⟩ and Rₖ = |t|ᵏ⁺¹/(k+1)! e^{max(t, 0)} the
    rest of the exponential series, the errors are e^{−γ(‖a‖²+‖v‖²)}Rₖ/2γ in S and at most
    e^{−γ(‖a‖²+‖v‖²)}(‖a‖Rₖ₋₁ + ‖v‖Rₖ) in its slope; so where E is μ-strongly convex an equilibrium of order k is within
    ‖W‖/μ times the latter of GEQ's. As printed, λ lacks 1/2γ and a square and stays outside of the gradient, where it
    does not belong: it depends on z.
    """
    aa, vv, t = a.square().sum(1), v.square().sum(1), 2 * gamma * (a * v).sum(1)
    weight = torch.exp(-gamma * (aa + vv))
    terms = [torch.ones_like(t)]
    for i in range(1, order + 2):
        terms.append(terms[-1] * t / i)
    total, before = sum(terms[:-1], torch.zeros_like(t)), sum(terms[:-2], torch.zeros_like(t))
    tail = torch.exp(t.clamp_min(0))
    rest, rest_before = terms[-1].abs() * tail, terms[-2].abs() * tail
    return Expansion(
        kernel=torch.exp(-gamma * (a - v).square().sum(1)) / (2 * gamma),
        published=torch.exp(-gamma * (aa + vv.sqrt())) * total,
        corrected=weight * total / (2 * gamma),
        error=weight * rest / (2 * gamma),
        slope=weight[:, None] * (before[:, None] * a - total[:, None] * v),
        slope_error=weight * (aa.sqrt() * rest_before + vv.sqrt() * rest),
    )


def theorem1(a: Tensor, v: Tensor, gamma: float, order: int) -> Expansion:
    """KerDEQ Theorem 1, (7): its form of Proposition 1. Its appendix has i for i! in Φ: 1 − log(1 − t), not eᵗ."""
    t = 2 * gamma * (a * v).sum(1)
    total = torch.ones_like(t)
    for i in range(1, order + 1):
        total = total + t**i / i
    scale = torch.exp(-gamma * (a.square().sum(1) + v.square().sum(1).sqrt()))
    return dataclasses.replace(proposition1(a, v, gamma, order), published=scale * total)


# Generalisation


def lemma1(m: float, drive: float, weight_change: float, drive_change: float) -> Bound:
    """GEQ Lemma 1, (26): ‖z − z̄‖ for z = σ(Mz + a) and z̄ = σ(M̄z̄ + ā).

    ‖M‖, ‖M̄‖ ≤ m < 1 and ‖a‖ ≤ `drive`; the changes are ‖M̄ − M‖ and ‖ā − a‖. It is true as printed; the second term
    needs no square.
    """
    weight = weight_change * drive / (1 - m) ** 2
    return Bound(weight + drive_change / (1 - m) ** 2, weight + drive_change / (1 - m))


def lemma2(divergence: float, samples: int, delta: float) -> float:
    """GEQ Lemma 2, (27): the gap L₀ − L̂_η ≤ 4√((KL + ln(6M/δ))/(M − 1)), PAC-Bayesian (Neyshabur et al., 2018).

    KL is between the perturbed weights and a prior that does not know the data; the perturbation moves every output
    by less than η/4 with probability ½ at least.
    """
    return 4 * math.sqrt((divergence + math.log(6 * samples / delta)) / (samples - 1))


def margin_loss(logits: Tensor, labels: Tensor, margin: float) -> float:
    """GEQ (9), KerDEQ (8): L̂_η, the share of samples (rows of logits) with f_y ≤ η + max of the other logits."""
    own = logits.gather(1, labels[:, None])[:, 0]
    others = logits.scatter(1, labels[:, None], -torch.inf).amax(1)
    return float((own <= margin + others).double().mean())


def perturbation(c: Constants, omega: float) -> Comparison:
    """GEQ (30), (35): how far the logits move when W, U, b, W_c and b_c move by at most ω each.

    This is the core of Proposition 2.

    Corrected, for GEQ, with w = ‖W‖, ρ = min(‖a‖, `reach`) ≥ ‖βr‖ and −`lowest` = c:
    ‖z − z̄‖ ≤ ω(ρ + (w + ω)(B + 1 + wρ)) / (1 − c(w + ω)²); no β, and none taken for constant. For OptEq:
    ‖z − z̄‖ ≤ ω((2w + ω)‖a‖/(1 − w²) + B + 1) / (1 − (w + ω)²). Then (‖W_c‖ + ω)‖z − z̄‖ + ω‖z‖ + ω.
    """
    geq, opteq = _brackets(c)
    return Comparison(Bound(omega * geq, _geq_change(c, omega)), Bound(omega * opteq, _opteq_change(c, omega)))


def _brackets(c: Constants) -> tuple[float, float]:
    """[…]/(1 − β_max m)² and […]/(1 − m)² as Proposition 2 prints them."""
    beta, mu, B = c.beta, c.mu, c.inputs
    rest, linear = 1 - beta * c.m, 1 - c.m
    geq = beta * mu**4 * B + (2 * mu * beta + 1) * rest * mu * B + rest**2
    opteq = mu**3 * B + linear * mu * B + linear**2
    return _over(geq, rest**2), _over(opteq, linear**2)


def _over(top: float, bottom: float) -> float:
    return top / bottom if bottom else math.inf


def _geq_change(c: Constants, omega: float) -> float:
    wide, rho = c.W + omega, min(c.drive, c.reach)
    convexity = 1 + min(0.0, c.lowest) * wide**2
    if convexity <= 0:
        return math.inf
    state = omega * (rho + wide * (c.inputs + 1 + c.W * rho)) / convexity
    return (c.head + omega) * state + omega * min(c.W * rho, c.drive / 2) + omega


def _opteq_change(c: Constants, omega: float) -> float:
    wide = c.W + omega
    if wide >= 1:
        return math.inf
    length = c.drive / (1 - c.m)  # ≥ ‖z‖
    state = omega * ((c.W + wide) * length + c.inputs + 1) / (1 - wide**2)
    return (c.head + omega) * state + omega * length + omega


def proposition2(c: Constants, margin: float, samples: int, delta: float) -> Comparison:
    """GEQ Proposition 2: the gap between L₀ and L̂_η, with probability 1 − δ over M training samples of norm ≤ B.

    Corrected: ω is the largest with `perturbation` ≤ η/4; noise N(0, σ²) on the weights, ω = σ(2√h + √(2 ln 10)),
    keeps all five changes below ω with probability ½ (Davidson and Szarek), and lemma 2 holds for every σ = 2⁻ʲ at
    once with δ/j(j + 1). What is printed has lost the 4 of lemma 2, has ‖WᵀW‖_F for ‖W‖_F although W is perturbed, B
    for 2(B + 1), a σ that knows the weights, and does not define h. Both are far above 1 for the M of any data set:
    they order models, they predict nothing.
    """
    if math.isnan(c.size):
        raise ValueError("Proposition 2 needs the size of the weights: measure a DenseCell together with its head.")

    def proved(change: Callable[[Constants, float], float]) -> float:
        low, high = 0.0, 1.0
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if change(c, middle) < margin / 4 else (low, middle)
        if low == 0:
            return math.inf
        deviation = low / (2 * math.sqrt(c.width) + math.sqrt(2 * math.log(10)))
        j = max(1, math.ceil(-math.log2(deviation)))
        return lemma2(c.size / 2 * 4.0**j, samples, delta / (j * (j + 1)))

    geq, opteq = _printed_gaps(16 * c.width * math.log(24 * c.width), c, margin, samples, delta)
    return Comparison(Bound(geq, proved(_geq_change)), Bound(opteq, proved(_opteq_change)))


def _printed_gaps(scale: float, c: Constants, margin: float, samples: int, delta: float) -> list[float]:
    """GEQ's and OptEq's, with `scale` for 16 h ln(24h)."""
    extra = math.log(samples * math.sqrt(samples) / delta)
    sizes = (scale * bracket**2 * c.published_size / margin**2 for bracket in _brackets(c))
    return [math.sqrt((size + extra) / samples) for size in sizes]


def theorem2(c: Constants, margin: float, samples: int, delta: float) -> Comparison:
    """KerDEQ Theorem 2: its form of Proposition 2, up to a constant, which is 1 here: 16 h ln(24h) is h ln h."""
    ours = proposition2(c, margin, samples, delta)
    geq, opteq = _printed_gaps(c.width * math.log(c.width), c, margin, samples, delta)
    return Comparison(Bound(geq, ours.geq.corrected), Bound(opteq, ours.opteq.corrected))


def remark1(c: Constants) -> Bound:
    """GEQ and KerDEQ Remark 1: GEQ's core of Proposition 2 over OptEq's, for small perturbations, is at most 1.

    As printed for β_max < 0.8 and μ, m > 0.9; corrected for every W, U, b of norm below 1, whatever β.
    """
    geq, opteq = _brackets(c)
    small = 1e-9
    return Bound(geq / opteq, _geq_change(c, small) / _opteq_change(c, small))


# Stability


def proposition3(c: Constants) -> Comparison:
    """GEQ Proposition 3, (11), (12): Lipschitz constants of x ↦ z*.

    GEQ's as printed, q/(1 − q) with q = β_max μ² + √γ B μ³ (and b = 0), holds where q < 1 and is negative beyond.
    Corrected, it needs neither β nor γ nor B: `input_lipschitz` times ‖U‖. OptEq's is right, and best: ‖U‖/(1 − ‖W‖²).
    """
    mu = max(c.W, c.U)
    q = c.beta * mu**2 + math.sqrt(c.gamma) * c.B * mu**3
    return Comparison(
        Bound(_over(q, 1 - q), c.U * input_lipschitz(c.W, c.lowest)),
        Bound(_over(mu, 1 - mu**2), c.U / (1 - c.m) if c.m < 1 else math.inf),
    )


def remark2(c: Constants) -> Bound:
    """GEQ Remark 2: L_geq/L_opteq is at most 1.

    As printed for β_max < 0.8, B < 1 and √γ < 0.2; corrected for every ‖W‖ < 1, and no condition else.
    """
    both = proposition3(c)
    return Bound(both.geq.published / both.opteq.published, both.geq.corrected / both.opteq.corrected)


# Similarity of outputs


def lemma3(x1: Tensor, x2: Tensor, variance: float, rows: int) -> Bound:
    """GEQ Lemma 3, (50): E⟨σ(Ux₁), σ(Ux₂)⟩ = rows · τ‖x₁‖‖x₂‖(sin θ + (π − θ) cos θ)/2π, U of rows N(0, τI).

    As printed it is the mean over the rows: κ of (13) is their sum.
    """
    one = variance * float(x1.norm() * x2.norm()) * _arc_cosine(x1, x2)
    return Bound(one, rows * one)


def _arc_cosine(x1: Tensor, x2: Tensor) -> float:
    """(sin θ + (π − θ) cos θ)/2π, between ½ (θ = 0) and 0 (θ = π)."""
    cosine = min(1.0, max(-1.0, float((x1 / x1.norm()) @ (x2 / x2.norm()))))
    theta = math.acos(cosine)
    return (math.sin(theta) + (math.pi - theta) * cosine) / (2 * math.pi)


def proposition4(c: Constants, x1: Tensor, x2: Tensor, variance: float, rows: int, smallest: float) -> Comparison:
    """GEQ Proposition 4, (14), (15): bounds on κ(x₁, x₂) = E⟨z(x₁), z(x₂)⟩ over U of `rows` rows N(0, τI).

    b = 0, W is fixed and `smallest` is σ_min(U). As printed with −γ/4 and D = e^{γB‖W‖²}: wrong for either model
    (docs/errata.md), and σ_min(U) and β_max, functions of U, stand outside of the mean over U. Corrected, with w = ‖W‖,
    n rows, δ = ‖x₁ − x₂‖ and g = γτδ²/2, for one patch: κ_geq ≤ w² e^{w⁴/2e} (1 + g)^{−n/2} nτ√(q₁q₂),
    qᵢ = ‖xᵢ‖² − γτ⟨xᵢ, x₁ − x₂⟩²/2(1 + g), whatever w; κ_opteq ≤ nτ‖x₁‖‖x₂‖[(sin θ + (π − θ) cos θ)/2π +
    ½((1 − w²)⁻² − 1)].
    """
    if c.patches != 1:
        raise ValueError(f"Proposition 4 is about one Gaussian for all features, got {c.patches} patches.")
    geq = _published_similarity(c, x1, x2, variance, math.exp(c.gamma * c.B * c.m), c.gamma / 4 * smallest**2)
    apart = x1 - x2
    g = c.gamma * variance * float(apart @ apart) / 2
    q1, q2 = (float(x @ x) - c.gamma * variance * float(x @ apart) ** 2 / (2 * (1 + g)) for x in (x1, x2))
    decay = c.m * math.exp(c.m**2 / (2 * math.e)) * (1 + g) ** (-rows / 2)
    plain = lemma3(x1, x2, variance, rows)
    spread = rows * variance * float(x1.norm() * x2.norm()) * ((1 - c.m) ** -2 - 1) / 2 if c.m < 1 else math.inf
    return Comparison(
        Bound(geq, decay * rows * variance * math.sqrt(q1 * q2)),
        Bound(_over(plain.published, (1 - c.m) ** 2), plain.corrected + spread),
    )


def theorem3(c: Constants, x1: Tensor, x2: Tensor, variance: float, rows: int, largest: float) -> Comparison:
    """KerDEQ Theorem 3, (10), (11): Proposition 4 with −γ‖U‖₂ in the exponent and D = e^{γB‖W‖}, B of the inputs.

    `largest` is ‖U‖₂.
    """
    ours = proposition4(c, x1, x2, variance, rows, 0.0)
    printed = _published_similarity(c, x1, x2, variance, math.exp(c.gamma * c.inputs * c.W), c.gamma * largest)
    return dataclasses.replace(ours, geq=Bound(printed, ours.geq.corrected))


def _published_similarity(c: Constants, x1: Tensor, x2: Tensor, variance: float, D: float, rate: float) -> float:
    decay = D * math.exp(-rate * float((x1 - x2).square().sum()))
    return _over(c.m * decay * lemma3(x1, x2, variance, 1).published, (1 - c.beta * c.m) ** 2)


def remark3(c: Constants, smallest: float) -> Bound:
    """GEQ Remark 3, (58): from which ‖x₁ − x₂‖ on D e^{−γσ_min²‖x₁ − x₂‖²/4} ≤ 1, as printed and from a D that holds.

    With the corrected Proposition 4 no distance is needed: κ̄_geq ≤ κ̄_opteq for all x₁, x₂ and the same w < 1, n, τ.
    """
    wrong, right = c.gamma * c.B * c.m, c.gamma * c.B**2 * c.m  # log D
    return Bound(2 * math.sqrt(wrong) / smallest, 2 * math.sqrt(right / c.gamma) / smallest)


@torch.no_grad()
def estimate_similarity(
    W: Tensor, gamma: float | None, x1: Tensor, x2: Tensor, variance: float, draws: int, seed: int = 0
) -> tuple[float, float]:
    """GEQ (13), KerDEQ (9): κ(x₁, x₂) by Monte Carlo over U, and its standard error.

    It is that of GEQ, or of OptEq where γ is None; W is (features, state), x₁ and x₂ are vectors.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = W.shape[1] if gamma is None else W.shape[0]
    U = math.sqrt(variance) * torch.randn(draws, rows, len(x1), generator=generator, dtype=W.dtype)
    a = torch.cat([U @ x1, U @ x2])
    f = opteq_map(W.mT @ W, a) if gamma is None else geq_map(W, a, gamma)
    start = torch.zeros(2 * draws, W.shape[1], dtype=W.dtype)
    z = solve(f, start, Picard(), tol=1e-9, max_steps=5000, on_failure="raise").value
    products = (z[:draws] * z[draws:]).sum(1)
    return float(products.mean()), float(products.std()) / math.sqrt(draws)


def multiply(W: Tensor, z: Tensor) -> Tensor:
    """Wz for each row of z (batch, columns); W is (rows, columns), or one for each row, (batch, rows, columns)."""
    return z @ W.mT if W.dim() == 2 else (W @ z[:, :, None])[:, :, 0]


def geq_map(
    W: Tensor, a: Tensor, gamma: float, kernel: type[AbstractRadialKernel] = Gaussian
) -> Callable[[Tensor], Tensor]:
    """z ↦ σ((1 − α)z + αωWᵀr), r = a − Wz, α = 2/(2 + ‖W‖²), for each row of z and a.

    Its fixed points are those of z = σ(ωWᵀr), and it contracts wherever E is strongly convex.
    """
    step = 2 / (2 + torch.linalg.matrix_norm(W.detach(), 2).square())[..., None]

    def proximal(z: Tensor) -> Tensor:
        r = a - multiply(W, z)
        drive = multiply(W.mT, kernel.weight(gamma * r.square().sum(1, keepdim=True)) * r)
        return torch.relu((1 - step) * z + step * drive)

    return proximal


def opteq_map(M: Tensor, a: Tensor) -> Callable[[Tensor], Tensor]:
    """z ↦ σ(Mz + a) for each row of z and a: OptEq's equation with M = WᵀW."""
    return lambda z: torch.relu(multiply(M, z) + a)
