"""Every claim of GEQ and KerDEQ, how it is checked, and the table of all claims that `kerneq verify` goes through."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...kernels import AbstractRadialKernel, Cauchy, Gaussian, Multiquadric
from ...kernels.radial import input_lipschitz
from . import propositions as p
from .constants import Constants
from .facts import FACTS, GLM_CLAIMS
from .layers import LAYERS
from .propositions import multiply
from .search import (
    RESTARTS,
    WorstCase,
    ascend,
    draw_normal,
    find_fixed_point,
    find_largest,
    scale_to_norm,
    solve_geq,
    solve_opteq,
)


def check_proposition1() -> WorstCase:
    """GEQ Prop. 1: features: λ⟨Φ(a), Φ(v)⟩ is the kernel. Erratum: λ lacks 1/2γ and a square."""
    a, v = draw_normal((3,), (3,))

    def ratio(a: Tensor, v: Tensor) -> Tensor:
        e = p.proposition1(a, v, gamma=0.7, order=6)
        exact = torch.exp(-0.7 * (a - v).square().sum(1, keepdim=True)) * (a - v)
        value = (e.kernel - e.corrected).abs() / (e.error + 1e-15)
        return torch.maximum(value, (e.slope - exact).norm(dim=1) / (e.slope_error + 1e-15))

    e = p.proposition1(a, v, 0.7, 6)
    explicit = (p.feature_map(a, 0.7, 6) * p.feature_map(v, 0.7, 6)).sum(1)
    same = float((explicit - e.corrected).abs().max()) / 1e-12
    printed = float(((e.kernel - e.published).abs() / e.error).max())
    return WorstCase(printed, "error of order 6 over its bound", find_largest(same, ascend(ratio, a, v, steps=80)))


@torch.no_grad()
def check_proposition1_outputs() -> WorstCase:
    """GEQ Prop. 1: GEQ's output is that OptEq's. Erratum: λ depends on z.

    As printed, λ is a factor and not differentiated; corrected, the equilibrium of order k converges to GEQ's.
    """
    one = torch.ones(1, 1)
    geq = solve_geq(one[None], one, 0.5)
    constant = find_fixed_point(lambda z: torch.relu(torch.exp(-0.5 * (1 - z) ** 2)), 0.5 * one)
    (W, a), gamma = draw_normal((3, 3), (3,)), 0.5
    W = scale_to_norm(W, 0.9)
    exact, worst = solve_geq(W, a, gamma), 0.0

    def expand(z: Tensor, order: int) -> p.Expansion:
        return p.proposition1(a, multiply(W, z), gamma, order)

    def truncated(order: int, z: Tensor) -> Tensor:
        return torch.relu(multiply(W.mT, expand(z, order).slope))

    for order in (1, 3, 6, 10):
        z = find_fixed_point(partial(truncated, order), torch.zeros(RESTARTS, 3))
        allowed = 0.9 / (1 + Gaussian.lowest * 0.81) * expand(z, order).slope_error
        worst = find_largest(worst, (z - exact).norm(dim=1) / (allowed + 1e-12))
    apart = float((geq - constant).abs())
    return WorstCase(apart / 1e-6, f"γ = ½, U = W = x = 1: z* = {float(geq):.3f} and {float(constant):.3f}", worst)


def check_theorem1() -> WorstCase:
    """KerDEQ Thm. 1, GEQ A.3: features: √((2γ)ⁱ/i) in Φ. Erratum: i for i!: the series is a logarithm."""
    a = torch.tensor([[1.1, 0.0], [0.3, 0.2]])
    e = p.theorem1(a, a, 0.5, 40)
    fixed = float(((e.kernel - e.corrected).abs() / (e.error + 1e-15)).max())
    return WorstCase(float(((e.kernel - e.published).abs() / 1e-9).max()), "t = 1.21: Σtⁱ/i diverges", fixed)


def check_lemma1() -> WorstCase:
    """GEQ Lemma 1: perturbed fixed points."""
    m = 0.9

    def ratio(M1: Tensor, M2: Tensor, a1: Tensor, a2: Tensor) -> Tensor:
        M1, M2 = scale_to_norm(M1, m), scale_to_norm(M2, m)
        apart = (solve_opteq(M1, a1) - solve_opteq(M2, a2)).norm(dim=1)
        weight, drive = torch.linalg.matrix_norm(M1 - M2, 2) * a1.norm(dim=1), (a1 - a2).norm(dim=1)
        return apart / (weight / (1 - m) ** 2 + drive / (1 - m))

    M, a = draw_normal((3, 3), (3,))
    starts = M, M + 0.1 * torch.randn_like(M), a, a + 0.1 * torch.randn_like(a)
    return WorstCase(ascend(ratio, *starts, steps=30), "ascent on both systems at m = 0.9, sharper form")


def check_lemma2() -> WorstCase:
    """GEQ Lemma 2: PAC-Bayesian gap.

    Linear classifiers of noisy labels in the plane, trained on M samples: how much of the gap do they use?
    """
    M, trials, margin, delta = 4000, 40, 0.2, 0.05
    x = torch.nn.functional.normalize(torch.randn(trials, 2 * M, 2), dim=2)
    y = torch.where(torch.rand(trials, 2 * M) < 0.2, -1.0, 1.0) * x[..., 0].sign()
    w = torch.nn.functional.normalize((x[:, :M] * y[:, :M, None]).mean(1), dim=1)
    score = y * (x @ w[:, :, None])[..., 0]  # logits ±score/2
    deviation = margin / 4 / (math.sqrt(2) + math.sqrt(2 * math.log(2)))
    gap = p.lemma2(1 / (2 * deviation**2), M, delta)
    used = (score[:, M:] <= 0).double().mean(1) - (score[:, :M] <= margin).double().mean(1)
    where = f"{trials} training sets of {M}, none uses any of the gap of {gap:.1f}"
    return WorstCase(max(0.0, float(used.max()) / gap), where)


def check_lemma3() -> WorstCase:
    """GEQ Lemma 3: similarity of one layer. Erratum: the number of rows is lost."""
    x1, x2, rows = torch.tensor([1.0, 0.5]), torch.tensor([-0.2, 1.0]), 3
    bound = p.lemma3(x1, x2, 0.5, rows)
    kappa, error = p.estimate_similarity(torch.zeros(rows, rows), None, x1, x2, 0.5, draws=100_000)
    off = [abs(kappa - value) / (4 * error) for value in (bound.published, bound.corrected)]
    return WorstCase(off[0], f"3 rows: κ = {kappa:.3f}, printed {bound.published:.3f}; over 4 standard errors", off[1])


def maximise_logit_change(
    c: Constants, omega: float, model: str, bound: float | Callable[[Tensor], Tensor], steps: int
) -> float:
    """Return the largest change of the logits over `bound` (of β), by ascent, for weights of norms c moved by ω."""
    sizes = ((3, 3), (3, 2), (3, 1), (2, 3), (2, 1), (2, 1))  # W, U, b, W_c, b_c, x
    norms = (c.W, c.U, c.b, c.head, 0.0, c.inputs)

    def logits(W: Tensor, U: Tensor, b: Tensor, head: Tensor, bias: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        a = (U @ x + b)[:, :, 0]
        z = solve_geq(W, a, c.gamma) if model == "geq" else solve_opteq(W.mT @ W, a)
        return multiply(head, z) + bias[:, :, 0], torch.exp(-c.gamma * (a - multiply(W, z)).square().sum(1))

    def ratio(*points: Tensor) -> Tensor:
        before = [scale_to_norm(t, norm) for t, norm in zip(points[:6], norms, strict=True)]
        noise = [scale_to_norm(t, omega) for t in points[6:]]
        after = [*(t + d for t, d in zip(before[:5], noise, strict=True)), before[5]]
        (one, beta), (two, other) = logits(*before), logits(*after)
        return (one - two).norm(dim=1) / (bound(torch.maximum(beta, other)) if callable(bound) else bound)

    return ascend(ratio, *draw_normal(*sizes, *sizes[:5]), steps=steps)


def check_proposition2() -> WorstCase:
    """GEQ Prop. 2: generalisation, GEQ: the change of the logits. Erratum: B + 1 becomes B."""
    cases = (
        Constants(W=0.9, U=0.9, b=0.5, head=0.9, inputs=1.0, gamma=1.0, reach=1 / math.sqrt(2 * math.e)),
        Constants(W=1.2, U=0.5, b=0.1, head=1.0, inputs=2.0, gamma=0.5, reach=1 / math.sqrt(math.e)),
    )
    worst = find_largest(
        *(maximise_logit_change(c, 0.05, "geq", p.perturbation(c, 0.05).geq.corrected, steps=15) for c in cases)
    )
    none = Constants(W=0.9, U=0.9, b=0.9, head=0.9, inputs=1e-9, gamma=0.1)
    printed = maximise_logit_change(none, 1e-3, "geq", p.perturbation(none, 1e-3).geq.published, steps=8)
    return WorstCase(printed, "x = 0: b alone moves the logits", worst)


def check_proposition2_proof() -> WorstCase:
    """GEQ (35): generalisation, GEQ: the same in the proof."""
    mu, omega, B = 0.99, 0.01, 0.1

    def bound(beta: Tensor) -> Tensor:
        rest = 1 - beta * mu**2
        return omega * (2 * beta * mu**3 * (B + 1) / rest**2 + (2 * mu * beta + 1) * mu * (B + 1) / rest + 1)

    c = Constants(W=mu, U=mu, b=mu, head=mu, inputs=B, gamma=2.0)
    worst = maximise_logit_change(c, omega, "geq", bound, steps=20)
    return WorstCase(worst, "not broken by ascent, though its proof holds β constant")


def check_theorem2() -> WorstCase:
    """KerDEQ Thm. 2: generalisation, OptEq: the same, up to a constant. Erratum: B + 1 becomes B."""
    c = Constants(W=0.9, U=0.9, b=0.5, head=0.9, inputs=1.0, gamma=0.0)
    fixed = maximise_logit_change(c, 0.05, "opteq", p.perturbation(c, 0.05).opteq.corrected, steps=20)
    none = Constants(W=0.99, U=0.9, b=0.9, head=0.9, inputs=1e-9, gamma=0.0)
    printed = maximise_logit_change(none, 1e-4, "opteq", p.perturbation(none, 1e-4).opteq.published, steps=10)
    return WorstCase(printed, "x = 0, m → 1: b moves the logits by ω/(1 − m), printed O(ω)", fixed)


def make_grid(low: float, high: float, count: int) -> list[float]:
    return [float(t) for t in torch.linspace(low, high, count)]


def check_remark1() -> WorstCase:
    """GEQ Remark 1: GEQ's bracket ≤ OptEq's."""
    printed = max(
        p.remark1(Constants(W=math.sqrt(m), U=mu, b=mu, head=mu, inputs=B, beta=beta)).published
        for mu in make_grid(0.95, 0.9999, 8)
        for m in make_grid(0.9001, mu**2, 6)
        for beta in make_grid(0.01, 0.7999, 8)
        for B in (0.01, 1.0, 100.0)
    )
    return WorstCase(printed, "grid of β < 0.8 and μ, m > 0.9", maximise_remarks())


def maximise_remarks() -> float:
    """Return the largest ratio of the corrected remarks 1 and 2, over all norms below 1 and any β."""
    norms = itertools.product(make_grid(0.001, 0.9999, 25), make_grid(0.01, 0.9999, 5), (0.01, 1.0, 100.0))
    cases = [Constants(W=w, U=u, b=u, head=0.9, inputs=B) for w, u, B in norms]
    return max(max(p.remark1(c).corrected, p.remark2(c).corrected) for c in cases)


def check_kerdeq_remark1() -> WorstCase:
    """KerDEQ Remark 1: GEQ's bracket ≤ OptEq's at ‖WᵀW‖ = μ = 0.9, β < 0.83. Erratum: ‖WᵀW‖ = 0.9 excludes μ = 0.9."""
    beta, m, mu = 0.83, 0.9, math.sqrt(0.9)  # ‖WᵀW‖ = 0.9 makes μ ≥ √0.9, not 0.9
    printed = (2 * mu * beta + 1) / (1 - beta * m) * (1 - m)
    return WorstCase(printed, "μ ≥ √m = 0.949: the limit is β = 0.826", maximise_remarks())


def measure_stretch(solve: Callable[[Tensor, Tensor], Tensor], W: Tensor, a: Tensor, move: Tensor) -> Tensor:
    """Return ‖z(a) − z(a + move)‖ / ‖move‖ for each row of a."""
    one, two = solve(torch.cat([W, W]), torch.cat([a, a + move])).chunk(2)
    return (one - two).norm(dim=1) / move.norm(dim=1)


def check_proposition3() -> WorstCase:
    """GEQ Prop. 3: Lipschitz constant of GEQ. Erratum: negative from q = 1 on."""

    def ratio(kernel: type[AbstractRadialKernel], w: float, W: Tensor, a: Tensor, move: Tensor) -> Tensor:
        solve = partial(solve_geq, gamma=1.0, kernel=kernel)
        return measure_stretch(solve, scale_to_norm(W, w), a, 0.1 * move) / input_lipschitz(w, kernel.lowest)

    cases = ((Gaussian, 0.6), (Gaussian, 1.2), (Cauchy, 1.4), (Multiquadric, 3.0))
    sizes = ((3, 3), (3,), (3,))
    worst = find_largest(*(ascend(partial(ratio, *case), *draw_normal(*sizes), steps=20, rate=0.1) for case in cases))
    negative = p.proposition3(Constants(W=0.9, U=0.9, inputs=2.0, gamma=1.0, beta=0.9)).geq.published
    return WorstCase(negative, "μ = 0.9, γ = 1, B = 2: the printed constant is negative", worst)


def check_proposition3_where_it_applies() -> WorstCase:
    """GEQ Prop. 3: Lipschitz constant of GEQ, where q < 1 and b = 0.

    q < 1, b = 0: then (11) holds, with β_max and B of the two inputs themselves.
    """
    mu, gamma = 0.7, 0.04

    def ratio(W: Tensor, U: Tensor, x: Tensor, move: Tensor) -> Tensor:
        W, U = (scale_to_norm(t, mu) for t in (W, U))
        both = torch.cat([x, x + 0.1 * move])
        WW, a = torch.cat([W, W]), multiply(torch.cat([U, U]), both)
        z = solve_geq(WW, a, gamma)
        beta = torch.exp(-gamma * (a - multiply(WW, z)).square().sum(1)).view(2, -1).amax(0)
        B = torch.maximum(both.norm(dim=1), z.norm(dim=1)).view(2, -1).amax(0)
        q = beta * mu**2 + math.sqrt(gamma) * B * mu**3
        apart = torch.sub(*z.chunk(2)).norm(dim=1) / (0.1 * move.norm(dim=1))
        return torch.where(q < 1, apart * (1 - q) / q, torch.nan)

    starts = draw_normal((3, 3), (3, 2), (2,), (2,))
    return WorstCase(ascend(ratio, *starts, steps=30), "ascent on W, U, x₁, x₂ at μ = 0.7, √γ = 0.2")


def check_proposition3_opteq() -> WorstCase:
    """GEQ Prop. 3: Lipschitz constant of OptEq."""
    w = 0.9

    def ratio(W: Tensor, a: Tensor, move: Tensor) -> Tensor:
        W = scale_to_norm(W, w)
        return measure_stretch(solve_opteq, W.mT @ W, a, 0.1 * move) * (1 - w**2)

    starts = torch.randn(RESTARTS, 3, 3), torch.rand(RESTARTS, 3), torch.randn(RESTARTS, 3)
    return WorstCase(ascend(ratio, *starts), "ascent on W, a₁, a₂ at μ = 0.9")


def check_remark2() -> WorstCase:
    """GEQ Remark 2: L_geq ≤ L_opteq."""
    printed = max(
        p.remark2(Constants(W=mu, U=mu, inputs=0.999, gamma=0.0399, beta=beta)).published
        for mu in make_grid(0.01, 0.9999, 60)
        for beta in make_grid(0.01, 0.7999, 8)
    )
    return WorstCase(printed, "grid of β < 0.8, B < 1, √γ < 0.2")


def check_practice() -> WorstCase:
    """GEQ 3.3, 3.4: the conditions of the remarks hold in practice. Erratum: γ = 0.2/M makes β_max 0.819, not < 0.8."""
    beta = math.exp(-0.2)
    c = Constants(W=0.98, U=0.98, inputs=1.0, gamma=0.04, beta=beta)
    where = f"β_max = e^(−0.2) = {beta:.3f}, μ = 0.98: L_geq/L_opteq printed"
    return WorstCase(p.remark2(c).published, where, maximise_remarks())


def unit_vectors(angle: float) -> tuple[Tensor, Tensor]:
    return torch.tensor([1.0, 0.0]), torch.tensor([math.cos(angle), math.sin(angle)])


def compare_similarity(gamma: float | None) -> float:
    """Return the largest κ, less four standard errors, over the corrected bound of Proposition 4."""
    worst = 0.0
    for seed, (angle, w, length) in enumerate(
        ((0.0, 0.9, 1.0), (1.0, 0.5, 2.0), (2.0, 0.8, 1.0), (math.pi, 0.95, 3.0))
    ):
        W = scale_to_norm(torch.randn(1, 3, 3), w)[0]
        x1, x2 = unit_vectors(angle)
        x2 = length * x2
        kappa, error = p.estimate_similarity(W, gamma, x1, x2, 0.5, draws=4000, seed=seed)
        both = p.proposition4(Constants(W=w, gamma=gamma or 0.0), x1, x2, 0.5, 3, 0.0)
        worst = find_largest(worst, (kappa - 4 * error) / (both.opteq if gamma is None else both.geq).corrected)
    return worst


def check_proposition4_opteq() -> WorstCase:
    """GEQ Prop. 4: similarity of OptEq's outputs. Erratum: ⟨Mz₁, z₂⟩ ≤ ‖M‖⟨z₁, z₂⟩ is no inequality."""
    x1, x2 = unit_vectors(0.98 * math.pi)
    W = torch.linalg.cholesky(torch.tensor([[0.5, 0.4], [0.4, 0.5]])).mT
    kappa, _ = p.estimate_similarity(W, None, x1, x2, 1.0, draws=10_000)
    printed = p.proposition4(Constants(W=math.sqrt(0.9), gamma=0.0), x1, x2, 1.0, 2, 0.0).opteq.published

    def ratio(W: Tensor, a1: Tensor, a2: Tensor) -> Tensor:  # before the mean over U
        W = scale_to_norm(W, math.sqrt(0.8))
        z1, z2 = solve_opteq(W.mT @ W, a1), solve_opteq(W.mT @ W, a2)
        s1, s2 = a1.relu(), a2.relu()
        return (z1 * z2).sum(1) / ((s1 * s2).sum(1) + s1.norm(dim=1) * s2.norm(dim=1) * ((1 - 0.8) ** -2 - 1))

    fixed = find_largest(compare_similarity(None), ascend(ratio, *draw_normal((3, 3), (3,), (3,))))
    return WorstCase(kappa / printed, f"nearly opposite inputs: κ = {kappa:.2f}, printed {printed:.3f}", fixed)


def check_proposition4() -> WorstCase:
    """GEQ Prop. 4: similarity of GEQ's outputs. Erratum: ⟨Mz₁, z₂⟩ again, and +WᵀWz."""
    x1, x2 = unit_vectors(0.999 * math.pi)
    W = torch.linalg.cholesky(torch.tensor([[0.5, -0.4], [-0.4, 0.5]])).mT
    kappa, error = p.estimate_similarity(W, 0.1, x1, x2, 1.0, draws=20_000)
    c = Constants(W=math.sqrt(0.9), gamma=0.1)  # β_max = 1, B = 1, σ_min = 0: the most the statement can allow
    printed = p.proposition4(c, x1, x2, 1.0, 2, 0.0).geq.published

    def ratio(W: Tensor, a1: Tensor, a2: Tensor) -> Tensor:  # before the mean over U
        W = scale_to_norm(W, 0.95)
        z1, z2 = solve_geq(torch.cat([W, W]), torch.cat([a1, a2]), 0.5).chunk(2)
        decay = torch.exp(-0.125 * (a1 - a2).square().sum(1))
        return (z1 * z2).sum(1) / (0.95**2 * math.exp(0.95**4 / (2 * math.e)) * decay * a1.norm(dim=1) * a2.norm(dim=1))

    starts = draw_normal((3, 3), (3,), (3,))
    fixed = find_largest(compare_similarity(0.5), compare_similarity(2.0), ascend(ratio, *starts, steps=30))
    where = f"nearly opposite inputs: κ = {kappa:.1e}, printed {printed:.1e}"
    return WorstCase((kappa - 4 * error) / printed, where, fixed)


def check_decay_rates() -> WorstCase:
    """KerDEQ Thm. 3, GEQ A.6: similarity of outputs, with exponent −γ. Erratum: ‖p‖² + ‖q‖² ≥ ½‖p − q‖²: the ½ is lost.

    −γ in `003`, in the restatement and in KerDEQ: at W → 0 the product β₁β₂ decays only as −γ/2 ‖U(x₁ − x₂)‖².
    """
    rows, gamma = 400, 3.0
    x1, x2 = unit_vectors(2 * math.pi / 3)
    kappa, error = p.estimate_similarity(0.1 * torch.eye(rows), gamma, x1, x2, 1 / rows, draws=200)
    # σ_min(U)² ≈ (1 − √(2/n))² = 0.86 < 1 < ‖U‖₂, and KerDEQ's larger D: the most that any of the three allows
    bound = p.theorem3(Constants(W=0.1, gamma=gamma), x1, x2, 1 / rows, rows, 0.86).geq
    printed, least = rows * bound.published, kappa - 4 * error  # as a sum over the rows
    where = f"W = 0.1 I, n = 400, θ = 120°, γ = 3: κ = {kappa:.1e}, printed {printed:.1e}"
    return WorstCase(least / printed, where, least / bound.corrected)


@torch.no_grad()
def check_constant_D() -> WorstCase:
    """GEQ (58): β₁β₂ ≤ D e^{−γσ²δ²/4}. Erratum: D needs B², not B.

    One dimension, U = 1: β₁β₂ against D e^{−γ(a₁ − a₂)²/4}. As D need not exceed 1.2, no case is much worse.
    """
    gamma, w, a = 5e-7, 0.99, torch.tensor([[1000.0], [-1000.0 / 3]])
    W = torch.full((2, 1, 1), w)
    z = solve_geq(W, a, gamma)
    betas = float(torch.exp(-gamma * (a - multiply(W, z)).square()).prod())
    decay, B = math.exp(-gamma / 4 * float((a[0] - a[1]) ** 2)), 1000.0
    printed, fixed = math.exp(gamma * B * w**2), math.exp(min(gamma * B**2 * w**2, w**4 / (2 * math.e)))
    return WorstCase(betas / (printed * decay), "a = 1000 and −1000/3, W = 0.99, γ = 5·10⁻⁷", betas / (fixed * decay))


def check_remark3() -> WorstCase:
    """GEQ Remark 3: κ̄_geq ≤ κ̄_opteq from a distance on. Erratum: γ is lost under the root."""
    c = Constants(W=0.9, inputs=100.0, gamma=0.04, beta=math.exp(-0.2))
    away = p.remark3(c, 1.0)
    x1, x2 = (away.published / math.sqrt(2) * x for x in unit_vectors(math.pi / 2))  # so far apart
    bars = p.proposition4(c, x1, x2, 0.5, 4, 1.0)
    factor = math.exp(c.gamma * c.B**2 * c.m - c.gamma / 4 * away.corrected**2)
    grid = itertools.product(make_grid(0.0, math.pi, 7), make_grid(0.01, 0.99, 15))
    both = [p.proposition4(dataclasses.replace(c, W=w), *unit_vectors(angle), 0.5, 4, 0.0) for angle, w in grid]
    fixed = find_largest(factor, *(each.geq.corrected / each.opteq.corrected for each in both))
    where = "B = 100, ‖W‖ = 0.9, σ_min = 1, γ = 0.04, β_max = 0.819: κ̄_geq/κ̄_opteq at the printed distance"
    return WorstCase(bars.geq.published / bars.opteq.published, where, fixed)


INFINITE_WIDTH = (check_proposition1, check_theorem1, check_proposition1_outputs)
LEMMAS = (check_lemma1, check_lemma2, check_lemma3)
GENERALISATION = (check_proposition2, check_proposition2_proof, check_theorem2, check_remark1, check_kerdeq_remark1)
LIPSCHITZ = (check_proposition3, check_proposition3_where_it_applies, check_proposition3_opteq)
SIMILARITY = (check_proposition4_opteq, check_proposition4, check_decay_rates, check_constant_D, check_remark3)
GEQ = (*INFINITE_WIDTH, *LEMMAS, *GENERALISATION, *LIPSCHITZ, check_remark2, check_practice, *SIMILARITY)
CLAIMS = (*GEQ, *FACTS, *LAYERS, *GLM_CLAIMS)
