"""The counter-examples of docs/errata.md: each number there is computed here."""

import math

import pytest
import torch
from torch import Tensor

from kerneq.cells import DenseCell
from kerneq.kernels import Gaussian, Polynomial
from kerneq.solvers import Proximal, solve

pytestmark = pytest.mark.usefixtures("float64")

BETA = math.exp(-0.2)  # max e^{−γ‖r‖²} where γ = 0.2/M, M = min ‖r‖²


def geq_lipschitz(beta: float, mu: float, root_gamma: float = 0.2, B: float = 1.0) -> float:
    """L_geq of Proposition 3, (11); negative: no bound."""
    top = beta * mu**2 + root_gamma * B * mu**3
    return top / (1 - top)


def plain(f: object, steps: int, z: Tensor) -> Tensor:
    for _ in range(steps):
        z = f(z)
    return z


def test_gamma_of_02_over_M_breaks_the_condition_of_both_remarks():
    assert BETA == pytest.approx(0.819, abs=5e-4) and BETA > 0.8
    # Remark 2: L_geq < L_opteq for β = 0.8, but not for the β that the paper's own γ makes.
    opteq = 0.98 / (1 - 0.98**2)
    assert geq_lipschitz(0.8, 0.98) < opteq == pytest.approx(24.7, abs=0.05)
    assert geq_lipschitz(BETA, 0.98) == pytest.approx(38.2, abs=0.1)
    assert geq_lipschitz(BETA, 0.991) > 0 > geq_lipschitz(BETA, 0.992)  # and no bound at all from there on
    # Remark 1, second inequality, at m = 0.9, μ → 1.
    assert (2 * BETA + 1) / (1 - BETA * 0.9) == pytest.approx(10.03, abs=0.01)
    assert 1 / (1 - 0.9) < 10.03


def test_the_bracket_of_proposition_2_is_smaller_than_the_proofs():
    beta, mu, m, B = 0.8, 0.9, 0.81, 1.0
    rest = 1 - beta * m
    stated = beta * mu**4 * B + (2 * mu * beta + 1) * rest * mu * B + rest**2
    proved = 2 * beta * mu**4 * (B + 1) + 2 * (2 * mu * beta + 1) * rest * mu * (B + 1) + rest**2
    assert proved / stated == pytest.approx(3.74, abs=0.01)


def test_proposition_1_without_the_gradient_of_lambda_has_another_solution():
    """γ = ½, U = W = 1, b = 0, x = 1, with the lost 1/2γ restored; λ held constant leaves e^{−γr²}a, not e^{−γr²}r."""
    one = torch.ones(())
    geq = plain(lambda z: torch.relu(torch.exp(-0.5 * (1 - z) ** 2) * (1 - z)), 500, 0.5 * one)
    constant = plain(lambda z: torch.relu(torch.exp(-0.5 * (1 - z) ** 2)), 5000, 0.5 * one)
    assert float(geq) == pytest.approx(0.465, abs=5e-3) and float(constant) == pytest.approx(1.0, abs=1e-3)


def test_at_an_equilibrium_the_residual_is_no_longer_than_a():
    """E(z*) ≤ E(0): so Proposition 3's Bμ² holds, although its proof gives only 2Bμ²."""
    for seed in range(20):
        torch.manual_seed(seed)
        cell = DenseCell(Gaussian(0.5), inputs=4, state=8, features=6, norm=0.99)
        torch.nn.init.normal_(cell.operator.weight)
        with torch.no_grad():
            f = cell.bind(3 * torch.randn(50, 4))
            z = solve(f, None, Proximal(), tol=1e-12, max_steps=500).value
            assert bool(((f.binding.a - f.operator(z)).norm(dim=1) <= f.binding.a.norm(dim=1)).all())


@pytest.mark.parametrize("kernel", ["opteq", "geq"])
def test_opposite_inputs_have_a_similarity_above_the_bound_of_proposition_4(kernel):
    """At θ₀ = π the bounds (14), (15) are 0, but z(x) and z(−x) are not orthogonal.

    (51) takes ⟨σ(W_s z₁), z₂⟩ ≤ μ²⟨z₁, z₂⟩ from ‖W_s‖ ≤ μ², which is a bound on ‖z₁‖‖z₂‖ only.
    """
    torch.manual_seed(0)
    off = 0.4 if kernel == "opteq" else -0.4
    Ws = torch.tensor([[0.5, off], [off, 0.5]])  # norm 0.9
    W = torch.linalg.cholesky(Ws).mT  # WᵀW = W_s
    Ux = torch.randn(20_000, 2)  # x of length 1, the rows of U standard normal

    def equilibrium(a: Tensor) -> Tensor:
        def step(z: Tensor) -> Tensor:
            if kernel == "opteq":
                return torch.relu(z @ Ws + a)
            r = a - z @ W.mT
            return torch.relu(torch.exp(-0.1 * r.square().sum(1, keepdim=True)) * (r @ W))

        return plain(step, 400, torch.zeros_like(a))

    kappa = float((equilibrium(Ux) * equilibrium(-Ux)).sum(1).mean())
    print(kernel, kappa)
    assert kappa > {"opteq": 0.2, "geq": 1e-4}[kernel]


def test_the_published_polynomial_kernel_gives_zero_for_every_input():
    torch.manual_seed(0)
    cell = DenseCell(Polynomial(2, offset=0.0), inputs=4, state=8, features=6, norm=0.9)
    f = cell.bind(torch.randn(50, 4))
    assert not f(torch.zeros(50, 8)).any()
    assert (
        not solve(f, torch.rand(50, 8), Proximal(), tol=1e-12, max_steps=2000).value.gt(1e-6).any()
    )  # from elsewhere, too


def test_the_published_condition_of_remark_3_does_not_make_its_factor_less_than_one():
    gamma, logD = 0.04, 0.04  # B = ‖W‖ = σ_min(U) = 1
    printed, right = 2 * math.sqrt(logD), 2 * math.sqrt(logD / gamma)
    assert math.exp(logD - gamma / 4 * printed**2) == pytest.approx(1.039, abs=1e-3)
    assert math.exp(logD - gamma / 4 * right**2) == pytest.approx(1.0)
