"""`Neumann` is the start of the exact gradient; `Reversible` is the gradient of its steps, without keeping them."""

import pytest
import torch
from helpers import KERNELS, affine, away_from_kinks, cell_of

import kerneq
from kerneq.gradients import Implicit, Neumann, Phantom, Point, Reversible, Shine
from kerneq.solvers import Anderson, Broyden, Picard

pytestmark = pytest.mark.usefixtures("float64")


def leapfrog(f, zero, rule):
    before = z = zero
    for _ in range(rule.steps):
        before, z = z, (1 - rule.relaxation) * before + rule.relaxation * f(z)
    return z


@pytest.fixture
def problem():
    torch.manual_seed(0)
    linear = torch.nn.Linear(6, 6)
    torch.nn.init.orthogonal_(linear.weight, gain=0.7)
    x = torch.randn(4, 6, requires_grad=True)
    return linear, x, lambda z, x: torch.tanh(linear(z) + x)


@pytest.mark.parametrize("terms", [0, 1, 4])
def test_a_series_is_its_terms(terms):
    A, b, z_star = affine()
    b.requires_grad_()
    z = Neumann(terms).attach(lambda z: z @ A.mT + b, Point(z_star)).z
    assert torch.equal(z, z_star)
    g = torch.randn_like(z)
    expected = sum(g @ torch.linalg.matrix_power(A, k) for k in range(terms + 1))
    torch.testing.assert_close(torch.autograd.grad(z, b, g)[0], expected, rtol=1e-12, atol=1e-12)


def test_many_terms_are_the_exact_gradient_and_as_many_phantom_steps(problem):
    linear, x, f = problem
    found = []
    for rule in (Neumann(200), Phantom(201, 1.0), Implicit(tol=1e-12)):
        s = kerneq.fixed_point(f, torch.zeros(4, 6), x, gradient=rule, tol=1e-13, max_steps=400)
        found.append(torch.autograd.grad(s.value.sin().sum(), [x, linear.weight]))
    for one, two, three in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(one, three, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("form", ["dense", "conv"])
@pytest.mark.parametrize("kernel", ["linear", "sigmoid", "gaussian"])
def test_a_cell_takes_both(form, kernel):
    cell = cell_of(form, KERNELS[kernel], norm=0.8).eval()
    x, weights = away_from_kinks(cell, form), list(cell.parameters())

    def gradients(value):
        return torch.autograd.grad((torch.linspace(-1, 1, value.numel()).view_as(value) * value).sum(), weights)

    def value(rule):
        return kerneq.Equilibrium(cell, gradient=rule, tol=1e-13, max_steps=400)(x).value

    f = cell.bind(x)
    steps = leapfrog(f, torch.zeros(f.state_shape), Reversible(12))
    pairs = [(Neumann(150), value(Implicit(tol=1e-12))), (Reversible(12), steps)]
    for rule, expected in pairs:
        for got, want in zip(gradients(value(rule)), gradients(expected), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("steps", [1, 2, 9])
def test_reversible_is_backpropagation_through_its_steps(problem, steps, dtype):
    linear, x, f = problem
    linear, x, rule = linear.to(dtype), x.detach().to(dtype).requires_grad_(), Reversible(steps)
    zero = torch.zeros_like(x)
    s = kerneq.fixed_point(f, zero, x, gradient=rule)
    expected = leapfrog(lambda z: f(z, x), zero, rule)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(s.value, expected, **tolerance)
    for got, want in zip(
        torch.autograd.grad(s.value.sin().sum(), [x, *linear.parameters()]),
        torch.autograd.grad(expected.sin().sum(), [x, *linear.parameters()]),
        strict=True,
    ):
        torch.testing.assert_close(got, want, **tolerance)


def test_the_value_is_that_of_the_same_layer_without_gradients(problem):
    _, x, f = problem
    with torch.no_grad():
        alone = kerneq.fixed_point(f, torch.zeros(4, 6), x, gradient=Reversible(8)).value
    torch.testing.assert_close(kerneq.fixed_point(f, torch.zeros(4, 6), x, gradient=Reversible(8)).value, alone)


def test_reversible_reaches_what_a_closure_computed_before(problem):
    linear, x, f = problem
    twice = 2 * x
    s = kerneq.fixed_point(lambda z: f(z, twice), torch.zeros(4, 6), gradient=Reversible(5))
    (got,) = torch.autograd.grad(s.value.sum(), x)
    expected = leapfrog(lambda z: f(z, 2 * x), torch.zeros(4, 6), Reversible(5)).sum()
    torch.testing.assert_close(got, torch.autograd.grad(expected, x)[0])


def test_memory_does_not_grow_with_the_steps(problem):
    _, x, f = problem
    sizes = []
    for steps in (3, 30):
        sizes.append(0)

        def count(t):
            sizes[-1] += t.numel()
            return t

        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            kerneq.fixed_point(f, torch.zeros(4, 6), x, gradient=Reversible(steps))
    assert sizes[0] == sizes[1]


def test_steps_that_cannot_be_taken_back_are_said_to_be(problem):
    _, x, _ = problem
    s = kerneq.fixed_point(lambda z, x: 0.1 * z + x, torch.zeros(4, 6), x, gradient=Reversible(90, 0.95))
    with pytest.warns(RuntimeWarning, match="steps back lost too many digits"):
        s.value.sum().backward()


def test_a_random_function_cannot_be_taken_back(problem):
    _, x, f = problem
    with pytest.warns(RuntimeWarning, match="draws random numbers.*FixedRandomness"):
        s = kerneq.fixed_point(
            lambda z, x: f(torch.nn.functional.dropout(z, 0.5), x), torch.zeros(4, 6), x, gradient=Reversible(8)
        )
    with pytest.warns(RuntimeWarning, match="same numbers for the same z"):
        s.value.sum().backward()


def test_second_derivatives_and_a_whole_step_are_refused(problem):
    _, x, f = problem
    with pytest.raises(ValueError, match="less than 1"):
        Reversible(3, 1.0)
    with pytest.raises(ValueError, match="terms"):
        Neumann(-1)
    s = kerneq.fixed_point(f, torch.zeros(4, 6), x, gradient=Neumann(3))
    (g,) = torch.autograd.grad(s.value.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once only"):
        g.sum().backward()


def test_solvers_do_not_matter_to_reversible(problem):
    _, x, f = problem
    values = [
        kerneq.fixed_point(f, torch.zeros(4, 6), x, gradient=Reversible(6), solver=solver).value
        for solver in (Picard(), Anderson())
    ]
    assert torch.equal(*values)


# what Broyden has learnt


def test_shine_is_nearer_than_the_jacobian_free_gradient_and_refined_by_products():
    torch.manual_seed(0)
    A = torch.randn(4, 4)
    A, b = 0.7 * A / torch.linalg.matrix_norm(A, 2), torch.randn(3, 4)
    g = torch.randn(3, 4)
    exact = torch.linalg.solve(torch.eye(4) - A.mT, g.mT).mT  # f(z) = zAᵀ + b

    def gradient(rule, solver):
        x = b.clone().requires_grad_()
        s = kerneq.fixed_point(
            lambda z, x: z @ A.mT + x, torch.zeros(3, 4), x, solver=solver, gradient=rule, tol=1e-12, max_steps=60
        )
        return torch.autograd.grad(s.value, x, g)[0]

    def error(found):
        return float((found - exact).norm() / exact.norm())

    learnt = Broyden(memory=30)
    assert error(gradient(Shine(), learnt)) < 0.7 * error(gradient(Neumann(0), learnt))
    errors = [error(gradient(Shine(k), learnt)) for k in (0, 5, 20, 80)]
    assert all(after < before for before, after in zip(errors, errors[1:], strict=False)) and errors[-1] < 1e-9
    with pytest.raises(TypeError, match="reuses what the solver `Broyden` has learnt, got Picard"):
        gradient(Shine(), Picard())
    cell = kerneq.cells.DenseCell(kerneq.kernels.Gaussian(), inputs=4, state=4, features=4)
    with pytest.raises(TypeError, match="`Shine` is for functions"):
        kerneq.Equilibrium(cell, solver=learnt, gradient=Shine())(b)
