"""The marginal likelihood: its gradient, and the λ and length it chooses, against scikit-learn's."""

import numpy as np
import pytest
import torch
from glm_data import targets, uniform
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process import kernels as sk

from kerneq import kglm
from kerneq.kglm.evidence import maximise_evidence

X = 6 * uniform(40, 1)
NOUGHT = torch.zeros(40, dtype=torch.float64)


def test_the_gaussian_choice_is_scikit_learns():
    y = X[:, 0].sin() + 0.3 * (uniform(40, seed=2) - 0.5)
    found = maximise_evidence(X, y, kglm.Gaussian(), kglm.SquaredExponential(1.0), lam=0.1, offset=NOUGHT)
    kernel = sk.ConstantKernel(1.0, (1e-6, 1e6)) * sk.RBF(1.0, (1e-3, 1e3)) + sk.WhiteKernel(0.1, (1e-8, 1e3))
    gp = GaussianProcessRegressor(kernel, alpha=0, n_restarts_optimizer=3, random_state=0).fit(X.numpy(), y.numpy())
    theirs = gp.kernel_
    assert found.lengthscale == pytest.approx(theirs.k1.k2.length_scale, rel=1e-2)
    assert found.noise == pytest.approx(theirs.k2.noise_level, rel=1e-2)
    assert found.noise / found.lam == pytest.approx(theirs.k1.k1.constant_value, rel=3e-2)
    value = found.log_evidence - 0.5 * 40 * (1 + np.log(2 * np.pi))
    assert value == pytest.approx(gp.log_marginal_likelihood_value_, abs=1e-3)


def test_the_choice_for_two_classes_is_scikit_learns():
    y = (X[:, 0].sin() + (uniform(40, seed=2) - 0.5) > 0).double()
    found = maximise_evidence(X, y, kglm.Bernoulli(), kglm.SquaredExponential(1.0), lam=0.1, offset=NOUGHT)
    kernel = sk.ConstantKernel(1.0, (1e-4, 1e4)) * sk.RBF(1.0, (1e-3, 1e3))
    gp = GaussianProcessClassifier(kernel, n_restarts_optimizer=2, random_state=0).fit(X.numpy(), y.numpy())
    assert found.log_evidence == pytest.approx(gp.log_marginal_likelihood_value_, abs=1e-2)
    assert found.lengthscale == pytest.approx(gp.kernel_.k2.length_scale, rel=0.05)


@pytest.mark.parametrize("family", [kglm.Bernoulli(), kglm.Poisson(), kglm.Gaussian(), kglm.Categorical(3)], ids=repr)
def test_no_neighbour_has_more_evidence_which_is_that_of_the_fit(family):
    vector = isinstance(family, kglm.Categorical)
    Y = (3 * uniform(40, seed=5)).floor() if vector else targets(family, 40)
    Y = torch.where(X[:, 0] > 3, 0 * Y + 1, Y)
    c = 0.5 + uniform(40, seed=7)
    m = NOUGHT[:, None] if vector else NOUGHT
    t = family.statistic(Y)
    columns = c[:, None] if vector else c
    found = maximise_evidence(X, t, family, kglm.Matern(1.0), lam=1.0, offset=m, weights=columns)

    def evidence(length, lam):
        if isinstance(family, kglm.Gaussian):
            K = kglm.Matern(length)(X, X) / lam + torch.diag(1 / c)
            return torch.distributions.MultivariateNormal(NOUGHT, found.noise * K).log_prob(Y).item()
        glm = kglm.KernelGLM(kglm.Matern(length), family, lam=lam).fit(X, Y, weights=c)
        return glm.log_evidence().item()

    here = evidence(found.lengthscale, found.lam)
    for length, lam in ((1.2, 1), (1 / 1.2, 1), (1, 1.3), (1, 1 / 1.3)):
        assert evidence(found.lengthscale * length, found.lam * lam) < here + 1e-3
    if not isinstance(family, kglm.Gaussian):
        assert found.log_evidence == pytest.approx(here, abs=1e-4)


def test_what_is_not_free_stays():
    y = X[:, 0].sin()
    for length, lam in ((True, False), (False, True), (False, False)):
        found = maximise_evidence(
            X, y, kglm.Gaussian(), kglm.Matern(0.7), lam=0.2, offset=NOUGHT, choose_length=length, choose_lam=lam
        )
        assert (found.lengthscale == pytest.approx(0.7)) != length and (found.lam == pytest.approx(0.2)) != lam
