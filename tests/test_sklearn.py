"""The estimators are scikit-learn's: its own checks, its pipelines, its searches."""

import warnings

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_iris, make_moons
from sklearn.gaussian_process.kernels import RBF
from sklearn.kernel_ridge import KernelRidge
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import kerneq as kq
from kerneq.kernels import Linear, Multiquadric
from kerneq.sklearn import EquilibriumClassifier, KernelGLMClassifier, KernelGLMRegressor

SMALL = EquilibriumClassifier(state=16, features=8, epochs=2, batch_size=32, learning_rate=0.05, random_state=0)


@pytest.mark.filterwarnings("ignore")  # of the checks themselves
@pytest.mark.parametrize(
    "estimator", [KernelGLMClassifier(), KernelGLMRegressor(), SMALL], ids=lambda e: type(e).__name__
)
def test_scikit_learns_own_checks_pass(estimator):
    check_estimator(estimator)


def test_the_classifier_is_kernel_logistic_regression():
    X, y = make_moons(60, noise=0.1, random_state=0)
    ours = KernelGLMClassifier(lengthscale=0.5, lam=0.2).fit(X, np.where(y == 1, "up", "down"))
    glm = kq.kglm.KernelGLM(kq.kglm.SquaredExponential(0.5), kq.kglm.Bernoulli(), lam=0.2)
    glm.fit(torch.as_tensor(X), torch.as_tensor(y).double())
    share = ours.predict_proba(X)[:, list(ours.classes_).index("up")]
    np.testing.assert_allclose(share, glm.predict().numpy(), atol=1e-10)


def test_probabilities_far_away_are_numbers():
    """Of positive features without an intercept every class of three speaks against itself, the farther the more."""
    X, y = np.linspace(1, 2, 30)[:, None], np.arange(30) % 3
    ours = KernelGLMClassifier(kernel=kq.kglm.DotProduct()).fit(X, y)
    far = np.array([[1e5]])
    assert (ours.decision_function(far) < -1000).all()
    np.testing.assert_allclose(ours.predict_proba(far).sum(), 1)
    assert ours.predict(far) == ours.classes_[ours.decision_function(far).argmax()]


def test_the_regressor_is_kernel_ridge_regression_around_the_mean():
    X, y = load_diabetes(return_X_y=True)
    X, y = X[:80], y[:80]
    ours = KernelGLMRegressor(kernel=RBF(0.2), lam=0.3).fit(X, y)
    theirs = KernelRidge(alpha=0.3, kernel="rbf", gamma=1 / (2 * 0.2**2)).fit(X, y - y.mean())
    np.testing.assert_allclose(ours.predict(X), theirs.predict(X) + y.mean(), rtol=1e-8)
    mean, deviation = ours.predict(X, return_std=True)
    assert mean.shape == deviation.shape == (80,) and (deviation > 0).all()


def test_counts_have_a_family():
    X = np.linspace(0, 3, 40)[:, None]
    y = np.random.default_rng(0).poisson(np.exp(X[:, 0]))
    fitted = KernelGLMRegressor(lengthscale=1.0, lam=0.1, family=kq.kglm.Poisson()).fit(X, y)
    assert np.corrcoef(fitted.predict(X), np.exp(X[:, 0]))[0, 1] > 0.95


def test_grids_are_searched_over_both():
    X, y = load_iris(return_X_y=True)
    glm = GridSearchCV(KernelGLMClassifier(), {"lam": [0.01, 1.0], "lengthscale": [None, 1.0]}, cv=3).fit(X, y)
    assert glm.best_score_ > 0.93 and glm.predict_proba(X).shape == (150, 3)
    grid = {"equilibriumclassifier__kernel": [None, Multiquadric(0.5)], "equilibriumclassifier__norm": [1.0]}
    pipeline = make_pipeline(StandardScaler(), clone(SMALL).set_params(epochs=15))
    assert GridSearchCV(pipeline, grid, cv=2).fit(X, y).best_score_ > 0.9
    numbers = {"state": np.array([8, 16]), "norm": np.array([1.0], dtype=np.float32), "epochs": np.array([1])}
    numbers |= {"batch_size": np.array([16])}
    GridSearchCV(SMALL, numbers, cv=2, error_score="raise").fit(X, y)


def test_a_parameter_that_means_nothing_is_a_sentence():
    X, y = load_iris(return_X_y=True)
    with pytest.raises(ValueError, match="`batch_size` must be a whole number, at least 1, got 0"):
        clone(SMALL).set_params(batch_size=0).fit(X, y)
    with pytest.raises(TypeError, match="`family` must be a family .* got 'poisson'"):
        KernelGLMRegressor(family="poisson").fit(X, y)
    with pytest.raises(ValueError, match="could not convert string to float"):
        KernelGLMRegressor().fit(X, np.array(["a", "b", "c"])[y])


def test_predictions_without_an_equilibrium_are_loud():
    X, y = load_iris(return_X_y=True)
    unbounded = clone(SMALL).set_params(kernel=Linear(), norm=10.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        unbounded.fit(X, y)
    with pytest.warns(RuntimeWarning, match="The equilibrium solve failed"):
        unbounded.predict(X)


def test_an_equilibrium_learns_what_no_line_separates_and_a_seed_repeats_it():
    X, y = make_moons(120, noise=0.1, random_state=0)
    equilibrium = clone(SMALL).set_params(state=32, epochs=30)
    assert cross_val_score(equilibrium, X, y, cv=2).mean() > 0.9
    first, second = (clone(SMALL).fit(X, y).predict_proba(X) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_a_feature_that_is_constant_but_for_rounding_is_not_blown_up():
    X, y = load_iris(return_X_y=True)
    X = np.column_stack([X, np.full(len(X), 0.1)])
    assert 0 < X[:, -1].std() < 1e-15
    fitted = clone(SMALL).fit(X, y)
    np.testing.assert_allclose(fitted.predict_proba(X + [0, 0, 0, 0, 1e-6]), fitted.predict_proba(X), atol=1e-3)


@pytest.mark.parametrize("estimator", [KernelGLMClassifier, KernelGLMRegressor])
def test_what_was_fitted_stays_as_it_is_when_the_data_or_the_parameters_change_afterwards(estimator):
    X, y = load_iris(return_X_y=True)
    given, fitted = X.copy(), estimator(kernel=RBF(1.0))
    before = fitted.fit(given, y).predict(X)
    given *= 3
    np.testing.assert_array_equal(fitted.predict(X), before)
    fitted.set_params(kernel__length_scale=30.0)
    np.testing.assert_array_equal(fitted.predict(X), before)
    assert not np.array_equal(fitted.fit(X, y).predict(X), before)
