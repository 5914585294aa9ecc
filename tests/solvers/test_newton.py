"""Damped Newton: exact on affine maps, quadratic in the end, and it never takes a step that is a loss."""

import pytest
import torch
from helpers import affine, cell_of, input_of

import kerneq
from kerneq.gradients import Implicit
from kerneq.kernels import Gaussian
from kerneq.maps import Function, Point
from kerneq.solvers import Newton, Proximal

pytestmark = pytest.mark.usefixtures("float64")


def test_an_affine_map_is_solved_in_one_step_and_its_adjoint_directly():
    A, b, z_star = affine()
    A, z_star = 40 * A, torch.linalg.solve(torch.eye(len(A)) - 40 * A, b.mT).mT  # far from contraction
    b.requires_grad_()
    f = lambda z: z @ A.mT + b  # noqa: E731
    solution = kerneq.solve(f, torch.zeros_like(z_star), Newton(), tol=1e-10, max_steps=5)
    assert solution.converged.all() and int(solution.steps.max()) == 2
    torch.testing.assert_close(solution.value, z_star.detach(), rtol=1e-9, atol=1e-9)
    g = torch.randn_like(z_star)
    (got,) = torch.autograd.grad(Implicit(Newton()).attach(f, Point(solution.value)).z, b, g)
    expected = torch.linalg.solve(torch.eye(len(A)) - A.mT, g.mT).mT
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_a_slope_without_a_bound_is_met_with_shorter_steps_and_the_end_is_quadratic():
    # z = 1000 (50 − e^z): Newton's full step from 0 leads to e^49
    f = lambda z: 1000 * (50 - z.exp())  # noqa: E731
    z, errors, distances = torch.zeros(1, 1), [], []
    exact = torch.tensor(50 - 3.912 / 1000).log()
    for _ in range(5):  # the scalar equation by its own Newton, started close
        exact = exact - (exact - f(exact)) / (1 + 1000 * exact.exp())
    for steps in range(1, 12):
        s = kerneq.solve(f, z, Newton(), tol=1e-16, max_steps=steps, check_every=steps)
        errors.append((s.value - exact).abs().item())
        distances.append((f(s.value) - s.value).abs().item())
    assert all(after <= before * (1 + 1e-9) + 1e-9 for before, after in zip(distances, distances[1:], strict=False))
    small = [e for e in errors if 1e-13 < e < 1e-1]
    assert len(small) >= 2 and all(b < 2 * a**2 for a, b in zip(small, small[1:], strict=False))
    assert errors[-1] < 1e-13


@pytest.mark.parametrize("kind", ["dense", "conv"])
def test_the_equation_of_a_cell_is_solved_too_each_sample_on_its_own(kind):
    cell = cell_of(kind, Gaussian(0.5, split=2, hidden=6))
    f = cell.bind(input_of(kind))
    exact = kerneq.solve(f, cell.initial(f), Proximal(), tol=1e-13, max_steps=500).value
    s = kerneq.solve(f, cell.initial(f), Newton(), tol=1e-9, max_steps=50)
    assert s.converged.all()
    torch.testing.assert_close(s.value, exact, rtol=0, atol=1e-9)


@pytest.mark.parametrize("check_every", [None, 3])
@pytest.mark.parametrize("kind", ["dense", "conv"])
def test_its_error_bound_is_that_of_the_point_it_returns(kind, check_every):
    cell = cell_of(kind, Gaussian(0.5, split=2, hidden=6))
    f = cell.bind(input_of(kind))
    s = kerneq.solve(f, None, Newton(), tol=0.1, max_steps=3, check_every=check_every)
    gap = (f(s.value) - s.value).flatten(1).norm(dim=1)
    torch.testing.assert_close(s.error_bound, f.error_bound(gap).detach())


def test_a_mate_that_fails_leaves_a_sample_its_own_residual():
    """z = 10⁹(50 − e^z), where rounding hides f(z) − z from 10⁻⁶ on, beside z = z² + 1, which has no solution."""
    c = torch.tensor([[1.0], [0.0]])
    f = Function(lambda z, c: c * 1e9 * (50 - z.exp()) + (1 - c) * (z.square() + 1), (c,))
    s = kerneq.solve(f, torch.full((2, 1), 0.3), Newton(), tol=1e-9, max_steps=30)
    assert s.converged.tolist() == [True, False]
    assert s.residual[0] <= 1e-9 < s.residual[1]


def test_a_map_that_is_not_finite_at_the_start_is_reported():
    s = kerneq.solve(lambda z: z.exp() * torch.inf, torch.zeros(2, 3), Newton(), tol=1e-6, max_steps=5)
    assert s.status is kerneq.Status.NONFINITE


def test_an_adjoint_in_which_samples_meet_is_no_solution_and_says_so():
    """One Jacobian a sample is not all of it: the residual of the whole tells."""
    b = torch.randn(4, 3).requires_grad_()
    value = Implicit(Newton()).attach(lambda z: torch.tanh(z + z.mean(0) + b), Point(torch.zeros(4, 3))).z
    with pytest.warns(RuntimeWarning, match="The backward solve failed"):
        value.sum().backward()


def test_states_may_be_one_number_a_sample():
    a = torch.tensor(0.5, requires_grad=True)
    solution = kerneq.fixed_point(
        lambda z: a * z.cos(), torch.zeros(3), solver=Newton(), gradient=Implicit(Newton()), tol=1e-12
    )
    z = solution.value.detach()
    torch.testing.assert_close(z, 0.5 * z.cos())
    solution.value.sum().backward()
    torch.testing.assert_close(a.grad, (z.cos() / (1 + 0.5 * z.sin())).sum())


@pytest.mark.parametrize(("start", "own"), [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_iterates_have_the_dtype_of_f(start, own):
    s = kerneq.solve(lambda z: 0.5 * z.to(own).cos(), torch.zeros(2, 3, dtype=start), Newton(), tol=1e-7)
    assert s.converged.all() and s.value.dtype == own
    torch.testing.assert_close(s.value, 0.5 * s.value.cos())


def test_under_autocast_an_adjoint_solved_to_half_precision_is_no_failure():
    cell = cell_of("dense", Gaussian(0.5, split=2, hidden=6)).float()
    layer = kerneq.Equilibrium(cell, solver=Newton(), gradient=Implicit(Newton()), tol=2e-2)
    with torch.autocast("cpu", torch.bfloat16):
        solution = layer(input_of("dense").float())
    solution.value.sum().backward()  # without a warning
    assert solution.converged.all() and solution.backward[0].converged.all()


@pytest.mark.parametrize("kind", ["dense", "conv"])
def test_it_works_in_inference_mode(kind):
    layer = kerneq.Equilibrium(cell_of(kind, Gaussian(0.5, split=2, hidden=6)), solver=Newton(), tol=1e-9).eval()
    with torch.no_grad():
        expected = layer(input_of(kind)).value
    with torch.inference_mode():
        torch.testing.assert_close(layer(input_of(kind)).value, expected)


def test_a_function_that_does_not_look_at_z_is_solved_too():
    s = kerneq.solve(torch.ones_like, torch.zeros(2, 3), Newton(), tol=1e-10)
    assert s.converged.all() and torch.equal(s.value, torch.ones(2, 3))


def test_functions_work_in_inference_mode_too():
    x = torch.randn(4, 3)
    exact = kerneq.solve(lambda z: torch.tanh(0.5 * z + x), torch.zeros(4, 3), Newton(), tol=1e-10).value
    with torch.inference_mode():
        made = 1 * x
        for found in (
            kerneq.solve(lambda z: torch.tanh(0.5 * z + x), torch.zeros(4, 3), Newton(), tol=1e-10),
            kerneq.fixed_point(lambda z, x: torch.tanh(0.5 * z + x), 0 * x, made, solver=Newton(), tol=1e-10),
        ):
            torch.testing.assert_close(found.value, exact)
