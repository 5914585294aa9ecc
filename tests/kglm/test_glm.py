"""KernelGLM against scikit-learn, statsmodels and itself."""

import dataclasses
import warnings

import numpy as np
import pytest
import torch
from glm_data import CASES, FAMILIES, targets
from mnist import error_bound
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process import kernels as sk
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import LogisticRegression, PoissonRegressor

from kerneq import kglm
from kerneq.kglm import exact, kernels
from kerneq.kglm.exact import Gram
from kerneq.kglm.families import FLAT
from kerneq.kglm.newton import Problem, newton


def line(n=30, seed=0):
    g = torch.Generator().manual_seed(seed)
    X = torch.rand(n, 1, generator=g, dtype=torch.float64) * 6
    return X, torch.sin(X[:, 0]) + 0.3 * torch.randn(n, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("lam", [1e-3, 0.1, 10.0])
def test_the_gaussian_kernel_glm_is_scikit_learns_kernel_ridge(lam):
    X, y = line()
    X2 = torch.linspace(-1, 7, 25, dtype=torch.float64)[:, None]
    ours = kglm.KernelGLM(kernels.SquaredExponential(0.8), kglm.Gaussian(), lam=lam).fit(X, y).predict(X2)
    theirs = KernelRidge(alpha=lam, kernel="rbf", gamma=0.5 / 0.8**2).fit(X.numpy(), y.numpy()).predict(X2.numpy())
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=0, atol=1e-8)


def test_the_gaussian_posterior_is_the_gaussian_process_posterior():
    X, y = line()
    X2, lam = torch.linspace(-1, 7, 25, dtype=torch.float64)[:, None], 0.2
    glm = kglm.KernelGLM(kernels.Matern(0.9, 2.5), kglm.Gaussian(), lam=lam).fit(X, y)
    gp = GaussianProcessRegressor(
        sk.ConstantKernel(1 / lam, "fixed") * sk.Matern(0.9, "fixed", nu=2.5), alpha=1.0, optimizer=None
    ).fit(X.numpy(), y.numpy())
    mean, cov = gp.predict(X2.numpy(), return_cov=True)
    posterior = glm.posterior(X2)
    np.testing.assert_allclose(posterior.mode.numpy(), mean, rtol=0, atol=1e-8)
    np.testing.assert_allclose(posterior.covariance.numpy(), cov, rtol=0, atol=1e-8)
    base = -0.5 * (y.square().sum() + len(y) * np.log(2 * np.pi))
    np.testing.assert_allclose((glm.log_evidence() + base).item(), gp.log_marginal_likelihood_value_, rtol=1e-9)


def test_predictions_are_in_the_units_of_the_targets():
    X, y = line()
    kernel, lam, noise = kernels.SquaredExponential(0.8), 0.2, 4.0
    glm = kglm.KernelGLM(kernel, kglm.Gaussian(noise), lam=lam).fit(X, y)
    theirs = (
        KernelRidge(alpha=lam * noise, kernel="rbf", gamma=0.5 / 0.8**2).fit(X.numpy(), y.numpy()).predict(X.numpy())
    )
    posterior = glm.posterior(X)
    middle = sum(posterior.interval()) / 2
    for found in (glm.predict(X), posterior.mean, middle, glm.as_equilibrium().mean(y[None]).detach()[0]):
        np.testing.assert_allclose(found.numpy(), theirs, rtol=0, atol=1e-8)
    # spins at temperature t are logistic regression on (y + 1)/2 with 2η/t
    spins = kglm.KernelGLM(kernel, kglm.Ising(2.0), lam=lam).fit(X, y.sign())
    logistic = kglm.KernelGLM(kernel, kglm.Bernoulli(), lam=lam).fit(X, (y > 0).double())
    np.testing.assert_allclose(spins.predict().numpy(), 2 * logistic.predict().numpy() - 1, rtol=0, atol=1e-10)


def test_logistic_regression_with_a_linear_kernel_is_scikit_learns():
    g = torch.Generator().manual_seed(1)
    X = torch.randn(80, 4, generator=g, dtype=torch.float64)
    y = (X @ torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=torch.float64) + torch.randn(80, generator=g) > 0).double()
    glm = kglm.KernelGLM(kernels.DotProduct(), kglm.Bernoulli(), lam=0.5).fit(X, y)
    theirs = LogisticRegression(C=2.0, fit_intercept=False, solver="newton-cholesky", tol=1e-14, max_iter=1000)
    theirs.fit(X.numpy(), y.numpy())
    beta = X.mT @ glm.result.coefficients[0]
    np.testing.assert_allclose(beta.numpy(), theirs.coef_[0], rtol=0, atol=1e-8)
    np.testing.assert_allclose(glm.predict(X).numpy(), theirs.predict_proba(X.numpy())[:, 1], rtol=0, atol=1e-8)


def test_logistic_regression_with_a_linear_kernel_is_statsmodels():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sm = pytest.importorskip("statsmodels.api")
    g = torch.Generator().manual_seed(2)
    X = torch.randn(60, 3, generator=g, dtype=torch.float64)
    y = (X[:, 0] + torch.randn(60, generator=g) > 0).double()
    lam = 0.3
    glm = kglm.KernelGLM(kernels.DotProduct(), kglm.Bernoulli(), lam=lam).fit(X, y)
    # statsmodels' elastic net with L1_wt = 0 divides the loss by n; started at our answer it must stay there
    beta = (X.mT @ glm.result.coefficients[0]).numpy()
    model = sm.GLM(y.numpy(), X.numpy(), family=sm.families.Binomial())
    fit = model.fit_regularized(alpha=lam / 60, L1_wt=0.0, maxiter=500)
    np.testing.assert_allclose(beta, fit.params, rtol=0, atol=1e-4)  # its optimiser stops at 1e-5 by itself
    score = model.score(beta) - lam * beta  # the exact statement: ours is the root of its score equation
    np.testing.assert_allclose(score, 0, atol=1e-8)


def test_poisson_regression_with_a_linear_kernel_is_scikit_learns():
    g = torch.Generator().manual_seed(3)
    X = 0.5 * torch.randn(70, 3, generator=g, dtype=torch.float64)
    y = torch.poisson((X[:, 0] + 1).exp(), generator=g)
    glm = kglm.KernelGLM(kernels.DotProduct(), kglm.Poisson(), lam=0.7).fit(X, y)
    theirs = PoissonRegressor(alpha=0.7 / 70, fit_intercept=False, solver="newton-cholesky", tol=1e-12, max_iter=500)
    np.testing.assert_allclose(
        (X.mT @ glm.result.coefficients[0]).numpy(), theirs.fit(X.numpy(), y.numpy()).coef_, rtol=0, atol=1e-8
    )


@pytest.mark.parametrize(("family", "factor"), CASES, ids=repr)
@pytest.mark.parametrize("lam", [1e-4, 1.0])
def test_newton_converges_from_zero_and_its_objective_never_rises(family, factor, lam):
    X, _ = line(25)
    glm = kglm.KernelGLM(kernels.SquaredExponential(0.5), family, lam=lam, prior=factor).fit(X, targets(family, 3, 25))
    fit = glm.result
    assert fit.converged.all(), fit.residual
    rounding = 1e-12 * fit.objective.abs().max()
    assert (fit.objective.diff(dim=0) <= rounding).all()


def test_a_fit_that_stops_before_the_minimum_says_so():
    X = torch.linspace(-3, 3, 40, dtype=torch.float64)
    counts = (8 + 2 * X.sin()).exp().round()  # at λ = 10⁻¹² r/λ is a number of 10¹⁶, and a step its rounding
    with pytest.warns(RuntimeWarning, match="was not solved: worst residual .* Raise `lam`"):
        kglm.KernelGLM(kernels.Matern(1.0, 0.5), kglm.Poisson(), lam=1e-12).fit(X, counts)
    # separable classes need more steps the smaller λ is, and rounding alone is no reason to warn
    for scale in (0.1, 0.3):
        glm = kglm.KernelGLM(kernels.SquaredExponential(scale), kglm.Bernoulli(), lam=1e-10)
        glm.fit(X, ((5 * X).sin() > 0).double())
        assert glm.problem.residual(glm.result.coefficients, glm.result.eta).norm() < 1e-8 * glm.problem.t.norm()


def test_newton_does_not_diverge_where_the_undamped_method_does():
    # counts of 10⁶ from η = 0: the first full Newton step asks for e^{10⁶}
    X, y = torch.zeros(1, 1, dtype=torch.float64), torch.tensor([1e6], dtype=torch.float64)
    glm = kglm.KernelGLM(kernels.Constant(), kglm.Poisson(), lam=1e-3).fit(X, y, max_steps=200)
    assert glm.result.converged.all()
    # the optimality condition itself, y − e^η = λη
    eta = glm.canonical()
    torch.testing.assert_close(y - eta.exp(), 1e-3 * eta, rtol=1e-8, atol=1e-6)
    assert (glm.result.objective.diff(dim=0) <= 1e-12 * glm.result.objective.abs().max()).all()


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
def test_one_factor_for_all_data_sets_serves_as_well_as_one_for_each(family, monkeypatch):
    X, _ = line(25)
    kernel, Y = kernels.SquaredExponential(0.5), targets(family, 3, 25)
    direct = kglm.KernelGLM(kernel, family, lam=0.5).fit(X, Y)
    monkeypatch.setattr(exact, "FACTORS", 0)
    inner = kglm.KernelGLM(kernel, family, lam=0.5).fit(X, Y)
    torch.testing.assert_close(inner.canonical(), direct.canonical(), rtol=0, atol=1e-9)


@pytest.mark.parametrize(("family", "factor"), CASES, ids=repr)
def test_the_error_bound_holds_for_any_alpha_whatever_the_kernel(family, factor):
    X, _ = line(25)
    glm = kglm.KernelGLM(kernels.SquaredExponential(2.0), family, lam=0.05, prior=factor).fit(X, targets(family, 3, 25))
    problem = glm.problem  # singular to rounding, ‖K/λ‖ ≈ 300: neither assumption of the paper holds
    norm = torch.linalg.matrix_norm(problem.basis.K, 2).item()
    g = torch.Generator().manual_seed(0)
    for size in (1e-6, 1e-2, 1.0):
        alpha = glm.result.coefficients + size * torch.randn(problem.t.shape, generator=g, dtype=torch.float64)
        eta = problem.canonical(alpha)
        bound = error_bound(problem, alpha, eta, norm)
        assert ((eta - glm.result.eta).norm(dim=-1) <= bound + 1e-9).all()


def test_an_offset_moves_the_canonical_parameter_as_appendix_h_says():
    X, y = line()
    offset = lambda x: 2 + x[:, 0]  # noqa: E731
    X2 = torch.linspace(0, 6, 9, dtype=torch.float64)[:, None]
    kernel = kernels.SquaredExponential(0.7)
    moved = kglm.KernelGLM(kernel, kglm.Gaussian(), lam=0.1, offset=offset).fit(X, y).predict(X2)
    plain = kglm.KernelGLM(kernel, kglm.Gaussian(), lam=0.1).fit(X, y - offset(X)).predict(X2)
    torch.testing.assert_close(moved, plain + offset(X2), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("family", "prior"), [(kglm.Poisson(), kglm.Normal(0.5)), (kglm.Bernoulli(), FLAT)])
def test_a_scaled_kernel_multiplies_the_function_as_appendix_h_says(family, prior):
    """f = k₀(·, X)β minimises 1ᵀ(A + Q)(η) − ηᵀT + ½λβᵀK₀β, η = s(X)f(X) + m(X), if λβ = s(T − A′(η) − Q′(η))."""
    X, _ = line(20)
    X2, T, lam = torch.linspace(0, 6, 9, dtype=torch.float64)[:, None], targets(family, 20), 0.7
    offset, scale = lambda x: 1 - 0.5 * x[:, 0], lambda x: x[:, 0].cos()
    kernel = kglm.Matern(0.8)
    glm = kglm.KernelGLM(kglm.Scaled(kernel, scale), family, lam=lam, prior=prior, offset=offset).fit(X, T)
    eta = glm.canonical()
    beta = scale(X) * (T - family.mean(eta) - prior.slope(eta)) / lam
    for points in (X, X2):
        wanted = scale(points) * (kernel(points, X) @ beta) + offset(points)
        torch.testing.assert_close(glm.canonical(points), wanted, rtol=0, atol=1e-9)
        torch.testing.assert_close(glm.as_equilibrium(points)(T[None])[0].detach(), wanted, rtol=0, atol=1e-7)
    constant = kglm.KernelGLM(kglm.Scaled(kernel, lambda x: x.new_full((len(x), 1), 2.0)), family, lam=lam)
    torch.testing.assert_close(
        constant.fit(X, T).predict(X2), kglm.KernelGLM(4.0 * kernel, family, lam=lam).fit(X, T).predict(X2)
    )


def test_a_batch_of_targets_is_fitted_as_one_by_one():
    X, _ = line(20)
    Y = targets(kglm.Bernoulli(), 4, 20)
    kernel = kernels.Matern(0.5, 0.5)
    together = kglm.KernelGLM(kernel, kglm.Bernoulli(), lam=0.2).fit(X, Y)
    for row, y in enumerate(Y):
        alone = kglm.KernelGLM(kernel, kglm.Bernoulli(), lam=0.2).fit(X, y)
        torch.testing.assert_close(together.canonical()[row], alone.canonical(), rtol=0, atol=1e-10)


def test_a_fit_is_of_the_numbers_it_was_given_whatever_becomes_of_them():
    X, _ = line(12)
    Y = targets(kglm.Poisson(), 12)
    X2 = torch.linspace(0, 6, 5, dtype=torch.float64)[:, None]
    glm = kglm.KernelGLM(kernels.SquaredExponential(0.5), kglm.Poisson(), lam=2.0).fit(X, Y)
    before = glm.predict(X2), glm.posterior(X2).covariance, glm.as_equilibrium().guarantee.contraction
    X.mul_(2)
    Y.add_(3)
    after = glm.predict(X2), glm.posterior(X2).covariance, glm.as_equilibrium().guarantee.contraction
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_the_interval_covers_the_mean_and_widens_away_from_the_data():
    X, _ = line(20)
    glm = kglm.KernelGLM(kernels.SquaredExponential(0.5), kglm.Bernoulli(), lam=0.2)
    glm.fit(X, targets(kglm.Bernoulli(), 20))
    posterior = glm.posterior(torch.tensor([[X.median()], [30.0]], dtype=torch.float64))
    low, high = posterior.interval(0.9)
    assert (low < posterior.mean).all() and (posterior.mean < high).all()
    assert posterior.deviation[1] > posterior.deviation[0]
    torch.testing.assert_close(posterior.deviation[1].square(), torch.tensor(5.0, dtype=torch.float64))


def test_misuse_is_answered_in_words():
    X, y = line()
    with pytest.raises(ValueError, match="`lam` must be positive"):
        kglm.KernelGLM(kernels.DotProduct(), kglm.Gaussian(), lam=0.0)
    with pytest.raises(RuntimeError, match="call `fit"):
        kglm.KernelGLM(kernels.DotProduct(), kglm.Gaussian(), lam=1.0).predict(X)
    with pytest.raises(ValueError, match="n = 30"):
        kglm.KernelGLM(kernels.DotProduct(), kglm.Gaussian(), lam=1.0).fit(X, y[:5])
    with pytest.raises(TypeError, match="callable as k"):
        kglm.KernelGLM("rbf", kglm.Gaussian(), lam=1.0)
    plane = kglm.KernelGLM(kernels.Matern(), kglm.Gaussian(), lam=1.0).fit(torch.cat((X, X), 1), y)
    for ask in (plane.predict, plane.posterior, plane.as_equilibrium):
        with pytest.raises(ValueError, match=r"must be \(m, 2\), as the others are, got shape \(2,\): pass a single"):
            ask(torch.zeros(2))
    with pytest.raises(ValueError, match=r"must be \(m, 1\), .*got shape \(5, 2\)"):
        kglm.KernelGLM(kernels.Matern(), kglm.Gaussian(), lam=1.0).fit(X, y).predict(torch.zeros(5, 2))
    indefinite = lambda a, b: -kernels.SquaredExponential()(a, b)  # noqa: E731
    with pytest.raises(ValueError, match="not positive semi-definite"):
        kglm.KernelGLM(indefinite, kglm.Gaussian(), lam=0.1).fit(X, y)
    with pytest.raises(ValueError, match="flat factor"):
        kglm.KernelGLM(kernels.DotProduct(), kglm.Gaussian(), lam=1.0, prior=kglm.Normal(1.0)).fit(X, y).log_evidence()


def test_an_objective_that_overflows_is_infinite_and_not_the_largest_number():
    K, eta = torch.eye(2, dtype=torch.float64), torch.full((1, 2), 1e3, dtype=torch.float64)
    problem = Problem(Gram(K), torch.ones(1, 2, dtype=torch.float64), kglm.Poisson(), lam=0.1)
    assert problem.objective(eta, eta).tolist() == [torch.inf]
    with pytest.raises(ValueError, match="not finite at the start"):
        newton(dataclasses.replace(problem, offset=eta))
