"""Propositions 2, 4, 12, 13 and 14, checked on maps where both sides can be computed."""

import pytest
import torch

from kerneq import kglm, solve
from kerneq.kglm import kernels
from kerneq.kglm.families import FLAT
from kerneq.kglm.propositions import (
    jacobian_norm,
    proposition2,
    proposition4,
    proposition12,
    proposition13,
    proposition14,
)
from kerneq.solvers import Picard


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_norm(A, norm):
    return A * norm / torch.linalg.matrix_norm(A, 2)


def fixed_point(A, y):
    return solve(lambda z: torch.tanh((y - z) @ A.mT), torch.zeros_like(y), Picard(), tol=1e-14, max_steps=2000).value


@pytest.mark.parametrize("seed", range(2))
def test_proposition_2_the_lipschitz_ratio_is_below_the_largest_jacobian_on_the_segment(seed):
    A, y = with_norm(gaussian(6, 6, seed=seed), 3.0), gaussian(6, seed=seed + 10)
    z1, z2 = gaussian(6, seed=seed + 20), gaussian(6, seed=seed + 30)
    ratio, largest = proposition2(lambda z: torch.tanh(A @ (y - z)), z1, z2, points=400)
    assert ratio <= largest * (1 + 1e-6)


def test_proposition_2_does_not_cover_the_papers_figure_2b_nor_figure_2b_the_speed_of_a_contraction():
    # tanh on (0, 1): ‖DH‖ < 1 inside, yet no q < 1 bounds it, nor the ratio of distances on the closure
    z = torch.logspace(-6, 0, 30, dtype=torch.float64)[:, None]
    norms = jacobian_norm(torch.tanh, z)
    assert (norms < 1).all() and norms.max() > 1 - 1e-11
    ratio, _ = proposition2(torch.tanh, torch.zeros(1, dtype=torch.float64), z[0])
    assert 1 - 1e-11 < ratio < 1
    # the fixed point 0 is the only one, but iteration nears it like √(3/2k): no geometric rate
    state = torch.ones(1, dtype=torch.float64)
    for _ in range(20000):
        state = state.tanh()
    assert state.item() == pytest.approx((3 / (2 * 20000)) ** 0.5, rel=1e-3)


@pytest.mark.parametrize(
    "family",
    [kglm.Gaussian(), kglm.Binomial(4), kglm.Ising(1.5), kglm.LeakyReLU(0.3), kglm.Rectified()],
    ids=repr,
)
@pytest.mark.parametrize("factor", [FLAT, kglm.Normal(0.3)], ids=repr)
def test_proposition_4_bounds_the_jacobian_of_the_equilibrium_map(family, factor):
    X = torch.linspace(0, 5, 12, dtype=torch.float64)[:, None]
    K, lam = kernels.SquaredExponential()(X, X), 9.0
    number = proposition4(K, lam, family, factor)
    t = gaussian(12)

    def H(z):
        rho = 0 if factor.flat else factor.slope(family.canonical(z))
        return family.mean(K @ (t - z - rho) / lam)

    if number == float("inf"):
        # ρ′ is unbounded at the edge of the domain
        assert family.variance_range()[0] == 0 and factor.max_curvature() > 0
        return
    z = family.mean(gaussian(50, 12, seed=1))
    if factor.flat and not isinstance(family, kglm.Rectified):
        assert jacobian_norm(H, z).max() <= number * (1 + 1e-9)
    else:  # torch has no batching rule for log Φ, nor the inverse link a derivative: difference quotients instead
        a, b = z[:25], z[25:]
        ratio = torch.stack([(H(p) - H(q)).norm() / (p - q).norm() for p, q in zip(a, b, strict=True)])
        assert ratio.max() <= number * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(2))
def test_proposition_12_bounds_the_distance_of_two_fixed_points(seed):
    A = with_norm(gaussian(8, 8, seed=seed), 0.6)
    B = with_norm(A + 0.3 * gaussian(8, 8, seed=seed + 50) / 8, 0.7)
    y = gaussian(4, 8, seed=seed + 99)
    distance = (fixed_point(A, y) - fixed_point(B, y)).norm(dim=-1)
    bound = proposition12(A, B, y, torch.tanh)
    assert (distance <= bound).all() and (distance > 0).all()
    with pytest.raises(ValueError, match="must contract"):
        proposition12(2 * A, B, y, torch.tanh)


@pytest.mark.parametrize("seed", range(2))
def test_proposition_13_finds_a_semi_definite_matrix_within_its_bound(seed):
    A, y = with_norm(gaussian(8, 8, seed=seed), 0.5), gaussian(4, 8, seed=seed + 99)
    B, bound = proposition13(A, y, torch.tanh)
    assert torch.linalg.eigvalsh(B).min() > -1e-12
    assert torch.linalg.matrix_norm(B, 2) <= torch.linalg.matrix_norm(A, 2) + 1e-12
    assert ((fixed_point(A, y) - fixed_point(B, y)).norm(dim=-1) <= bound).all()


def test_proposition_13_is_zero_for_a_semi_definite_matrix():
    A = gaussian(6, 6)
    A = with_norm(A @ A.mT, 0.5)
    B, bound = proposition13(A, gaussian(3, 6), torch.tanh)
    torch.testing.assert_close(A, B)
    assert bound.max() < 1e-12
    with pytest.raises(ValueError, match="must contract"):
        proposition13(3 * A, gaussian(3, 6), torch.tanh)


def test_proposition_14_holds_at_least_as_often_as_it_promises():
    n, C, t, trials = 20, 0.3, 1.5, 60
    y = gaussian(n).clamp(-1, 1)
    start = proposition14(n, C, t, spread=1.0)
    assert 0 < start.probability < 1
    held = 0
    for seed in range(trials):
        A = start.deviation * gaussian(n, n, seed=seed)
        B, _ = proposition13(A, y, torch.tanh)
        error = (fixed_point(A, y[None]) - fixed_point(B, y[None])).square().mean().item()
        held += torch.linalg.matrix_norm(A, 2).item() < C and error <= start.mean_squared
    assert held / trials >= start.probability
    with pytest.raises(ValueError, match="between 0 and 1"):
        proposition14(n, 1.0, t, spread=1.0)
