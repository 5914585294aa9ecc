"""Every kernel, cell and solver finds the equilibrium that an independent long proximal descent finds."""

import pytest
import torch
from helpers import CELLS, KERNELS, PLAIN_SOLVERS, SOLVERS, affine, cell_of, descend, input_of

import kerneq
from kerneq.prox import Identity, SoftThreshold
from kerneq.solvers import Proximal

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("form", CELLS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_value_is_that_of_an_independent_long_descent(kernel, form):
    cell, x = cell_of(form, KERNELS[kernel]), input_of(form)
    expected = descend(cell, x)
    for solver in SOLVERS.values():
        with torch.no_grad():
            f = cell.bind(x)
            s = kerneq.solve(f, cell.initial(f), solver, tol=1e-11, max_steps=1000)
        assert s.converged.all(), (solver, s)
        torch.testing.assert_close(s.value, expected, rtol=1e-8, atol=1e-8, msg=lambda m, s=solver: f"{s}: {m}")


@pytest.mark.parametrize("solver", PLAIN_SOLVERS)
def test_a_function_of_the_users_own_is_solved_to_its_closed_form(solver):
    A, b, z_star = affine()
    s = kerneq.solve(lambda z: z @ A.mT + b, torch.zeros_like(b), PLAIN_SOLVERS[solver], tol=1e-11, max_steps=300)
    assert s.converged.all()
    torch.testing.assert_close(s.value, z_star, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("solver", PLAIN_SOLVERS)
@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 2, 3), (5, 1, 2, 2)], ids=str)
def test_the_state_may_have_any_shape_behind_the_batch(shape, solver):
    s = kerneq.solve(torch.cos, torch.zeros(shape), PLAIN_SOLVERS[solver], tol=1e-12, max_steps=200)
    assert s.converged.all() and s.value.shape == shape
    torch.testing.assert_close(s.value, torch.full(shape, 0.7390851332151607))


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("form", CELLS)
def test_soft_threshold_solves_the_lasso_like_problem(form, solver):
    """With the linear kernel E is a lasso: its optimality condition is checked entry by entry."""
    cell = cell_of(form, KERNELS["linear"], prox=SoftThreshold(0.3))
    x = input_of(form)
    f = cell.bind(x)
    s = kerneq.solve(f, cell.initial(f), SOLVERS[solver], tol=1e-12, max_steps=1000)
    slope = s.value - f.drive(s.value).detach()  # of the smooth part; must be −0.3·sign(z), or at most 0.3 at zero
    zero = s.value.abs() < 1e-9  # a relaxed step only tends to zero
    assert zero.any() and (~zero).any()
    assert (slope[zero].abs() <= 0.3 + 1e-9).all()
    torch.testing.assert_close(slope[~zero], -0.3 * s.value[~zero].sign(), rtol=0, atol=1e-9)


def test_without_a_nonlinearity_the_linear_kernel_is_a_linear_system():
    cell = cell_of("dense", KERNELS["linear"], prox=Identity())
    f = cell.bind(input_of("dense"))
    s = kerneq.solve(f, cell.initial(f), Proximal(), tol=1e-12, max_steps=500)
    W, a = f.operator.weight, f.binding.a
    torch.testing.assert_close(s.value, torch.linalg.solve(torch.eye(5) - W.mT @ W, a.mT).mT, rtol=1e-8, atol=1e-8)


def test_a_solve_that_ends_where_it_starts_gives_a_copy():
    """A warm start that is kept between calls may be written to: the solution is not."""
    start = torch.full((2, 3), 0.5)
    solution = kerneq.solve(lambda z: torch.full_like(z, 0.5), start, kerneq.solvers.Picard())
    assert solution.converged.all()
    start.zero_()
    assert (solution.value == 0.5).all()
