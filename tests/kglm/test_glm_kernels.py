"""The covariance functions, against scikit-learn and GPyTorch, and the adapters for theirs."""

import math
import warnings

import numpy as np
import pytest
import torch
from glm_data import uniform
from sklearn.gaussian_process import kernels as sk

from kerneq import kglm
from kerneq.kglm import kernels

PAIRS = [
    (kernels.SquaredExponential(0.7), sk.RBF(0.7)),
    (kernels.Periodic(2.5, 0.9), sk.ExpSineSquared(length_scale=0.9, periodicity=2.5)),
    (kernels.Matern(0.7, 0.5), sk.Matern(0.7, nu=0.5)),
    (kernels.Matern(0.7, 1.5), sk.Matern(0.7, nu=1.5)),
    (kernels.Matern(0.7, 2.5), sk.Matern(0.7, nu=2.5)),
    (kernels.DotProduct(), sk.DotProduct(sigma_0=0.0)),
    (kernels.White(0.3), sk.WhiteKernel(0.3)),
    (0.5 * kernels.Matern(0.7) + kernels.White(0.1), 0.5 * sk.Matern(0.7) + sk.WhiteKernel(0.1)),
    (kernels.SquaredExponential() * kernels.Periodic(2.0), sk.RBF() * sk.ExpSineSquared(math.sqrt(2), 2.0)),
]


def points(n=12, d=1, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=lambda k: repr(k))
def test_each_kernel_is_scikit_learns_which_is_accepted_as_it_is_symmetric_and_semi_definite(ours, theirs):
    X, X2 = points(), points(7, seed=1)
    K, across, adapted = ours(X, X), ours(X, X2), kglm.as_kernel(theirs)
    np.testing.assert_allclose(K.numpy(), theirs(X.numpy()), atol=1e-12)
    np.testing.assert_allclose(across.numpy(), theirs(X.numpy(), X2.numpy()), atol=1e-12)
    torch.testing.assert_close(adapted(X, X), K, rtol=0, atol=1e-12)
    torch.testing.assert_close(adapted(X, X2), across, rtol=0, atol=1e-12)
    torch.testing.assert_close(adapted(X.flip(0)[:5], X), K.flip(0)[:5], rtol=0, atol=1e-12)
    assert torch.equal(K, K.mT) and torch.linalg.eigvalsh(K).min() > -1e-12


@pytest.mark.parametrize("kernel", [ours for ours, _ in PAIRS[:5]], ids=repr)
def test_gradients_reach_the_coordinates_also_where_two_are_one(kernel):
    assert torch.autograd.gradcheck(lambda X: kernel(X, X), points(4, 2).requires_grad_())


SCALED = kernels.Scaled(kernels.Matern(0.7), lambda x: x[:, 0].sin())


@pytest.mark.parametrize("kernel", [*(ours for ours, _ in PAIRS), SCALED], ids=repr)
def test_each_kernel_is_semi_definite_on_a_plane(kernel):
    X = points(40, 2)
    assert torch.linalg.eigvalsh(kernel(X, X)).min() > -1e-12


def test_a_scaled_kernel_is_exactly_symmetric():
    K = SCALED(points(40, 2), points(40, 2))
    assert torch.equal(K, K.mT)


def test_a_gradient_that_would_be_lost_in_an_array_is_refused_in_words():
    X, kernel = points().requires_grad_(), kglm.as_kernel(sk.RBF())
    with pytest.raises(ValueError, match="no gradient in the coordinates"):
        kernel(X, X)
    with torch.no_grad():
        torch.testing.assert_close(kernel(X, X), kernels.SquaredExponential()(X, X))


def test_the_papers_true_kernel_is_a_product_of_ours():
    x = torch.linspace(-6, 6, 9, dtype=torch.float64)[:, None]
    d = (x - x.mT).abs()
    expected = 0.1 * torch.exp(-0.5 * d.square()) * torch.exp(-torch.sin(d).square())
    torch.testing.assert_close((0.1 * kernels.SquaredExponential() * kernels.Periodic())(x, x), expected)


def test_a_gpytorch_kernel_is_accepted_as_it_is():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gpytorch = pytest.importorskip("gpytorch")
        theirs = gpytorch.kernels.RBFKernel().double()
        theirs.lengthscale = 0.7
    X, X2 = points(), points(7, seed=1)
    got = kglm.as_kernel(theirs)(X, X2).detach()
    ours = kernels.SquaredExponential(theirs.lengthscale.item())  # its constraint stores 0.7 rounded
    torch.testing.assert_close(got, ours(X, X2), rtol=0, atol=1e-10)


def test_any_function_of_two_sets_of_coordinates_is_a_kernel_and_its_shape_is_checked():
    X = points()
    torch.testing.assert_close(kglm.as_kernel(lambda a, b: a @ b.mT)(X, X), X @ X.mT)
    with pytest.raises(ValueError, match="must return a matrix"):
        kglm.as_kernel(lambda a, b: a)(X, X)


@pytest.mark.parametrize(
    "make",
    [
        lambda: kernels.SquaredExponential(0.0),
        lambda: kernels.Periodic(-1.0),
        lambda: kernels.Matern(1.0, 3.5),
        lambda: -1.0 * kernels.DotProduct(),
    ],
)
def test_kernel_parameters_out_of_range_are_refused(make):
    with pytest.raises(ValueError, match="must|cannot"):
        make()


def test_the_two_ways_to_the_distance_agree():
    """The second is a GPU's: by a matrix product, after the centre is taken off."""
    X, X2 = 1000 + uniform(20, 3), 1000 + uniform(7, 3, seed=1)
    wanted = (X[:, None] - X2).square().sum(-1)
    torch.testing.assert_close(kernels.squared_distance(X, X2), wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close(kernels.distance_by_products(X, X2), wanted, rtol=0, atol=1e-12)
    assert (kernels.distance_by_products(X, X) >= 0).all() and (kernels.squared_distance(X, X).diagonal() == 0).all()
