"""The estimators are scikit-learn's: its own checks, its pipelines, its searches."""

import pickle
import re
import warnings

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_iris, make_blobs, make_moons
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import kerneq as kq
from kerneq.kernels import Linear, Multiquadric
from kerneq.sklearn import EquilibriumClassifier, EquilibriumRegressor, KernelGLMClassifier, KernelGLMRegressor

NUMBERS = EquilibriumRegressor(state=16, features=8, epochs=2, batch_size=32, learning_rate=0.05, random_state=0)
SMALL = EquilibriumClassifier(state=16, features=8, epochs=2, batch_size=32, learning_rate=0.05, random_state=0)


@pytest.mark.filterwarnings("ignore")  # of the checks themselves
@pytest.mark.parametrize(
    "estimator",
    [
        KernelGLMClassifier(),
        KernelGLMRegressor(),
        KernelGLMClassifier(centres=20),
        KernelGLMRegressor(centres=30),
        SMALL,
        NUMBERS,
    ],
    ids=repr,
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


def test_three_classes_are_one_softmax():
    X, y = load_iris(return_X_y=True)
    ours = KernelGLMClassifier(kernel="linear", lam=0.5).fit(X, y)
    theirs = LogisticRegression(C=2.0, fit_intercept=False, tol=1e-10, max_iter=5000).fit(X, y)
    np.testing.assert_allclose(ours.predict_proba(X), theirs.predict_proba(X), atol=1e-4)
    assert ours.decision_function(X).shape == (150, 3) and len(ours.loss_curve_) == ours.n_iter_ + 1
    assert (np.diff(ours.loss_curve_) < 1e-12).all()


def test_probabilities_far_away_are_numbers():
    X, y = np.linspace(1, 2, 30)[:, None], np.arange(30) % 3
    ours = KernelGLMClassifier(kernel=kq.kglm.DotProduct()).fit(X, y)
    far = np.array([[1e5]])
    np.testing.assert_allclose(ours.predict_proba(far).sum(), 1)
    assert ours.predict(far) == ours.classes_[ours.decision_function(far).argmax()]


def test_the_marginal_likelihood_chooses_as_scikit_learns_process_does():
    X, y = load_diabetes(return_X_y=True)
    X, y = X[:150] / X.std(0), y[:150]
    ours = KernelGLMRegressor(lam="auto").fit(X, y)
    kernel = ConstantKernel(1.0, (1e-5, 1e8)) * RBF(1.0, (1e-2, 1e3)) + WhiteKernel(1.0, (1e-5, 1e5))
    theirs = GaussianProcessRegressor(kernel, alpha=0, n_restarts_optimizer=2, random_state=0).fit(X, y - y.mean())
    np.testing.assert_allclose(ours.predict(X), theirs.predict(X) + y.mean(), rtol=1e-2)
    np.testing.assert_allclose(ours.lengthscale_, theirs.kernel_.k1.k2.length_scale, rtol=0.05)
    noise = np.sqrt(theirs.kernel_.k2.noise_level)
    total = theirs.predict(X, return_std=True)[1]
    np.testing.assert_allclose(ours.predict(X, return_std=True)[1], np.sqrt(total**2 - noise**2), rtol=0.1)
    given = KernelGLMClassifier("matern52", lengthscale=1.0, lam="auto").fit(X, y > y.mean())
    assert given.lengthscale_ == 1.0 and given.lam_ != 1.0
    length = KernelGLMClassifier("matern52", lengthscale="auto", lam=1.0).fit(X, y > y.mean())
    assert length.lengthscale_ != given.lengthscale_ and length.lam_ == 1.0


def test_class_weights_and_sample_weights_count():
    X, y = make_moons(80, noise=0.3, random_state=0)
    rare = np.concatenate([np.flatnonzero(y == 0), np.flatnonzero(y == 1)[:5]])
    plain, balanced = (KernelGLMClassifier(class_weight=w).fit(X[rare], y[rare]) for w in (None, "balanced"))
    assert plain.predict(X).mean() < balanced.predict(X).mean()
    by_hand = KernelGLMClassifier().fit(X[rare], y[rare], np.where(y[rare] == 1, 45 / 10, 45 / 80))
    np.testing.assert_allclose(balanced.predict_proba(X), by_hand.predict_proba(X))


@pytest.mark.parametrize("classes", [2, 3])
def test_centres_are_for_many_samples(classes, capsys):
    X, y = make_blobs(600, centers=6, random_state=0)
    y = y % classes
    exact = KernelGLMClassifier(lam=1.0).fit(X, y)
    few = KernelGLMClassifier(lam=1.0, centres=60, random_state=0, verbose=True).fit(X, y)
    assert np.abs(few.predict_proba(X) - exact.predict_proba(X)).max() < 0.02
    assert "step 1: J = " in capsys.readouterr().out
    copied = pickle.loads(pickle.dumps(few))
    np.testing.assert_array_equal(copied.predict_proba(X), few.predict_proba(X))
    assert len(pickle.dumps(few)) < 600 * 60 * 8


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
    named = KernelGLMRegressor("rbf", lengthscale=1.0, lam=0.1, family="poisson").fit(X, y)
    np.testing.assert_array_equal(named.predict(X), fitted.predict(X))
    years = np.linspace(1, 5, 40)
    rates = KernelGLMRegressor(family="poisson").fit(X, np.random.default_rng(0).poisson(years * 20), exposure=years)
    np.testing.assert_allclose(rates.predict(X), 20, rtol=0.15)
    np.testing.assert_allclose(rates.predict(X, exposure=years), years * rates.predict(X))
    with pytest.raises(ValueError, match="`exposure` must be 40 positive numbers"):
        named.fit(X, y, exposure=0 * years)
    with pytest.raises(ValueError, match="`exposure` is for counts"):
        KernelGLMRegressor().fit(X, y, exposure=years)


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
    with pytest.raises(ValueError, match="`family` must be a family .* got 'poison'"):
        KernelGLMRegressor(family="poison").fit(X, y)
    with pytest.raises(TypeError, match="`kernel` must be a covariance.*Multiquadric of `kerneq.kernels` defines"):
        KernelGLMClassifier(Multiquadric(0.5)).fit(X, y)
    with pytest.raises(ValueError, match="`kernel` must be a kernel or one of rbf, matern.*got 'gauss'"):
        KernelGLMClassifier("gauss").fit(X, y)
    with pytest.raises(ValueError, match="`lam` must be a positive number or \"auto\", got 'best'"):
        KernelGLMClassifier(lam="best").fit(X, y)
    with pytest.raises(ValueError, match="give others a number"):
        KernelGLMClassifier("linear", lam="auto").fit(X, y)
    with pytest.raises(ValueError, match="`lam` must be positive"):
        KernelGLMClassifier(lam=0.0).fit(X, y)
    with pytest.raises(ValueError, match="`centres` must be a whole number"):
        KernelGLMClassifier(centres=0).fit(X, y)
    with pytest.raises(ValueError, match="`validation_fraction` must leave samples"):
        clone(SMALL).set_params(early_stopping=True, validation_fraction=1.0).fit(X, y)
    with pytest.raises(ValueError, match="could not convert string to float"):
        KernelGLMRegressor().fit(X, np.array(["a", "b", "c"])[y])


def test_a_huge_length_is_a_constant_kernel_and_no_error():
    X, y = load_iris(return_X_y=True)
    for kernel in ("rbf", "matern12"):
        share = KernelGLMClassifier(kernel, lengthscale=1e300, lam=1e-3).fit(X, y == 1).predict_proba(X)[:, 1]
        np.testing.assert_allclose(share, 1 / 3, atol=1e-3)


def test_a_data_frame_gives_no_warning():
    frame, y = load_iris(return_X_y=True, as_frame=True)
    for estimator in (KernelGLMClassifier(), KernelGLMRegressor(), SMALL, NUMBERS):
        fitted = clone(estimator).fit(frame, y)
        assert fitted.predict(frame).shape == (150,) and list(fitted.feature_names_in_) == list(frame.columns)


def test_every_parameter_is_explained():
    for estimator in (KernelGLMClassifier, KernelGLMRegressor, EquilibriumClassifier):
        named = re.findall(r"[a-z_]+", estimator.__doc__)
        assert set(estimator().get_params()) <= set(named), estimator


def test_training_ends_early_at_the_best_epoch_and_keeps_its_losses():
    X, y = make_moons(200, noise=0.2, random_state=0)
    early = clone(SMALL).set_params(epochs=60, early_stopping=True, n_iter_no_change=3).fit(X, y)
    assert early.n_iter_ == len(early.loss_curve_) == len(early.validation_losses_) < 60
    assert np.argmin(early.validation_losses_) == early.n_iter_ - 4
    X, y = load_diabetes(return_X_y=True)
    numbers = clone(NUMBERS).set_params(epochs=15).fit(X[:300], y[:300])
    assert numbers.score(X[300:], y[300:]) > 0.3 and numbers.loss_curve_[-1] < numbers.loss_curve_[0]


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
