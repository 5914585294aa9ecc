"""The size of a Jacobian: estimates beside the exact numbers of a dense J."""

import pytest
import torch

from kerneq.stability import jacobian_norm, spectral_radius

pytestmark = pytest.mark.usefixtures("float64")


def exact_jacobians(f, z):
    return torch.stack([torch.autograd.functional.jacobian(lambda s: f(s[None])[0], s).reshape(len(s), -1) for s in z])


@pytest.fixture
def problem():
    torch.manual_seed(0)
    A = torch.nn.Parameter(torch.randn(7, 7) / 3)
    return A, (lambda z: torch.tanh(z @ A.mT + 0.3)), torch.randn(4, 7)


def test_the_estimate_tends_to_the_frobenius_norm(problem):
    _, f, z = problem
    expected = exact_jacobians(f, z).square().sum((1, 2)) / 7
    torch.testing.assert_close(jacobian_norm(f, z, samples=4000), expected, rtol=0.03, atol=0)


def test_the_estimate_is_exact_for_a_diagonal_jacobian_and_its_gradient_too():
    scale = torch.tensor([0.5, 2.0, 3.0], requires_grad=True)
    found = jacobian_norm(lambda z, s: s * z, torch.ones(2, 3), scale)
    torch.testing.assert_close(found, torch.full((2,), (0.25 + 4 + 9) / 3))
    (gradient,) = torch.autograd.grad(found.sum(), scale)
    torch.testing.assert_close(gradient, 2 * 2 * scale.detach() / 3)


def test_the_gradient_reaches_the_parameters(problem):
    A, f, z = problem
    torch.manual_seed(3)
    (got,) = torch.autograd.grad(jacobian_norm(f, z, samples=3).mean(), A)

    def at(B):
        torch.manual_seed(3)
        return jacobian_norm(lambda z: torch.tanh(z @ B.mT + 0.3), z, samples=3).mean()

    step = torch.zeros_like(A)
    step[2, 1] = 1e-6
    slope = (at(A.detach() + step) - at(A.detach() - step)) / 2e-6
    torch.testing.assert_close(got[2, 1], slope.detach(), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_radius_is_that_of_the_dense_jacobian(problem, dtype):
    _, f, z = problem
    expected = torch.linalg.eigvals(exact_jacobians(f, z)).abs().amax(1)
    found = spectral_radius(lambda z: f(z.double()).to(dtype), z.to(dtype), steps=7)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4 if dtype is torch.float32 else 1e-10, atol=0)


def test_a_rotation_has_complex_eigenvalues_which_are_found():
    angle = torch.tensor(0.7)
    turn = 0.9 * torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).view(2, 2)
    A = torch.block_diag(turn, 0.3 * torch.eye(30))
    found = spectral_radius(lambda z: z @ A.mT, torch.zeros(3, 32))
    torch.testing.assert_close(found, torch.full((3,), 0.9), rtol=1e-6, atol=0)


def test_few_steps_are_close_for_a_wide_state():
    torch.manual_seed(0)
    A = torch.randn(200, 200) / 200**0.5
    expected = torch.linalg.eigvals(A).abs().max()
    found = spectral_radius(lambda z: z @ A.mT, torch.zeros(2, 200), steps=60)
    assert ((found / expected - 1).abs() < 0.05).all()


@pytest.mark.parametrize("function", [jacobian_norm, spectral_radius])
def test_constants_have_none_and_bad_input_is_refused(function):
    assert function(lambda z: torch.ones_like(z), torch.zeros(2, 3)).tolist() == [0, 0]
    with pytest.raises(ValueError, match="must keep the shape"):
        function(lambda z: z[:, :1], torch.zeros(2, 3))
    with pytest.raises(ValueError, match="floating-point tensor"):
        function(lambda z: z, torch.zeros(2, 3, dtype=torch.int64))


def test_a_sample_that_is_no_number_has_no_radius_and_spoils_no_other():
    z = torch.zeros(2, 3)
    z[1] = torch.nan
    found = spectral_radius(lambda z: 0.5 * z.sin(), z)
    torch.testing.assert_close(found[0], torch.tensor(0.5))
    assert found[1].isnan()


def test_a_structured_state_is_that_of_its_tensors_in_one():
    torch.manual_seed(0)
    A = torch.randn(5, 5) / 3
    z = torch.randn(4, 5)

    def split(state):
        u, v = state
        return tuple(torch.tanh(torch.cat((u, v), 1) @ A.mT).split([2, 3], 1))

    found = spectral_radius(split, (z[:, :2], z[:, 2:]), steps=5)
    torch.testing.assert_close(found, spectral_radius(lambda z: torch.tanh(z @ A.mT), z, steps=5))
    assert jacobian_norm(split, (z[:, :2], z[:, 2:])).shape == (4,)
    assert jacobian_norm(lambda z: z.cos(), z, batched=False).shape == (1,)
