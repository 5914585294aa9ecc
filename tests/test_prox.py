"""prox_{αφ}: the minimiser it claims to be, its penalty and its derivative."""

import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st

from kerneq.prox import Identity, ReLU, SoftThreshold

pytestmark = pytest.mark.usefixtures("float64")
ALL = [ReLU(), SoftThreshold(0.3), SoftThreshold(0.0), Identity()]


@pytest.mark.parametrize("prox", ALL, ids=str)
@examples
@given(d=st.floats(-3, 3), alpha=st.floats(0, 5))
def test_it_is_the_minimiser_of_its_definition(prox, d, alpha):
    """½(z − d)² + α·φ(z), against a fine grid."""
    z = prox(torch.tensor([[d]]), alpha)
    grid = torch.linspace(-4, 4, 8001).unsqueeze(1)

    def objective(z: torch.Tensor) -> torch.Tensor:
        penalty = prox.penalty(z)
        return 0.5 * (z[:, 0] - d) ** 2 + torch.where(penalty.isinf(), penalty, alpha * penalty)

    assert objective(z) <= objective(grid).min() + 1e-9


@pytest.mark.parametrize("prox", ALL, ids=str)
def test_a_scale_of_zero_projects_onto_the_domain(prox):
    d = torch.linspace(-2, 2, 9).view(1, -1)
    z = prox(d, 0.0)
    assert prox.penalty(z).isfinite().all()
    assert torch.equal(prox(z, 0.0), z)


@pytest.mark.parametrize("prox", ALL, ids=str)
def test_it_is_nonexpansive(prox):
    torch.manual_seed(0)
    a, b = torch.randn(2, 50, 4)
    assert ((prox(a, 0.7) - prox(b, 0.7)).norm(dim=1) <= (a - b).norm(dim=1) + 1e-12).all()


@pytest.mark.parametrize("prox", ALL, ids=str)
def test_its_pullback_is_that_of_autograd(prox):
    torch.manual_seed(0)
    d, g = torch.randn(3, 7, requires_grad=True), torch.randn(3, 7)
    z = prox(d)
    (expected,) = torch.autograd.grad(z, d, g)
    torch.testing.assert_close(prox.vjp(z.detach(), g), expected)


@pytest.mark.parametrize("prox", ALL, ids=str)
def test_the_penalty_is_per_sample_and_in_float32_at_least(prox):
    z = torch.rand(3, 2, 2, dtype=torch.bfloat16)
    assert prox.penalty(z).shape == (3,) and prox.penalty(z).dtype == torch.float32


def test_the_penalties_are_those_of_the_formulas():
    z = torch.tensor([[1.0, -2.0], [0.0, 3.0]])
    assert ReLU().penalty(z).tolist() == [torch.inf, 0.0]
    assert SoftThreshold(0.5).penalty(z).tolist() == [1.5, 1.5]
    assert Identity().penalty(z).tolist() == [0.0, 0.0]
