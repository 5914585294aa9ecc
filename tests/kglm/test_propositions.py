"""What the claims of `kerneq verify` do not say of Propositions 2, 4, 12, 13 and 14."""

import math

import pytest
import torch

from kerneq import kglm
from kerneq.kglm.families import FLAT
from kerneq.lab.verify.kglm_propositions import (
    canonical,
    jacobian_norm,
    proposition2,
    proposition4,
    proposition12,
    proposition13,
    proposition14,
)


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_norm(A, norm):
    return A * norm / torch.linalg.matrix_norm(A, 2)


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
    ("family", "factor"),
    [(kglm.Rectified(), FLAT), (kglm.Rectified(), kglm.Normal(0.3)), (kglm.Gaussian(), kglm.Normal(0.3))],
    ids=repr,
)
def test_proposition_4_bounds_the_difference_quotients_of_the_equilibrium_map(family, factor):
    X = torch.linspace(0, 5, 12, dtype=torch.float64)[:, None]
    K, lam, t = kglm.SquaredExponential()(X, X), 9.0, gaussian(12)
    z = family.mean(gaussian(50, 12, seed=1))
    rho = 0 if factor.flat else factor.slope(canonical(family, z))
    images = family.mean((t - z - rho) @ K / lam)
    ratio = (images[:25] - images[25:]).norm(dim=1) / (z[:25] - z[25:]).norm(dim=1)
    assert ratio.max() <= proposition4(K, lam, family, factor) * (1 + 1e-9)
    # a bounded mean: ρ′ has no bound at the edge of its range
    assert math.isinf(proposition4(K, lam, kglm.Ising(1.5), kglm.Normal(0.3)))


def test_proposition_13_finds_a_semi_definite_matrix_that_is_no_longer_and_the_matrix_itself_where_it_is_one():
    A, y = with_norm(gaussian(8, 8), 0.5), gaussian(4, 8, seed=99)
    B, bound = proposition13(A, y, torch.tanh)
    assert torch.linalg.eigvalsh(B).min() > -1e-12 and bound.min() > 0
    assert torch.linalg.matrix_norm(B, 2) <= torch.linalg.matrix_norm(A, 2) + 1e-12
    A = with_norm(A @ A.mT, 0.5)
    B, bound = proposition13(A, y, torch.tanh)
    torch.testing.assert_close(A, B)
    assert bound.max() < 1e-12


def test_what_does_not_contract_is_refused_in_words():
    A, y = with_norm(gaussian(8, 8), 0.6), gaussian(4, 8)
    for matrices in ((2 * A, A), (A, 2 * A)):
        with pytest.raises(ValueError, match="must contract"):
            proposition12(*matrices, y, torch.tanh)
    with pytest.raises(ValueError, match="must contract"):
        proposition13(2 * A, y, torch.tanh)
    with pytest.raises(ValueError, match="between 0 and 1"):
        proposition14(20, 1.0, 1.5, spread=1.0)
