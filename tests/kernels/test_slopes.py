"""Every kernel: the closed-form drive is the gradient of S, and the energy that of the hidden problem."""

import pytest
import torch
from helpers import CELLS, KERNELS, Reference, cell_of, input_of, patches

from kerneq.kernels import Gaussian, Polynomial, Sigmoid
from kerneq.kernels.inner import AbstractInnerKernel

pytestmark = pytest.mark.usefixtures("float64")
PAIRS = [(kernel, form) for kernel in KERNELS for form in CELLS]


def equation(kernel: str, form: str):
    cell, x = cell_of(form, KERNELS[kernel]), input_of(form)
    problem = Reference(cell, x)
    torch.manual_seed(2)
    return cell.bind(x), problem, torch.randn(problem.state)


@pytest.mark.parametrize("kernel, form", PAIRS)
def test_the_drive_is_the_gradient_of_the_similarity(kernel, form):
    f, problem, z = equation(kernel, form)
    torch.testing.assert_close(f.drive(z).detach(), problem.drive(z), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kernel, form", PAIRS)
def test_the_map_is_the_prox_of_the_drive(kernel, form):
    f, problem, z = equation(kernel, form)
    torch.testing.assert_close(f(z).detach(), torch.relu(problem.drive(z)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kernel, form", PAIRS)
def test_the_energy_is_that_of_the_hidden_problem_and_its_gradient_is_z_minus_the_drive(kernel, form):
    f, problem, z = equation(kernel, form)
    z = z.abs().requires_grad_()  # inside the domain of φ
    energy = f.energy(z)
    assert energy.shape == (len(z),)
    torch.testing.assert_close(energy.detach(), problem.energy(z.detach()), rtol=1e-9, atol=1e-9)
    (slope,) = torch.autograd.grad(energy.sum(), z)
    torch.testing.assert_close(slope, (z - f.drive(z)).detach(), rtol=1e-9, atol=1e-9)
    outside = z.detach().clone()
    outside.view(len(z), -1)[1, 0] = -1
    assert f.energy(outside).isinf().tolist() == [False, True, False, False]


@pytest.mark.parametrize("kernel", [Sigmoid(), Polynomial(2), Polynomial(3, 0.5)])
def test_the_slope_of_an_inner_kernel_is_the_derivative_of_its_value_also_at_zero_where_a_solve_starts(kernel):
    t = (torch.arange(-20.0, 21.0) / 10).requires_grad_()
    (slope,) = torch.autograd.grad(kernel.value(t).sum(), t)
    torch.testing.assert_close(slope, kernel.derivative(t).detach())


@pytest.mark.parametrize("kernel", [Sigmoid(), Polynomial(2), Polynomial(3, 0.5)])
def test_the_curvature_of_an_inner_kernel_is_the_derivative_of_its_slope(kernel):
    t = torch.linspace(-2, 2, 40)
    torch.testing.assert_close(kernel.second(t), AbstractInnerKernel.second(kernel, t))


@pytest.mark.parametrize("kernel, form", PAIRS)
def test_the_first_evaluation_at_zero_needs_no_features_and_agrees(kernel, form):
    f, problem, _ = equation(kernel, form)
    zero = torch.zeros(problem.state)
    short, full = f.evaluate(None, energy=True), f.evaluate(zero, energy=True)
    assert short.features is None
    torch.testing.assert_close(short.image, full.image)
    torch.testing.assert_close(short.energy.value, full.energy.value)


@pytest.mark.parametrize("kernel, form", PAIRS)
def test_the_rows_of_an_equation_are_the_equation_of_the_rows(kernel, form):
    f, _, z = equation(kernel, form)
    index = torch.tensor([3, 1])
    part = f.rows(index)
    torch.testing.assert_close(part(z[index]), f(z)[index])
    torch.testing.assert_close(part.energy(z[index].abs()), f.energy(z.abs())[index])


@pytest.mark.parametrize("kernel, form", PAIRS)
def test_an_equation_on_its_own_tensors_is_itself(kernel, form):
    f, _, z = equation(kernel, form)
    assert torch.equal(f.on(*f.tensors())(z), f(z))
    changed = f.on(*(2 * t for t in f.tensors()))
    assert not torch.equal(changed.drive(z), f.drive(z))


@pytest.mark.parametrize("patch, split", [(1, 1), (1, 4), (2, 2), (4, 1), (2, 4)])
def test_patches_are_channels_times_pixels(patch, split):
    kernel = Gaussian(gamma=0.3, patch=patch, split=split, hidden=7)
    cell, x = cell_of("conv", kernel), input_of("conv")
    f, problem = cell.bind(x), Reference(cell, x)
    assert patches(problem.a, split, patch).shape == (4, 64 // (split * patch**2), split * patch**2)
    z = torch.rand(problem.state)
    torch.testing.assert_close(f.energy(z).detach(), problem.energy(z))
    torch.testing.assert_close(f.drive(z).detach(), problem.drive(z))


@pytest.mark.parametrize("split", [1, 2, 3, 6, None])
def test_dense_vectors_are_cut_into_equal_pieces_or_taken_whole(split):
    cell, x = cell_of("dense", Gaussian(gamma=0.3, split=split, hidden=4)), input_of("dense")
    f, problem = cell.bind(x), Reference(cell, x)
    z = torch.rand(problem.state)
    torch.testing.assert_close(f.energy(z).detach(), problem.energy(z))
    assert cell.similarity.project.weight.shape == (4, split or 6)


def test_the_hidden_layer_enters_only_through_q():
    """Rotating the columns of W_h leaves Q = W_hW_hᵀ, and so the whole equation, as it was."""
    cell, x = cell_of("conv", Gaussian(patch=2, split=2, hidden=16)).eval(), input_of("conv")
    z = torch.rand(4, 3, 4, 4)
    before = cell.bind(x).drive(z).detach()
    with torch.no_grad():
        rotation = torch.linalg.qr(torch.randn(16, 16)).Q
        cell.similarity.project.weight.copy_(rotation @ cell.similarity.project.weight)
    torch.testing.assert_close(cell.bind(x).drive(z).detach(), before)


@pytest.mark.parametrize("kernel, form", PAIRS)
def test_the_weights_of_the_patches_are_twice_the_slopes_of_their_heights(kernel, form):
    f, problem, z = equation(kernel, form)
    weights = f.weights(z)
    if not problem.radial:
        assert weights is None
        return
    part = problem.cell.similarity
    r = problem.a - (z.flatten(1) @ problem.W.mT).view_as(problem.a)
    t = (patches(r, part.split, part.patch) @ problem.W_h).square().sum(-1).requires_grad_()
    (slope,) = torch.autograd.grad(problem.heights(t).sum(), t)
    assert weights.shape == (len(z), r.shape[1] // part.split, *(side // part.patch for side in r.shape[2:] or (1, 1)))
    torch.testing.assert_close(weights.detach().flatten(1), -2 * slope, rtol=1e-9, atol=1e-9)
