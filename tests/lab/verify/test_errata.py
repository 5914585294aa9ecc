"""The counter-examples of docs/errata.md: each number there is computed here or by a claim of `kerneq verify`."""

import math

import pytest
import torch

from kerneq import kglm, theory
from kerneq.kernels import Gaussian, Polynomial
from kerneq.lab.verify import Constants, claims
from kerneq.lab.verify.search import check_claims

pytestmark = pytest.mark.usefixtures("float64")

BETA = math.exp(-0.2)  # max e^{−γ‖r‖²} where γ = 0.2/M, M = min ‖r‖²


def lipschitz(beta: float, mu: float) -> theory.Comparison:
    return theory.proposition3(Constants(W=mu, U=mu, inputs=1.0, gamma=0.04, beta=beta))


def test_gamma_of_02_over_M_breaks_the_condition_of_both_remarks():
    assert BETA == pytest.approx(0.819, abs=5e-4) and BETA > 0.8
    # Remark 2: L_geq < L_opteq for β = 0.8, but not for the β that the paper's own γ makes.
    usual = lipschitz(0.8, 0.98)
    assert usual.geq.published < usual.opteq.published == pytest.approx(24.7, abs=0.05)
    assert lipschitz(BETA, 0.98).geq.published == pytest.approx(38.3, abs=0.05)
    assert lipschitz(BETA, 0.991).geq.published > 0 > lipschitz(BETA, 0.992).geq.published  # negative from there on
    # What holds: 0.81·‖U‖ at most for every ‖W‖ ≤ 1, whatever β, γ and B.
    assert lipschitz(BETA, 0.98).geq.corrected == pytest.approx(0.750, abs=1e-3)
    assert theory.input_lipschitz(1.0, Gaussian.lowest) == pytest.approx(0.806, abs=1e-3)
    # Remark 1, second inequality, at m = 0.9, μ → 1.
    assert (2 * BETA + 1) / (1 - BETA * 0.9) == pytest.approx(10.02, abs=0.005)
    assert 1 / (1 - 0.9) < 10.02


def test_the_bracket_of_proposition_2_is_smaller_than_the_proofs():
    beta, mu, m, B = 0.8, 0.9, 0.81, 1.0
    rest = 1 - beta * m
    c = Constants(W=mu, U=mu, b=mu, head=mu, inputs=B, beta=beta)
    stated = theory.perturbation(c, 1.0).geq.published * rest**2
    proved = 2 * beta * mu**4 * (B + 1) + 2 * (2 * mu * beta + 1) * rest * mu * (B + 1) + rest**2
    assert proved / stated == pytest.approx(3.74, abs=0.01)


def test_without_inputs_the_bias_alone_moves_the_logits_by_more_than_proposition_2_allows():
    """x = 0, U = 0, W_c = 1: z = b/(1 − w²) for OptEq, so ω on b, W_c and b_c each moves ŷ by ω(1 + b)/(1 − w²) + ω."""
    w, b, omega = 0.95, 0.9, 1e-6
    c = Constants(W=w, U=0.9, b=b, head=0.9, inputs=0.0)
    before, after = (h * beta / (1 - w**2) + bias for h, beta, bias in ((0.9, b, 0.0), (0.9 + omega, b + omega, omega)))
    both = theory.perturbation(c, omega).opteq
    assert both.published == pytest.approx(omega)
    assert (after - before) / both.published == pytest.approx(19.5, abs=0.1)
    assert after - before <= both.corrected


def test_remark_1_of_kerdeq_assumes_what_cannot_be():
    """‖WᵀW‖ = ‖W‖² = 0.9 means μ ≥ ‖W‖ = 0.949, not 0.9; then β < 0.83 is not enough."""
    m, mu = 0.9, math.sqrt(0.9)
    limit = (1 / (1 - m) - 1) / (2 * mu + m / (1 - m))
    assert mu > 0.948 and limit == pytest.approx(0.826, abs=5e-4)


def test_the_features_of_the_appendix_have_no_finite_length():
    """√((2γ)ⁱ/i) for √((2γ)ⁱ/i!): at γ = ½ and ‖a‖ = 1 the squares are 1 + Σ1/i, the harmonic series."""
    a = torch.ones(1, 1)
    sums = [theory.theorem1(a, a, 0.5, order).published for order in (10, 100, 1000)]
    steps = [float(two - one) / math.exp(-1) for one, two in zip(sums, sums[1:], strict=False)]
    assert steps == pytest.approx([math.log(10)] * 2, rel=0.03)
    assert float(theory.theorem1(a, a, 0.5, 20).corrected) == pytest.approx(1.0)


@pytest.mark.parametrize("kernel", ["opteq", "geq"])
def test_opposite_inputs_have_a_similarity_above_the_bound_of_proposition_4(kernel):
    """At θ₀ = π the bounds (14), (15) are 0, but z(x) and z(−x) are not orthogonal.

    (51) takes ⟨σ(W_s z₁), z₂⟩ ≤ μ²⟨z₁, z₂⟩ from ‖W_s‖ ≤ μ², which is a bound on ‖z₁‖‖z₂‖ only.
    """
    off, gamma = (0.4, None) if kernel == "opteq" else (-0.4, 0.1)
    W = torch.linalg.cholesky(torch.tensor([[0.5, off], [off, 0.5]])).mT  # WᵀW has the norm 0.9
    x = torch.tensor([1.0, 0.0])
    kappa, error = theory.estimate_similarity(W, gamma, x, -x, 1.0, draws=20_000)
    both = theory.proposition4(Constants(W=math.sqrt(0.9), gamma=gamma or 0.0), x, -x, 1.0, rows=2, smallest=0.0)
    bound = both.opteq if kernel == "opteq" else both.geq
    assert kappa == pytest.approx(*{"opteq": (0.9, 0.03), "geq": (1.2e-4, 0.05)}[kernel])
    assert bound.published < 1e-12 < kappa - 4 * error and kappa < bound.corrected


def test_a_layer_of_two_rows_has_twice_the_similarity_of_lemma_3():
    x = torch.tensor([1.0, 2.0])
    kappa, error = theory.estimate_similarity(torch.zeros(2, 2), None, x, x, 1.0, draws=50_000)
    bound = theory.lemma3(x, x, 1.0, rows=2)
    assert bound.published == pytest.approx(2.5) and abs(kappa - bound.corrected) < 4 * error


def test_the_norm_of_U_says_nothing_about_the_distance_that_U_sees():
    """U = diag(1, 0) maps x₁ − x₂ = (0, t) to 0: β₁ = β₂, however large ‖U‖₂ t, against KerDEQ's e^{−γ‖U‖₂t²}."""
    U, W, x = torch.diag(torch.tensor([1.0, 0.0])), 0.5 * torch.eye(2), torch.tensor([[1.0, 0.0], [1.0, 30.0]])
    a = x @ U.mT
    z = 0 * a
    for _ in range(200):
        r = a - z @ W.mT
        z = torch.relu(torch.exp(-r.square().sum(1, keepdim=True)) * (r @ W))
    assert torch.equal(z[0], z[1]) and float(z[0] @ z[1]) > 0.01


def test_at_the_distance_of_remark_3_the_printed_bound_of_geq_is_above_that_of_opteq():
    found = next(check_claims([claims.check_remark3])).evidence
    assert found.published == pytest.approx(5.78, abs=0.01) and found.corrected == pytest.approx(1.0)


def test_for_small_gamma_kerdeq_is_not_opteq():
    """γ → 0 leaves z = σ(Wᵀ(a − Wz)): W = ½, a = 1 gives 0.4; OptEq z = σ(W²z + a) 4/3, with the input Wᵀa 2/3."""
    W, a, z, opteq, other = 0.5, 1.0, 0.0, 0.0, 0.0
    for _ in range(100):
        r = a - W * z
        z, opteq, other = math.exp(-1e-9 * r**2) * W * r, W**2 * opteq + a, W**2 * other + W * a
    assert (z, opteq, other) == pytest.approx((0.4, 4 / 3, 2 / 3))


def test_a_quadratic_kernel_may_have_two_equilibria_where_2_tau_is_below_1():
    """a = −1, W = 0, c = 1: z₁ = relu(a) = 0, so τ = 0, but z = relu(κ′(t)a), t = −z, holds at 0 and at 2."""
    kernel, z = Polynomial(2, 1.0), torch.tensor([0.0, 2.0])
    assert torch.equal(torch.relu(-kernel.derivative(-z)), z)


@pytest.mark.parametrize(("square", "least"), [(4.0, -0.63), (1.0, 0.002)])
def test_a_truncated_kernel_may_or_may_not_be_semi_definite(square, least):
    X = kglm.pixels(12, 12, 1)
    K = kglm.Truncated(torch.full((1, 1), square), radius=3)(X, X)
    assert float(torch.linalg.eigvalsh(K)[0]) == pytest.approx(least, abs=5e-3 if least < 0 else 5e-4)


def test_with_a_pseudo_inverse_the_problem_2_is_not_the_equation_1():
    """W̃ᵀ = (½, ½), a = (1, −1): with (W̃⁺)ᵀ = (1, 1), z ≥ 0, (2) is ½z², least at 0."""
    W, a, z = torch.tensor([[0.5], [0.5]]), torch.tensor([1.0, -1.0]), torch.zeros(1)
    for _ in range(100):
        z = W.mT @ torch.relu(W @ z + a)
    assert float(z) == pytest.approx(2 / 3)
    inverse = torch.linalg.pinv(W).mT
    grid = torch.linspace(0, 1, 101)  # f allows z ≥ 0 only
    y = grid[:, None] * inverse.mT
    assert int((y.square().sum(1) / 2 - y @ a - grid.square() / 2).argmin()) == 0


def test_the_perturbation_of_the_papers_sigma_is_above_what_it_should_keep_to():
    mu, m, B = 0.5, 0.25, 1.0
    needed = 2 * mu**3 * (B + 1) + 2 * (1 - m) * mu * (B + 1) + (1 - m) ** 2  # of (30), with (31)'s μ³, times (1 − m)²
    printed = 2 * mu**3 * (B + 1) + 2 * (1 - m) * mu + (1 - m) ** 2
    assert needed / printed == pytest.approx(1.41, abs=0.005)


def test_a_smaller_similarity_may_come_with_a_smaller_distance():
    def solve(x: float, W: float, gamma: float) -> float:
        z = 0.0
        for _ in range(500):
            r = x - W * z
            z = 0.5 * z + 0.5 * max(0.0, math.exp(-gamma * r * r) * W * r)
        return z

    similar, other = ((solve(1, 1, gamma), solve(2, 1, gamma)) for gamma in (0.1, 3.0))
    assert similar[0] * similar[1] == pytest.approx(0.47, abs=5e-3) and other[0] * other[1] < 1e-6
    assert similar[1] - similar[0] == pytest.approx(0.45, abs=5e-3)
    assert other[0] - other[1] == pytest.approx(0.07, abs=5e-3)
    opteq, geq = [1 / (1 - 0.9**2), 2 / (1 - 0.9**2)], [solve(1, 0.9, 0.1), solve(2, 0.9, 0.1)]
    assert math.prod(geq) < math.prod(opteq)
    assert (geq[1] - geq[0], opteq[1] - opteq[0]) == pytest.approx((0.43, 5.26), abs=5e-3)


def test_the_variance_of_a_gaussian_statistic_is_1_for_one_of_three_only():
    """A″ = Var T: of T = y it is σ² = 4, of y/σ 1, of y/σ² (ours, where η is the mean) ¼."""
    eta = torch.zeros(1)
    variances = [kglm.families.Custom(lambda e, v=v: 0.5 * v * e.square()).variance(eta).item() for v in (4.0, 1.0)]
    assert [*variances, kglm.Gaussian(4.0).variance(eta).item()] == [4.0, 1.0, 0.25]
    K = 0.5 * torch.eye(1)
    assert kglm.check_assumptions(K, 1.0, kglm.families.Custom(lambda e: 2 * e.square(), bound=4.0)).contraction == 2
