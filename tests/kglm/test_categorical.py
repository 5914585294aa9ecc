"""The Categorical family, samples with weights and offsets, and fits whose numbers cannot be trusted."""

import numpy as np
import pytest
import torch
from glm_data import FAMILIES, targets, uniform
from sklearn.linear_model import LogisticRegression

from kerneq import kglm
from kerneq.kglm.declarative import dual

KERNEL = kglm.Matern(0.5)


def labels(*shape, classes=3, seed=5):
    return (uniform(*shape, seed=seed) * classes).floor()


def minimise_by_lbfgs(K, Y, lam, weights=None, offset=0.0):
    """An independent reference: the coefficients by PyTorch's L-BFGS on the loss itself."""
    alpha = torch.zeros(len(K), int(Y.max()) + 1, dtype=K.dtype, requires_grad=True)
    best = torch.optim.LBFGS(
        [alpha], max_iter=500, tolerance_grad=1e-13, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def loss():
        best.zero_grad()
        eta = K @ alpha + offset
        each = torch.nn.functional.cross_entropy(eta, Y.long(), reduction="none")
        value = (each if weights is None else weights * each).sum() + 0.5 * lam * (alpha * (K @ alpha)).sum()
        value.backward()
        return value

    best.step(loss)
    return (K @ alpha + offset).detach()


def test_classes_with_a_linear_kernel_are_scikit_learns_multinomial_regression():
    X = 2 * uniform(60, 3, seed=1) - 1
    Y = (X @ torch.tensor([[2.0, 0, -1], [0, 1, 1], [1, -1, 0]], dtype=X.dtype) + uniform(60, 3)).argmax(1)
    glm = kglm.KernelGLM(kglm.DotProduct(), kglm.Categorical(), lam=0.5).fit(X, Y)
    theirs = LogisticRegression(C=2.0, fit_intercept=False, solver="newton-cg", tol=1e-12, max_iter=1000)
    theirs.fit(X.numpy(), Y.numpy())
    np.testing.assert_allclose(glm.predict(X).numpy(), theirs.predict_proba(X.numpy()), rtol=0, atol=1e-6)
    assert (
        glm.result.converged.all()
        and glm.problem.residual(glm.result.coefficients, glm.result.eta).norm() < 1e-12 * 60**0.5
    )


@pytest.mark.parametrize("lam", [0.1, 1.0])
def test_classes_weights_and_offsets_are_what_another_optimiser_finds(lam):
    X, Y, c = 3 * uniform(12, 1), labels(12), 2 * uniform(12, seed=2)
    K = KERNEL(X, X)
    found = kglm.KernelGLM(KERNEL, kglm.Categorical(), lam=lam).fit(X, Y).canonical()
    torch.testing.assert_close(found, minimise_by_lbfgs(K, Y, lam), rtol=0, atol=1e-5)
    found = kglm.KernelGLM(KERNEL, kglm.Categorical(), lam=lam, offset=lambda x: torch.cat([x, -x, 0 * x], 1))
    found = found.fit(X, Y, weights=c).canonical()
    wanted = minimise_by_lbfgs(K, Y, lam, c, torch.cat([X, -X, 0 * X], 1))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_two_classes_are_the_bernoulli_family_with_twice_the_kernel():
    """f₁ − f₀ has the prior of √2 f, and f₀ + f₁ = 0."""
    X, X2, Y = 3 * uniform(30, 1), 3 * uniform(7, 1, seed=3), labels(30, classes=2)
    two = kglm.KernelGLM(KERNEL, kglm.Categorical(), lam=0.3).fit(X, Y)
    one = kglm.KernelGLM(2.0 * KERNEL, kglm.Bernoulli(), lam=0.3).fit(X, Y)
    torch.testing.assert_close(two.predict(X2)[:, 1], one.predict(X2), rtol=0, atol=1e-10)
    torch.testing.assert_close(two.canonical(X2).sum(1), torch.zeros(7, dtype=X.dtype), rtol=0, atol=1e-10)
    torch.testing.assert_close(two.log_evidence(), one.log_evidence(), rtol=1e-9, atol=0)


def test_newtons_step_is_that_of_the_dense_hessian():
    X, Y, c = 3 * uniform(6, 1), labels(1, 6), 0.5 + uniform(6, seed=2)
    problem = kglm.KernelGLM(KERNEL, kglm.Categorical(), lam=0.2).pose(X, Y, c)
    eta = uniform(1, 6, 3, seed=4)
    residual = problem.residual(uniform(1, 6, 3, seed=6), eta)
    second = torch.func.jacrev(problem.family.mean)(eta[0]).reshape(18, 18)
    K = torch.kron(problem.basis.K, torch.eye(3, dtype=X.dtype))
    wanted = torch.linalg.solve(0.2 * torch.eye(18, dtype=X.dtype) + second @ K, residual.flatten())
    torch.testing.assert_close(problem.basis.solve(problem.curvature(eta), 0.2, residual).flatten(), wanted)
    log_det = torch.linalg.slogdet(torch.eye(18, dtype=X.dtype) + K @ second / 0.2).logabsdet
    zero = torch.zeros(1, dtype=X.dtype)
    torch.testing.assert_close(problem.log_evidence(eta, zero)[0], -0.5 * log_det)


@pytest.mark.parametrize("lam", [0.05, 0.5, 20.0])
def test_theorem_3_holds_for_vectors(lam):
    """The equilibrium z = softmax(K(T − z)/λ + m) is the kernel GLM: plain, relaxed iteration and Newton's method."""
    X, X2, Y = 3 * uniform(20, 1), 3 * uniform(5, 1, seed=3), labels(4, 20)
    Y[:, 0] = 2
    offset = lambda x: torch.cat([x, -x, 0 * x], 1)  # noqa: E731
    glm = kglm.KernelGLM(KERNEL, kglm.Categorical(), lam=lam, offset=offset).fit(X, Y)
    layer = glm.as_equilibrium(X2)
    torch.testing.assert_close(layer(Y).detach(), glm.canonical(X2), rtol=0, atol=1e-8)
    torch.testing.assert_close(layer.mean(Y).detach(), glm.predict(X2), rtol=0, atol=1e-8)
    z, T = layer.embed(Y).detach(), torch.nn.functional.one_hot(Y.long(), 3).double()
    fixed = (glm.kernel(X, X) @ (T - z) / lam + offset(X)).softmax(-1)
    torch.testing.assert_close(z, fixed, rtol=0, atol=1e-8)
    assert layer.guarantee.lipschitz == pytest.approx(0.5 * torch.linalg.matrix_norm(KERNEL(X, X), 2).item() / lam)
    problem, fit = glm.problem, glm.result
    torch.testing.assert_close(dual(problem, fit.eta), fit.objective[-1])  # no gap at the solution
    layer(Y).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_the_curvature_of_softmax_is_at_most_a_half():
    p = torch.cat([uniform(200, 5).log(), torch.tensor([[0.0, 0, -50, -50, -50]], dtype=torch.float64)]).softmax(-1)
    largest = torch.linalg.eigvalsh(torch.diag_embed(p) - p[:, :, None] * p[:, None]).amax()
    assert largest == pytest.approx(0.5) and kglm.Categorical(5).variance_range() == (0.0, 0.5)


def test_a_node_of_classes_learns_its_kernel():
    X, X2, Y = uniform(8, 1), uniform(3, 1, seed=1), labels(2, 8)
    Y[:, 0] = 2
    for constraint in ("minimum", "equilibrium"):
        X.requires_grad_()
        node = kglm.DeclarativeNode(KERNEL, kglm.Categorical(3), lam=0.3, constraint=constraint)
        assert torch.autograd.gradcheck(lambda x, node=node: node(x, Y, X2), X, atol=1e-5)


@pytest.mark.parametrize("family", [*FAMILIES, kglm.Categorical(3)], ids=repr)
def test_a_weight_counts_a_sample_as_often_as_repeating_it(family):
    X, X2 = 3 * uniform(12, 1), 3 * uniform(5, 1, seed=3)
    Y = labels(12) if isinstance(family, kglm.Categorical) else targets(family, 12)
    c = torch.tensor([1.0, 2, 0, 3] * 3)
    often = c.long()
    weighted = kglm.KernelGLM(KERNEL, family, lam=0.5).fit(X, Y, weights=c, offset=X[:, 0])
    repeated = kglm.KernelGLM(KERNEL, family, lam=0.5)
    X3, Y3 = X.repeat_interleave(often, 0), Y.repeat_interleave(often)
    repeated.fit(X3, Y3, offset=X3[:, 0])
    wanted = repeated.canonical(X2, offset=X2[:, 0])
    torch.testing.assert_close(weighted.canonical(X2, offset=X2[:, 0]), wanted, rtol=0, atol=1e-8)
    rows = often > 0
    at_inner = weighted.as_equilibrium()(Y[None])[0].detach()
    torch.testing.assert_close(at_inner[rows], weighted.canonical()[rows], rtol=0, atol=1e-7)


def test_a_fit_of_float32_data_is_that_of_the_same_numbers_in_float64():
    X, Y = (6 * uniform(60, 1)).float(), targets(kglm.Bernoulli(), 60).float()
    for lam in (1.0, 1e-5, 1e-7):
        narrow = kglm.KernelGLM(kglm.SquaredExponential(0.8), kglm.Bernoulli(), lam=lam).fit(X, Y).predict(X)
        wide = kglm.KernelGLM(kglm.SquaredExponential(0.8), kglm.Bernoulli(), lam=lam).fit(X.double(), Y.double())
        assert narrow.dtype == torch.float32
        torch.testing.assert_close(narrow.double(), wide.predict(), rtol=0, atol=1e-6)


# max |η − η*| of these fits against 60 digits (mpmath), measured once: kernel, family, λ, error
UNCERTAIN = [
    (kglm.SquaredExponential(0.3), "bernoulli", 1e-10, 3.1e-1),
    (kglm.SquaredExponential(2.0), "bernoulli", 1e-10, 1.3e-5),
    (kglm.SquaredExponential(2.0), "poisson", 1e-10, 2.5e-6),
    (kglm.SquaredExponential(2.0), "poisson", 1e-14, 2.5),
    (kglm.SquaredExponential(2.0), "gaussian", 1e-14, 2.6e-6),
    (kglm.Matern(1.0, 0.5), "poisson", 1e-14, 2.2),
    (1e10 * kglm.DotProduct(), "bernoulli", 1e-2, 6.9e-4),
    (1e10 * kglm.DotProduct(), "gaussian", 1e-2, 5.6e-4),
]


@pytest.mark.filterwarnings("ignore:The inner problem was not solved")
@pytest.mark.parametrize(("kernel", "name", "lam", "error"), UNCERTAIN)
def test_the_estimate_of_what_rounding_leaves_is_within_some_ten_times_of_the_truth(kernel, name, lam, error):
    X = torch.linspace(-3, 3, 16, dtype=torch.float64)
    family, Y = {
        "bernoulli": (kglm.Bernoulli(), ((5 * X).sin() > 0).double()),
        "poisson": (kglm.Poisson(), (4 + 2 * X.sin()).exp().round()),
        "gaussian": (kglm.Gaussian(), X.sin()),
    }[name]
    found = kglm.KernelGLM(kernel, family, lam=lam).fit(X, Y).result.error.item()
    assert error / 30 < found < 30 * error


def test_a_fit_that_rounding_spoils_warns_in_float64_too():
    """Counts at coordinates of 10⁵: K/λ is 10¹², and no digit of the answer is left."""
    X = torch.linspace(-3, 3, 16, dtype=torch.float64)
    with pytest.warns(RuntimeWarning, match="was not solved.*Raise `lam`"):
        kglm.KernelGLM(kglm.DotProduct(), kglm.Poisson(), lam=1e-2).fit(1e5 * X, (4 + 2 * X.sin()).exp().round())
    with pytest.warns(RuntimeWarning, match="rounding leaves about .* of η .* uncertain"):
        kglm.KernelGLM(1e10 * kglm.DotProduct(), kglm.Bernoulli(), lam=1e-2).fit(X, ((5 * X).sin() > 0).double())


def test_bad_classes_weights_and_numbers_are_answered_in_words():
    X, Y = uniform(6, 1), labels(6)
    glm = kglm.KernelGLM(KERNEL, kglm.Categorical(), lam=1.0)
    with pytest.raises(ValueError, match="two classes at least"):
        glm.fit(X, 0 * Y)
    with pytest.raises(ValueError, match="whole numbers from 0 to 1, got 2"):
        kglm.KernelGLM(KERNEL, kglm.Categorical(2), lam=1.0).fit(X, 0 * Y + 2)
    with pytest.raises(ValueError, match="`classes` must be a whole number, at least 2"):
        kglm.Categorical(1)
    with pytest.raises(ValueError, match="must be finite: remove the samples"):
        glm.fit(X, torch.where(Y == 1, torch.nan, Y))
    with pytest.raises(ValueError, match="must be finite: remove the samples"):
        glm.fit(X / 0, Y)
    with pytest.raises(ValueError, match="`weights` must be 6 finite numbers"):
        glm.fit(X, Y, weights=torch.ones(5))
    with pytest.raises(ValueError, match="finite and not negative"):
        glm.fit(X, Y, weights=-torch.ones(6))
    with pytest.raises(ValueError, match="flat prior factor"):
        kglm.KernelGLM(KERNEL, kglm.Categorical(), lam=1.0, prior=kglm.Normal(1.0)).fit(X, Y)
    with pytest.raises(ValueError, match="not Categorical"):
        glm.fit(X, Y).posterior(X)
