"""The declarative view: what is minimised, that the equilibrium is where, and that both have one gradient."""

import math

import pytest
import torch
from glm_data import targets, uniform
from torch import nn
from torch.nn import functional as F

from kerneq import kglm
from kerneq.kglm.declarative import dual, minimise
from kerneq.kglm.exact import Gram
from kerneq.kglm.families import FLAT
from kerneq.kglm.newton import Problem, newton

CASES = [
    (kglm.Gaussian(0.5), FLAT),
    (kglm.Bernoulli(), kglm.Logistic()),
    (kglm.Ising(2.0), FLAT),
    (kglm.Poisson(), kglm.Normal(0.5)),
    (kglm.Rectified(), FLAT),
]


class Learnable(nn.Module):
    """A kernel that learns: variance · exp(−½‖x − x2‖²) in scaled coordinates."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 0.7], dtype=torch.float64))
        self.variance = nn.Parameter(torch.tensor(1.3, dtype=torch.float64))

    def forward(self, X, X2):
        return self.variance * kglm.SquaredExponential()(X * self.scale, X2 * self.scale)


@pytest.mark.parametrize(("family", "prior"), CASES, ids=repr)
def test_the_equilibrium_minimises_the_inner_objective_and_maximises_its_dual(family, prior):
    X, lam = 3 * uniform(12, 2), 0.3
    K, t = kglm.SquaredExponential()(X, X), family.statistic(targets(family, 4, 12))
    problem = Problem(Gram(K), t, family, lam, prior, offset=0.2 * uniform(12, seed=9))
    cell = kglm.GLMCell(K / lam, problem.offset, family, prior)
    layer = kglm.KernelEquilibrium(cell, K / lam, problem.offset, kglm.check_assumptions(K, lam, family, prior))
    eta = layer.layer(t).value.detach()
    alpha = (t - family.mean(eta) - prior.slope(eta)) / lam  # what (8) reads out
    best = problem.objective(alpha, problem.canonical(alpha))
    # the gradient of J is zero there, and J is larger elsewhere, along every direction that changes f
    free = alpha.clone().requires_grad_()
    (slope,) = torch.autograd.grad(problem.objective(free, problem.canonical(free)).sum(), free)
    assert slope.abs().max() < 1e-9
    for seed in range(5):
        other = alpha + 0.3 * (uniform(4, 12, seed=seed) - 0.5)
        assert (problem.objective(other, problem.canonical(other)) > best).all()
    # the dual is nowhere above J, meets it at the equilibrium, where its gradient is zero, and bounds the error
    free = eta.clone().requires_grad_()
    top = dual(problem, free)
    (slope,) = torch.autograd.grad(top.sum(), free)
    assert slope.abs().max() < 1e-9
    torch.testing.assert_close(top.detach(), best, rtol=0, atol=1e-9)
    for seed in range(5):
        beta, near = alpha + 0.1 * uniform(4, 12, seed=seed), eta + uniform(4, 12, seed=seed + 50) - 0.5
        gap = problem.objective(beta, problem.canonical(beta)) - dual(problem, near)
        error = ((beta - alpha) * problem.basis.lift(beta - alpha)).sum(-1)
        assert (gap >= 0.5 * lam * error).all() and (gap > 0).all()


@pytest.mark.parametrize(("family", "prior"), CASES, ids=repr)
def test_the_gradient_of_the_minimiser_is_the_declarative_one(family, prior):
    X, lam = 3 * uniform(6, 2), 0.4
    K0 = kglm.SquaredExponential(0.5)(X, X)  # definite, so that H has an inverse
    t0, m0 = family.statistic(targets(family, 1, 6)), 0.1 * uniform(6)

    def J(alpha, K, t, m):
        return Problem(Gram(K), t, family, lam, prior, m).objective(alpha[None], (alpha @ K)[None] + m)[0]

    inputs = [value.clone().requires_grad_() for value in (K0, t0, m0)]
    alpha = minimise(Problem(Gram(inputs[0]), inputs[1], family, lam, prior, inputs[2]))[0]
    v = uniform(6, seed=3)
    got = torch.autograd.grad(alpha @ v, inputs)
    # vᵀDα* = −vᵀH⁻¹B, from second derivatives of J alone
    star = alpha.detach().requires_grad_()
    H = torch.autograd.functional.hessian(lambda a: J(a, K0, t0, m0), star)
    (slope,) = torch.autograd.grad(J(star, *inputs), star, create_graph=True)
    expected = torch.autograd.grad(slope, inputs, -torch.linalg.solve(H, v))
    for mine, formula in zip(got, expected, strict=True):
        if mine.ndim == 2 and len(mine) == 6:  # of K, which is symmetric: only the symmetric part of a gradient counts
            mine, formula = mine + mine.mT, formula + formula.mT
        torch.testing.assert_close(mine, formula, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("constraint", ["minimum", "equilibrium"])
def test_gradients_reach_coordinates_targets_kernel_and_offset(constraint):
    line = nn.Linear(2, 1).double()
    kernel, Y = Learnable(), uniform(2, 5, seed=1).requires_grad_()
    node = kglm.DeclarativeNode(kernel, kglm.Rectified(), lam=8.0, offset=line, constraint=constraint)
    X, X2 = (3 * uniform(5, 2)).requires_grad_(), (3 * uniform(3, 2, seed=2)).requires_grad_()
    assert len(list(node.parameters())) == 4

    def f(X, Y, X2, *parameters):
        return node(X, Y, X2)

    assert torch.autograd.gradcheck(f, (X, Y, X2, *node.parameters()), atol=1e-6)


def test_both_constraints_are_one_function_with_one_gradient_even_for_a_singular_kernel():
    X = 3 * uniform(8, 2)
    X = torch.cat([X, X[:3]])  # three coordinates twice: K is singular, α* not unique, f* is
    X2, Y = 3 * uniform(4, 2, seed=1), targets(kglm.Bernoulli(), 3, 11)
    outputs, gradients = [], []
    for constraint in ("minimum", "equilibrium"):
        kernel = Learnable()
        node = kglm.DeclarativeNode(kernel, kglm.Bernoulli(), lam=0.1, prior=kglm.Logistic(), constraint=constraint)
        f = node(X, Y, X2)
        f.square().sum().backward()
        outputs.append(f.detach())
        gradients.append(torch.cat([kernel.scale.grad, kernel.variance.grad[None]]))
    expected = kglm.KernelGLM(kernel, kglm.Bernoulli(), lam=0.1, prior=kglm.Logistic()).fit(X, Y).canonical(X2)
    torch.testing.assert_close(outputs[0], expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(outputs[1], expected, rtol=0, atol=1e-8)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-6, atol=1e-8)


def test_the_factor_of_appendix_h_learns_with_the_kernel_that_it_scales():
    X, X2, Y = 3 * uniform(6, 2), 3 * uniform(4, 2, seed=1), targets(kglm.Bernoulli(), 3, 6)
    gradients = []
    for constraint in ("minimum", "equilibrium"):
        torch.manual_seed(0)
        kernel, factor = Learnable(), nn.Linear(2, 1).double()
        scaled = 2.0 * kglm.Scaled(kernel, factor)
        node = kglm.DeclarativeNode(scaled, kglm.Bernoulli(), lam=0.5, constraint=constraint)
        assert {*node.parameters()} == {*kernel.parameters(), *factor.parameters()}
        gradients.append(torch.autograd.grad(node(X, Y, X2).square().sum(), list(node.parameters())))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-6, atol=1e-8)
    assert all(gradient.abs().max() > 0 for gradient in gradients[0])


def test_the_minimiser_is_not_unique_where_the_kernel_is_singular_but_its_function_is():
    # the paper: "strict convexity of A [ensures] at most one minimum" of (5)
    X = torch.cat([3 * uniform(4, 1)] * 2)
    problem = Problem(Gram(kglm.SquaredExponential()(X, X)), 2 * uniform(1, 8), kglm.Gaussian(), 0.1)
    alpha = newton(problem).coefficients
    other = alpha + torch.tensor([1.0, 0, 0, 0, -1, 0, 0, 0])  # in the null space of K
    values = [problem.objective(a, problem.canonical(a)) for a in (alpha, other)]
    torch.testing.assert_close(*values, rtol=0, atol=1e-12)
    torch.testing.assert_close(problem.canonical(alpha), problem.canonical(other), rtol=0, atol=1e-12)


@pytest.mark.parametrize("constraint", ["minimum", "equilibrium"])
@pytest.mark.parametrize("family", [kglm.Bernoulli(), kglm.Poisson()], ids=repr)
def test_every_data_set_may_have_coordinates_of_its_own(family, constraint):
    X, X2, Y = 3 * uniform(3, 7, 2), 3 * uniform(3, 4, 2, seed=1), targets(family, 3, 7)
    node = kglm.DeclarativeNode(kglm.SquaredExponential(), family, lam=0.2, constraint=constraint)
    got = node(X, Y, X2)
    for s in range(3):
        alone = kglm.KernelGLM(kglm.SquaredExponential(), family, lam=0.2).fit(X[s], Y[s]).canonical(X2[s])
        torch.testing.assert_close(got[s].detach(), alone, rtol=0, atol=1e-8)


def test_problems_6_and_9_have_one_value_and_one_gradient_in_gamma_and_3_starts_there():
    X, X2 = 3 * uniform(9, 2), 3 * uniform(4, 2, seed=1)
    Y, Y2 = targets(kglm.Bernoulli(), 6, 9), uniform(6, 2, seed=4)
    head = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    values, gradients = [], []
    for constraint in ("minimum", "equilibrium"):
        node = kglm.DeclarativeNode(kglm.Matern(), kglm.Bernoulli(), lam=0.3, constraint=constraint)
        value = F.mse_loss(head(node(X, Y, X2)), Y2)
        values.append(value)
        gradients.append(torch.autograd.grad(value, list(head.parameters())))
    layer = node.layer(X, X2)  # Corollary 6: weights that are parameters
    value = F.mse_loss(head(layer(Y)), Y2)
    values.append(value)
    gradients.append(torch.autograd.grad(value, list(head.parameters()), retain_graph=True))
    for other, gradient in zip(values[1:], gradients[1:], strict=True):
        torch.testing.assert_close(other, values[0], rtol=0, atol=1e-9)
        torch.testing.assert_close(gradient, gradients[0], rtol=0, atol=1e-8)
    value.backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in layer.parameters())


def test_the_limits_of_a_large_and_a_small_lambda():
    X, X2, Y = 6 * uniform(7, 1), 6 * uniform(3, 1, seed=1), uniform(2, 7, seed=2)
    offset = lambda x: 0.3 * x[:, 0]  # noqa: E731

    def node(lam, family):
        return kglm.DeclarativeNode(kglm.Matern(0.5), family, lam=lam, offset=offset)

    # λ → ∞: the prior alone, and to first order one gradient step, f = m + k(X2, X)(T − A′(m))/λ
    family, lam = kglm.Rectified(), 1e6
    step = (Y - family.mean(offset(X))) @ kglm.Matern(0.5)(X, X2)
    torch.testing.assert_close(lam * (node(lam, family)(X, Y, X2) - offset(X2)), step, rtol=1e-4, atol=1e-6)
    # λ → 0, definite K: the data alone, A′(f) = T
    torch.testing.assert_close(node(1e-10, kglm.Gaussian())(X, Y, X), Y, rtol=0, atol=1e-7)
    torch.testing.assert_close(family.mean(node(1e-9, family)(X, 1 + Y, X)), 1 + Y, rtol=0, atol=1e-6)


def test_requests_that_cannot_be_met_are_answered_in_words():
    with pytest.raises(ValueError, match="minimum, equilibrium"):
        kglm.DeclarativeNode(kglm.Matern(), kglm.Gaussian(), lam=1.0, constraint="maximum")
    node = kglm.DeclarativeNode(kglm.Matern(), kglm.Gaussian(), lam=1.0)
    with pytest.raises(ValueError, match="one entry for each of the 2 data sets"):
        node(uniform(5, 1), uniform(2, 5), uniform(2, 3, 1))
    with pytest.raises(ValueError, match="with n = 5"):
        node(uniform(5, 1), uniform(2, 4), uniform(3, 1))
    with pytest.raises(ValueError, match=r"both \(n, d\).*got \(5, 1\) and \(3, 2\)"):
        node(uniform(5, 1), uniform(2, 5), uniform(3, 2))


def test_an_inner_problem_that_was_not_solved_says_so():
    # A is flat at the start, so Newton's first steps are far too long
    steep = kglm.Custom(lambda eta: (eta - 1e4).clamp(min=0).pow(4) / 4)
    X, Y = uniform(4, 1), torch.full((1, 4), 1e12, dtype=torch.float64)
    with pytest.warns(RuntimeWarning, match="was not solved"):
        node = kglm.DeclarativeNode(kglm.SquaredExponential(), steep, lam=1e-12)
        assert not math.isnan(node(X, Y, X).sum().item())


def test_appendix_c_its_stationarity_is_right_its_objective_lacks_t_and_a_small_kernel_is_not_enough():
    t, lam = 2.0, 0.3
    X, Y = 3 * uniform(6, 1), targets(kglm.Ising(), 1, 6)
    k = kglm.SquaredExponential()(X, X)
    alpha = kglm.KernelGLM(kglm.SquaredExponential(), kglm.Ising(t), lam=lam).fit(X, Y).result.coefficients[0]
    K = k / t  # as the appendix writes it; f = tKα
    condition = K @ (-Y[0] + torch.tanh(K @ alpha) + t * lam * alpha)  # (12)
    assert condition.abs().max() < 1e-9
    z = torch.tanh(K @ alpha)
    torch.testing.assert_close(z, torch.tanh(K @ (Y[0] - z) / (t * lam)), rtol=0, atol=1e-9)  # (14)
    displayed = K @ (-Y[0] + torch.tanh(K @ alpha) + lam * alpha)  # the gradient of the objective above (12)
    assert displayed.abs().max() > 0.1
    # "uniqueness … if the norm of K is at most 1": tλ = 0.1 with K = 1 makes plain iteration of (14) run in circles
    state = torch.zeros((), dtype=torch.float64)
    for _ in range(500):
        before, state = state, torch.tanh((1 - state) / 0.1)
    assert (state - before).abs() > 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_layer_of_small_lambda_is_solved_directly_and_so_is_its_gradient(dtype):
    # L = 6000: the certified step of relaxed iteration would be 1/3000 (tens of thousands of steps)
    X, Y = (3 * uniform(20, 1)).to(dtype), uniform(4, 20, seed=1).to(dtype)
    glm = kglm.KernelGLM(kglm.SquaredExponential(0.3), kglm.Gaussian(), lam=1e-3).fit(X.double(), Y.double())
    layer = kglm.KernelGLM(kglm.SquaredExponential(0.3), kglm.Gaussian(), lam=1e-3).layer(X, X)
    assert layer.guarantee.lipschitz > 5000
    f = layer(Y)
    torch.testing.assert_close(f.detach().double(), glm.canonical(), rtol=0, atol=1e-9 if dtype.itemsize == 8 else 1e-3)
    f.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


@pytest.mark.parametrize("outer", [torch.sum, lambda f: f.square().sum()], ids=["linear loss", "curved loss"])
def test_the_minimum_is_differentiated_once_and_says_so(outer):
    X, X2, Y = uniform(6, 1).requires_grad_(), uniform(3, 1, seed=1), uniform(1, 6, seed=2)
    node = kglm.DeclarativeNode(kglm.SquaredExponential(0.5), kglm.Gaussian(), lam=0.3)
    (first,) = torch.autograd.grad(outer(node(X, Y, X2)), X, create_graph=True)  # asking for a graph alone is no error
    (once,) = torch.autograd.grad(outer(node(X, Y, X2)), X)
    torch.testing.assert_close(first, once)
    with pytest.raises(RuntimeError, match="differentiated once only.*equilibrium"):
        torch.autograd.grad(first.square().sum(), X)


def test_the_equilibrium_constraint_has_the_second_derivatives_of_kernel_ridge_regression():
    X, X2, Y = uniform(6, 1), uniform(3, 1, seed=1), uniform(1, 6, seed=2)
    kernel, lam = kglm.SquaredExponential(0.5), 0.3
    node = kglm.DeclarativeNode(kernel, kglm.Gaussian(), lam=lam, constraint="equilibrium")

    def ridge(X: torch.Tensor) -> torch.Tensor:
        return (
            (kernel(X2, X) @ torch.linalg.solve(kernel(X, X) + lam * torch.eye(6, dtype=X.dtype), Y[0])).square().sum()
        )

    got = torch.autograd.functional.hessian(lambda X: node(X, Y, X2).square().sum(), X)
    torch.testing.assert_close(got, torch.autograd.functional.hessian(ridge, X), rtol=1e-6, atol=1e-8)
