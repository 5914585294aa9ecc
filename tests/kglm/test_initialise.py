"""Initialisation: the exact norms, the schemes, and the layers they serve."""

import pytest
import torch
from torch import nn

import kerneq
from kerneq import kglm
from kerneq.kglm import spectral_norm
from kerneq.kglm.initialisation import uniform
from kerneq.kglm.kernels import random_lengthscales


def matrix_of(f, shape):
    """The matrix of a linear map of images."""
    eye = torch.eye(shape.numel(), dtype=torch.float64).view(-1, *shape)
    return f(eye).flatten(1).mT


def test_the_fft_norm_is_the_norm_of_the_circular_convolution():
    weight = torch.randn(3, 2, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    size = (7, 6)

    def circular(x):
        return nn.functional.conv2d(nn.functional.pad(x, (1, 1, 2, 2), mode="circular"), weight)

    dense = torch.linalg.matrix_norm(matrix_of(circular, torch.Size((2, *size))), 2)
    torch.testing.assert_close(spectral_norm(weight, size), dense, rtol=1e-12, atol=0)


def test_norms_of_many_filters_are_found_together():
    weights = torch.randn(4, 5, 3, 3, 5, 5)
    norms = spectral_norm(weights, (16, 16))
    torch.testing.assert_close(norms[2, 3], spectral_norm(weights[2, 3], (16, 16)))


@pytest.mark.parametrize("norm", [0.1, 7.0])
@pytest.mark.parametrize("scheme", ["naive", kglm.Matern(0.4)])
def test_dense_and_convolutional_weights_get_exactly_the_norm_asked_for(norm, scheme):
    linear = kglm.initialise(nn.Linear(12, 9, dtype=torch.float64), scheme, norm=norm)
    assert spectral_norm(linear.weight).item() == pytest.approx(norm, rel=1e-12)
    conv = kglm.initialise(nn.Conv2d(4, 6, 5, dtype=torch.float64), scheme, norm=norm, size=(16, 16))
    assert spectral_norm(conv.weight, (16, 16)).item() == pytest.approx(norm, rel=1e-12)


def test_an_informed_layer_solves_the_kernel_glm_before_any_training():
    X = torch.linspace(-3, 3, 20, dtype=torch.float64)
    X2 = torch.linspace(-4, 2, 15, dtype=torch.float64)
    Y = torch.where(torch.sin(3 * X) > 0, 1.0, -1.0).double()
    kernel = kglm.SquaredExponential(0.6)
    K = kernel(X[:, None], X[:, None])
    lam = torch.linalg.matrix_norm(K, 2).item() / 0.9
    glm = kglm.KernelGLM(kernel, kglm.Ising(), lam=lam).fit(X, Y)
    layer = kglm.KernelGLM(kglm.Constant(), kglm.Ising(), lam=100.0).fit(X, Y).as_equilibrium(X2)
    kglm.initialise(layer, kernel, norm=0.9, X=X, X2=X2)
    torch.testing.assert_close(layer(Y[None])[0].detach(), glm.canonical(X2), rtol=0, atol=1e-8)


def test_the_naive_scheme_leaves_the_readout_random_and_random_leaves_everything():
    X = torch.linspace(-3, 3, 20, dtype=torch.float64)
    glm = kglm.KernelGLM(kglm.Matern(), kglm.Ising(), lam=10.0).fit(X, torch.ones(20, dtype=torch.float64))
    naive = kglm.initialise(glm.as_equilibrium(), "naive", norm=0.9)
    assert torch.equal(naive.cell.W1, -naive.cell.W2) and not torch.equal(naive.V1, -naive.V2)
    random = kglm.initialise(glm.as_equilibrium(), "random", generator=torch.Generator().manual_seed(0))
    assert not torch.equal(random.cell.W1, -random.cell.W2)
    assert random.cell.W1.abs().max() <= 20**-0.5


@pytest.mark.parametrize("wrap", [False, True])
def test_any_kerneq_cell_can_be_started_from_a_kernel(wrap):
    cell = kerneq.cells.DenseCell(
        kerneq.kernels.Gaussian(0.5, patch=1, split=6, hidden=6), inputs=4, state=10, features=6
    )
    layer = kerneq.Equilibrium(cell) if wrap else cell
    kglm.initialise(layer, kglm.SquaredExponential(3.0), norm=0.7)
    assert spectral_norm(cell.operator.weight).item() == pytest.approx(0.7, rel=1e-5)
    conv = kerneq.cells.ConvCell(kerneq.kernels.Linear(), inputs=3, state=8, features=4, size=3)
    kglm.initialise(conv, "naive", norm=0.7, size=(8, 8))
    assert spectral_norm(conv.operator.weight, (8, 8)).item() == pytest.approx(0.7, rel=1e-5)
    assert conv.bind(torch.randn(2, 3, 8, 8)).bound.item() <= 1


def test_random_lengthscales_are_symmetric_and_uniform():
    draws = random_lengthscales(3, torch.Generator().manual_seed(0), batch=(4000,))
    assert torch.equal(draws, draws.mT)
    assert draws.mean().item() == pytest.approx(2.0, abs=0.05) and draws.max() <= 4


def test_the_random_start_is_pytorchs_default_range():
    draw = uniform(torch.empty(200, 30), torch.Generator().manual_seed(0))
    assert draw.abs().max() <= 30**-0.5
    assert draw.std().item() == pytest.approx((30 * 3) ** -0.5, rel=0.02)


def test_the_filters_are_the_kernel_matrix_on_the_pixel_grid():
    kernel = kglm.Truncated(random_lengthscales(3, torch.Generator().manual_seed(1)).double(), radius=2)
    X, image = kglm.pixels(6, 7, 3), torch.randn(1, 3, 6, 7, dtype=torch.float64)
    got = nn.functional.conv2d(image, kernel.filters(), padding=2)
    torch.testing.assert_close(got.flatten(), kernel(X, X) @ image.flatten(), rtol=0, atol=1e-12)


def test_misuse_of_initialise_is_answered_in_words():
    with pytest.raises(ValueError, match="'naive' or 'random'"):
        kglm.initialise(nn.Linear(3, 3), "clever")
    with pytest.raises(ValueError, match="pass `size="):
        kglm.initialise(nn.Conv2d(3, 3, 3), "naive")
    with pytest.raises(ValueError, match="needs X2 and X of 3 and 4"):
        kglm.initialise(nn.Linear(4, 3), kglm.Matern(), X=torch.zeros(5))
    with pytest.raises(ValueError, match="odd side"):
        kglm.initialise(nn.Conv2d(3, 3, 4), "naive", size=(8, 8))
    with pytest.raises(TypeError, match="got ReLU"):
        kglm.initialise(nn.ReLU(), "naive")
    with pytest.raises(ValueError, match="`norm` must be positive"):
        kglm.initialise(nn.Linear(3, 3), "naive", norm=0.0)
