"""The claims of docs/theory.md, and those of "Declarative nets that are equilibrium models": how each is checked."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ... import kglm
from ...cells import DenseCell
from ...equation import Equation
from ...kernels import AbstractKernel, AbstractRadialKernel, Cauchy, Gaussian, Linear, Multiquadric, Polynomial, Sigmoid
from ...kernels.radial import PatchParameters, input_lipschitz
from ...maps import AbstractMap
from ...solution import Solution, Status
from ...solvers import InFeatures, Newton, Picard, Proximal, solve
from . import kglm_propositions as glm
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
)

RADIAL = (Gaussian, Multiquadric, Cauchy)


def make_cell(kernel: AbstractKernel, norm: float) -> DenseCell:
    """Return a cell with random weights, so long that the bound on their norm is reached."""
    cell = DenseCell(kernel, inputs=3, state=5, features=6, norm=norm)
    with torch.no_grad():
        cell.operator.weight.mul_(50)
    return cell.eval()


def bind_cell(kernel: AbstractKernel, norm: float, scale: float = 1.0) -> Equation:
    """Return the equation of such a cell at 64 random inputs of this scale."""
    return make_cell(kernel, norm).bind(scale * torch.randn(64, 3))


def solve_proximal(f: AbstractMap, start: Tensor | None = None, tol: float = 1e-13) -> Tensor:
    """Return the equilibrium by proximal steps, which converge for any weights."""
    return solve(f, start, Proximal(), tol=tol, max_steps=5000).value


def solve_newton(f: AbstractMap, start: Tensor | None = None) -> Solution:
    """Return the equilibrium by Newton, from near it: from afar it may cycle about a kink."""
    near = solve(f, start, Proximal(), tol=1e-4, max_steps=1000).value
    return solve(f, near, Newton(), tol=1e-11, on_failure="raise")


def maximise_slope(kernel: type[AbstractRadialKernel], of: Callable[[Tensor], Tensor]) -> float:
    """Return the largest of a function of the eigenvalues of ∂(ωr)/∂r = ωI + 2γω′rrᵀ, by ascent on r and γ."""

    def ratio(r: Tensor, log_gamma: Tensor) -> Tensor:
        gamma = log_gamma.exp()[:, None, None]
        s = log_gamma.exp() * r.square().sum(1)
        outer = 2 * gamma * kernel.slope(s)[:, None, None] * r[:, :, None] * r[:, None, :]
        return of(torch.linalg.eigvalsh(kernel.weight(s)[:, None, None] * torch.eye(3) + outer))

    return ascend(ratio, *draw_normal((3,), ()), steps=60, rate=0.2)


def check_contraction() -> WorstCase:
    """kerneq fact 1: the map is L-Lipschitz for every γ."""
    return WorstCase(maximise_slope(Gaussian, lambda e: e.abs().amax(1)), "ascent on r and γ; ‖W‖ = ‖W_h‖ = 1")


def check_convexity() -> WorstCase:
    """kerneq fact 2: E is strongly convex for L < ½e^{3/2}."""
    worst = maximise_slope(Gaussian, lambda e: -e.amin(1) / -Gaussian.lowest)
    return WorstCase(worst, "ascent: the least slope over −2e^(−3/2)")


@torch.no_grad()
def check_descent() -> WorstCase:
    """kerneq fact 3: proximal steps lower E for any weights."""
    worst, failed = 0.0, 0
    for kernel in RADIAL:
        for L in (5.0, 60.0):
            f = bind_cell(kernel(gamma=0.2, split=3), math.sqrt(L), 3)
            z = 3 * torch.rand(64, 5)
            failed += int((~solve(f, z, Picard(), tol=1e-6, max_steps=200).converged).sum())
            for _ in range(25):
                before, z = z, f.descend(z, f.drive(z))
                drop, least = f.energy(before) - f.energy(z), 0.5 * (z - before).square().sum(1)
                worst = find_largest(worst, (least / drop)[least > 1e-9])  # where it is no rounding
    return WorstCase(worst, f"½‖T(z) − z‖² over the fall of E; plain iteration fails on {failed} of 384")


@torch.no_grad()
def check_error_bound() -> WorstCase:
    """kerneq fact 4: distance to the equilibrium."""
    worst = 0.0
    for kernel, norm in ((Gaussian(gamma=0.3), 1.4), (Linear(), 0.95), (Multiquadric(), 5.0), (Sigmoid(), 0.9)):
        f = bind_cell(kernel, norm, 2)
        star = solve_proximal(f)
        for steps in (1, 3, 10):
            s = solve(f, None, Proximal(memory=0), tol=1e-13, max_steps=steps)
            assert s.error_bound is not None
            worst = find_largest(worst, (s.value - star).norm(dim=1) / (s.error_bound + 1e-10))
    return WorstCase(worst, "stopped solves of four kernels: distance over `error_bound`")


@torch.no_grad()
def check_lipschitz() -> WorstCase:
    """kerneq fact 5: Lipschitz constant in the input."""
    worst = 0.0
    for kernel, norm in 2 * ((Gaussian, 0.9), (Gaussian, 1.4), (Cauchy, 2.5), (Multiquadric, 20.0)):
        cell, x = make_cell(kernel(gamma=0.5, split=3), norm), torch.randn(64, 3)
        f, g = cell.bind(x), cell.bind(x + 0.1 * torch.randn(64, 3))
        moved = (solve_newton(f).value - solve_newton(g).value).norm(dim=1) / (f.binding.a - g.binding.a).norm(dim=1)
        assert isinstance(cell.similarity, PatchParameters)
        constant = float(cell.similarity.gain()) * input_lipschitz(norm, kernel.lowest)
        worst = find_largest(worst, moved / constant)
    return WorstCase(worst, "patched layers, norm 0.9 to 20 (attacked above: GEQ Prop. 3)")


@torch.no_grad()
def check_smaller_space() -> WorstCase:
    """kerneq fact 6: the equation in the features."""
    f = bind_cell(Gaussian(gamma=0.5, split=3), 1.0)
    v = solve(f, None, InFeatures(Picard()), tol=1e-13, max_steps=5000).value
    apart = float((solve_proximal(f) - v).abs().max())
    return WorstCase(apart / 1e-9, "z from v = Wσ(Wᵀm(a − v)), difference over 10⁻⁹")


@torch.no_grad()
def check_precision() -> WorstCase:
    """kerneq fact 7: a residual that stalls is recognised."""
    cell = make_cell(Gaussian(gamma=0.5), 0.9).to(torch.bfloat16)
    s = solve(cell.bind(torch.randn(64, 3).bfloat16()), None, Picard(), tol=1e-6, max_steps=200)
    stopped = s.status in (Status.PRECISION, Status.CONVERGED)
    steps = int(s.steps.max())
    return WorstCase(steps / 200 if stopped else math.inf, f"bfloat16, tol 10⁻⁶: {s.status.name}, {steps} of 200 steps")


@torch.no_grad()
def check_published_polynomial() -> WorstCase:
    """GEQ Table 4: the polynomial kernel hears its input. Erratum: z = 0 for every input."""
    x = torch.randn(64, 3)
    spread = []
    for offset in (0.0, 1.0):
        f = make_cell(Polynomial(2, offset), 0.9).bind(x)
        z = solve_proximal(f, torch.rand(64, 5), tol=1e-12)
        spread.append(float(z.std(0).max()))
    ratios = [1e-2 / one if one else math.inf for one in spread]
    return WorstCase(ratios[0], f"spread of z* over inputs: {spread[0]:.0e}; with c = 1: {spread[1]:.2f}", ratios[1])


@torch.no_grad()
def check_sigmoid() -> WorstCase:
    """kerneq fact 8: the sigmoid kernel has one equilibrium."""
    f = bind_cell(Sigmoid(), 1.0, 20)
    z, other = solve_proximal(f), solve_proximal(f, 9 * torch.rand(64, 5))
    unique = bool(((f.binding.a * z).sum(1) >= 0).all())
    apart = float((z - other).abs().max()) / 1e-7
    return WorstCase(apart if unique else math.inf, "two starts, difference over 10⁻⁷; ⟨a, z*⟩ ≥ 0")


def check_robust_losses() -> WorstCase:
    """kerneq fact 9: radial kernels are robust losses."""
    steepest = find_largest(*(maximise_slope(kernel, lambda e: e.abs().amax(1)) / kernel.steepest for kernel in RADIAL))
    lowest = find_largest(*(maximise_slope(kernel, lambda e: 1 - e.amin(1)) / (1 - kernel.lowest) for kernel in RADIAL))
    with torch.no_grad():
        f = bind_cell(Multiquadric(split=3), 30.0, 3)
    one, two = (solve_newton(f, 100 * s * torch.rand(64, 5)) for s in (0, 1))
    assert one.error_bound is not None and two.error_bound is not None
    apart = (one.value - two.value).norm(dim=1) / (one.error_bound + two.error_bound + 1e-10)  # both may be exact
    worst = find_largest(steepest, lowest, apart)
    return WorstCase(worst, "ascent on slopes; multiquadric of norm 30 from two starts")


@torch.no_grad()
def check_unit_of_length() -> WorstCase:
    """kerneq fact 10: γ is a unit of length."""
    worst = 0.0
    for kernel in RADIAL:
        for c in (0.1, 7.0):
            (a, W), gamma = draw_normal((3,), (3, 3)), 0.5
            W = scale_to_norm(W, 1.2)
            z, scaled = solve_geq(W, a, gamma, kernel), solve_geq(W, c * a, gamma / c**2, kernel)
            worst = find_largest(worst, (scaled - c * z).abs() / (1e-7 * c))
    return WorstCase(worst, "z(ca, γ/c²) − c z(a, γ) over 10⁻⁷")


@torch.no_grad()
def check_newton() -> WorstCase:
    """kerneq fact 11: Newton where no slope is bounded."""
    A = torch.randn(64, 6, 6)
    K, T = A @ A.mT, torch.poisson(torch.full((64, 6), 3.0))
    lam = torch.logspace(-4, 2, 64)[:, None]
    s = solve(lambda eta: multiply(K, T - eta.exp()) / lam, torch.zeros(64, 6), Newton(), tol=1e-8, max_steps=200)
    where = f"64 Poisson GLMs, λ = 10⁻⁴ … 10²: at most {int(s.steps.max())} steps"
    return WorstCase(float(s.residual.max()) / 1e-8, where)


def check_sizes() -> WorstCase:
    """kerneq fact 12: ‖z*‖ ≤ √β‖a‖/2 and ‖r*‖ ≤ ‖a‖."""

    def ratio(W: Tensor, a: Tensor) -> Tensor:
        W = scale_to_norm(W, 1.4)
        z = solve_geq(W, a, 0.5)
        r = a - multiply(W, z)
        beta, length = torch.exp(-0.5 * r.square().sum(1)), a.norm(dim=1)
        return torch.maximum(z.norm(dim=1) / (beta.sqrt() * length / 2), r.norm(dim=1) / length)

    worst = ascend(ratio, *draw_normal((3, 3), (3,)), steps=25)
    with torch.no_grad():
        for kernel in RADIAL:
            f = bind_cell(kernel(gamma=0.2, split=3), math.sqrt(20), 3)
            z = solve(f, None, Proximal(), tol=1e-10, max_steps=5000, on_failure="raise").value
            worst = find_largest(worst, 2 * z.norm(dim=1) / f.binding.a.norm(dim=1))
    return WorstCase(worst, "ascent at L = 1.96; patched layers at L = 20")


def _tanh_map(A: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Return H(z) = tanh(A(y − z)), per row of z."""
    return torch.tanh((y - z) @ A.mT)


def _glm_map(family: kglm.AbstractFamily, K: Tensor, t: Tensor, z: Tensor) -> Tensor:
    return family.mean(K @ (t - z) / 9.0)


def check_glm2() -> WorstCase:
    """kGLM Prop. 2: ‖DH‖ bounds difference quotients."""
    worst = 0.0
    for _ in range(10):
        A, y, z1, z2 = 3 * torch.randn(6, 6) / math.sqrt(6), torch.randn(6), torch.randn(6), torch.randn(6)
        quotient, slope = glm.proposition2(partial(_tanh_map, A, y), z1, z2, points=200)
        worst = find_largest(worst, quotient / slope)
    return WorstCase(worst, "‖H(z₁) − H(z₂)‖/‖z₁ − z₂‖ over the largest ‖DH‖ between")


def check_glm4() -> WorstCase:
    """kGLM Prop. 4: Assumption 2's number bounds ‖DH‖."""
    X = torch.linspace(0, 5, 12)[:, None]
    K, worst = kglm.SquaredExponential()(X, X), 0.0
    for family in (kglm.Gaussian(), kglm.Binomial(4), kglm.Ising(1.5), kglm.LeakyReLU(0.3)):
        number, t = glm.proposition4(K, 9.0, family), torch.randn(12)
        z = family.mean(torch.randn(100, 12))
        worst = find_largest(worst, glm.jacobian_norm(partial(_glm_map, family, K, t), z) / number)
    return WorstCase(worst, "four families: largest ‖DH‖ over Assumption 2's number")


def check_glm4_with_prior() -> WorstCase:
    """kGLM Prop. 4: Assumption 2's number, with a prior. Erratum: A″ and ρ′ are taken at one z; in DH they meet at two.

    ‖DH‖ = ‖K/λ‖ A″ at the image times 1 + ρ′ at z: printed as if they were taken at one point. The printed number is
    read with A″ at (A′)⁻¹(z); with A″ at z itself it is ∞ here.
    """
    q, z = 0.5, 0.01
    # K/λ = 1 and a target that brings the drive to 0; ρ′ = q/A″ ∘ (A′)⁻¹ = q/z(1 − z)
    steepest = float(kglm.Bernoulli().variance(torch.zeros(()))) * (1 + q / (z * (1 - z)))
    leaky, prior, K = kglm.LeakyReLU(0.3), kglm.Normal(0.3), torch.eye(4)
    t, points = torch.randn(4), leaky.mean(3 * torch.randn(400, 4))
    images = leaky.mean((t - points - prior.slope(glm.canonical(leaky, points))) / 9.0)
    quotients = (images[:200] - images[200:]).norm(dim=1) / (points[:200] - points[200:]).norm(dim=1)
    fixed = float(quotients.max()) / glm.proposition4(K, 9.0, leaky, prior)
    return WorstCase(steepest / (0.25 + q), "Bernoulli, ρ = η/2, K/λ = 1, z = 0.01: ‖DH‖ over the printed ¾", fixed)


def measure_distance(A: Tensor, B: Tensor, y: Tensor) -> Tensor:
    one, two = (find_fixed_point(partial(_tanh_map, M, y), torch.zeros_like(y)) for M in (A, B))
    return (one - two).norm(dim=1)


def check_glm12() -> WorstCase:
    """kGLM Prop. 12: distance of two fixed points."""

    def ratio(A: Tensor, B: Tensor, y: Tensor) -> Tensor:
        A, B = (0.8 * M / torch.linalg.matrix_norm(M, 2) for M in (A, B))
        return measure_distance(A, B, y) / glm.proposition12(A, B, y, torch.tanh)

    A = torch.randn(4, 4)
    worst = ascend(ratio, A, A + 0.1 * torch.randn(4, 4), torch.randn(RESTARTS, 4), steps=25)
    return WorstCase(worst, "ascent on A, B and y")


def check_glm13() -> WorstCase:
    """kGLM Prop. 13: distance to a semi-definite matrix's fixed point."""

    def ratio(A: Tensor, y: Tensor) -> Tensor:
        A = 0.8 * A / torch.linalg.matrix_norm(A, 2)
        B, bound = glm.proposition13(A, y, torch.tanh)
        return measure_distance(A, B, y) / bound

    return WorstCase(ascend(ratio, torch.randn(4, 4), torch.randn(RESTARTS, 4), steps=25), "ascent on A and y")


@torch.no_grad()
def check_glm14() -> WorstCase:
    """kGLM Prop. 14: distance of a random start."""
    n, trials = 20, 40
    start = glm.proposition14(n, C=0.3, t=1.5, spread=1.0)
    y, held = torch.randn(1, n).clamp(-1, 1), 0
    for _ in range(trials):
        A = start.deviation * torch.randn(n, n)
        B, _ = glm.proposition13(A, y, torch.tanh)
        held += bool(measure_distance(A, B, y).square().item() / n <= start.mean_squared)
    where = f"holds in {held} of {trials}, promised {start.probability:.2f}"
    return WorstCase(start.probability * trials / max(held, 1), where)


EQUATION = (check_contraction, check_convexity, check_descent, check_error_bound, check_lipschitz)
KERNELS = (check_published_polynomial, check_sigmoid, check_robust_losses, check_unit_of_length)
FACTS = (*EQUATION, check_smaller_space, check_precision, *KERNELS, check_newton, check_sizes)
GLM_CLAIMS = (check_glm2, check_glm4, check_glm4_with_prior, check_glm12, check_glm13, check_glm14)
