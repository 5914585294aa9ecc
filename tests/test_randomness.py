"""Random functions in a solve: the same numbers at each evaluation of one solve, other ones in the next."""

import pytest
import torch
from torch import nn

from kerneq.randomness import FixedRandomness

pytestmark = pytest.mark.usefixtures("float64")


def test_a_fixed_function_repeats_itself_and_the_next_one_differs():
    torch.manual_seed(0)
    f, z = FixedRandomness(nn.Dropout(0.5)), torch.ones(3, 20)
    one, other = f.fix(), f.fix()
    assert torch.equal(one(z), one(z)) and not torch.equal(one(z), other(z))


def test_the_generator_goes_on_as_if_only_the_seed_had_been_drawn():
    torch.manual_seed(0)
    torch.randint(2**62, ())
    expected = torch.rand(3)
    torch.manual_seed(0)
    FixedRandomness(nn.Dropout(0.5)).fix()(torch.ones(3, 20))
    assert torch.equal(torch.rand(3), expected)


def test_a_module_in_eval_draws_nothing():
    f = FixedRandomness(nn.Dropout(0.5))
    assert f.draws and not f.eval().draws
    assert torch.equal(f(torch.ones(2, 3)), torch.ones(2, 3))


def test_dropout_inside_a_network_is_fixed_with_its_gradient():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5))
    fixed, z = FixedRandomness(net).fix(), torch.randn(4, 5, requires_grad=True)
    (g,) = torch.autograd.grad(fixed(z).sum(), z)
    kept = fixed(z) != 0
    expected = (2.0 * kept.double()) @ net[0].weight
    torch.testing.assert_close(g, expected.detach())
