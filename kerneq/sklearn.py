"""Estimators for scikit-learn: NumPy arrays in and out, so that `Pipeline`, `GridSearchCV` and `clone` work.

>>> GridSearchCV(KernelGLMClassifier(), {"lam": [0.1, 1, 10], "lengthscale": [1.0, 3.0]}).fit(X, y)
"""

import abc
import dataclasses
import functools
from typing import Any, Self, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid

from .cells import DenseCell
from .equilibrium import Equilibrium
from .kernels import AbstractKernel, Gaussian
from .kglm import AbstractFamily, Bernoulli, KernelGLM, SquaredExponential
from .kglm import Gaussian as GaussianFamily
from .tensors import check_whole

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, clone
    from sklearn.preprocessing import StandardScaler
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "`kerneq.sklearn` needs scikit-learn: install it by `pip install scikit-learn`.", name=error.name
    ) from None


def _tensor(X: np.ndarray) -> Tensor:
    return torch.as_tensor(np.ascontiguousarray(X, dtype=np.float64))


def _constant(value: float, X: Tensor) -> Tensor:
    return X.new_full((len(X),), value)


def _covariance(kernel: Any, lengthscale: float | None, X: np.ndarray) -> Any:
    """Return a copy of the kernel, or a squared exponential one; by default as wide as the data, ℓ² = d·Var X."""
    if kernel is not None:
        return clone(kernel, safe=False)  # one of scikit-learn's can be set anew, which is for the next fit
    if lengthscale is None:
        lengthscale = float(np.sqrt(X.shape[1] * X.var())) or 1.0
    return SquaredExponential(lengthscale)


class AbstractClassifier(ClassifierMixin, BaseEstimator, abc.ABC):
    """What the classifiers share; to write one: `fit` and `predict_proba`."""

    @abc.abstractmethod
    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class, (samples, classes)."""

    def predict(self, X: Any) -> np.ndarray:
        """Return the likeliest class of each sample."""
        likeliest = self.predict_proba(X).argmax(axis=1)
        return self.classes_[likeliest]

    def _check_data(self, X: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return X as numbers and y as labels 0, 1, …, and set `classes_`."""
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"A classifier needs samples of two classes at least, got one class: {self.classes_[0]}.")
        return X, labels


@final
@dataclasses.dataclass(eq=False, repr=False)
class KernelGLMClassifier(AbstractClassifier):
    """Kernel logistic regression: `kerneq.kglm.KernelGLM` with Bernoulli families, one class against the rest."""

    kernel: Any = None  # of `kerneq.kglm`, scikit-learn, GPyTorch, or any k(X, X2); None: a squared exponential …
    lengthscale: float | None = None  # … of this length; None: √(d·Var X)
    lam: float = 0.1  # the weight λ of ‖f‖²_k/2

    def fit(self, X: Any, y: Any) -> Self:
        """Fit to X (samples, features) and labels y (samples)."""
        X, labels = self._check_data(X, y)
        targets = labels == np.arange(len(self.classes_))[:, None]
        targets = targets[1:] if len(self.classes_) == 2 else targets
        kernel = _covariance(self.kernel, self.lengthscale, X)
        self.model_ = KernelGLM(kernel, Bernoulli(), lam=self.lam).fit(_tensor(X), _tensor(targets))
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """Return the canonical parameter η of each class (samples, classes), of two classes the second's (samples)."""
        check_is_fitted(self)
        eta = self.model_.canonical(_tensor(validate_data(self, X, dtype=np.float64, reset=False))).numpy()
        return eta[0] if len(self.classes_) == 2 else eta.T

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class, (samples, classes); for many, one against the rest, normalised."""
        eta = torch.as_tensor(self.decision_function(X))
        if len(self.classes_) == 2:
            return torch.stack([(-eta).sigmoid(), eta.sigmoid()], dim=1).numpy()
        return logsigmoid(eta).softmax(1).numpy()  # their logarithms: far away all of them may round to 0


@final
@dataclasses.dataclass(eq=False, repr=False)
class KernelGLMRegressor(RegressorMixin, BaseEstimator):
    """A kernel GLM: `kerneq.kglm.KernelGLM` with the Gaussian family (kernel ridge regression), or another one.

    With the Gaussian family f is a deviation from the mean of y.
    """

    kernel: Any = None  # this and the next two as in `KernelGLMClassifier`
    lengthscale: float | None = None
    lam: float = 0.1
    family: AbstractFamily | None = None  # of `kerneq.kglm`, for example `Poisson()` for counts; None: Gaussian

    def fit(self, X: Any, y: Any) -> Self:
        """Fit to X (samples, features) and targets y (samples)."""
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        targets, family = _tensor(y), self.family or GaussianFamily()
        mean = float(targets.mean()) if isinstance(family, GaussianFamily) else 0.0
        kernel = _covariance(self.kernel, self.lengthscale, X)
        glm = KernelGLM(kernel, family, lam=self.lam, offset=functools.partial(_constant, mean))
        self.model_ = glm.fit(_tensor(X), targets)
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the mean response of each sample; with `return_std` also the deviation of f (canonical)."""
        check_is_fitted(self)
        points = _tensor(validate_data(self, X, dtype=np.float64, reset=False))
        mean = self.model_.predict(points).numpy()
        return (mean, self.model_.posterior(points).deviation.numpy()) if return_std else mean


@final
@dataclasses.dataclass(eq=False, repr=False)
class EquilibriumClassifier(AbstractClassifier):
    """One dense equilibrium layer between standardised features and a linear head, trained by AdamW.

    The equilibria of `predict` are found to a relative residual of 1e-4; a warning says where they were not.
    """

    kernel: AbstractKernel | None = None  # of `kerneq.kernels`; None: Gaussian(0.5, split=1)
    state: int = 64  # numbers in z
    features: int = 32  # numbers in v = Wz
    norm: float = 1.0  # the bound on ‖W‖‖W_h‖
    epochs: int = 60
    batch_size: int = 64
    learning_rate: float = 0.01
    weight_decay: float = 1e-4
    random_state: Any = None

    def fit(self, X: Any, y: Any) -> Self:
        """Fit to X (samples, features) and labels y (samples)."""
        X, labels = self._check_data(X, y)
        check_whole("epochs", self.epochs)
        check_whole("batch_size", self.batch_size)
        self.scaler_ = StandardScaler().fit(X)
        kernel = self.kernel or Gaussian(0.5, split=1)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            cell = DenseCell(kernel, inputs=X.shape[1], state=self.state, features=self.features, norm=self.norm)
            self.layer_ = Equilibrium(cell.double(), tol=1e-4, max_steps=200, on_failure="warn")
            self.head_ = nn.Linear(self.state, len(self.classes_), dtype=torch.float64)
            self._train(_tensor(self.scaler_.transform(X)), torch.as_tensor(labels))
        self.layer_.eval()
        self.n_iter_ = self.epochs
        return self

    def _train(self, x: Tensor, labels: Tensor) -> None:
        parameters = [*self.layer_.parameters(), *self.head_.parameters()]
        adam = torch.optim.AdamW(parameters, lr=self.learning_rate, weight_decay=self.weight_decay)
        for _ in range(self.epochs):
            for rows in torch.split(torch.randperm(len(x)), int(self.batch_size)):
                adam.zero_grad()
                loss = cross_entropy(self.head_(self.layer_(x[rows]).value), labels[rows])
                torch.autograd.backward(loss)
                adam.step()

    @torch.no_grad()
    def decision_function(self, X: Any) -> np.ndarray:
        """Return the logits (samples, classes); with two classes the log-odds of the second (samples)."""
        check_is_fitted(self)
        x = _tensor(self.scaler_.transform(validate_data(self, X, dtype=np.float64, reset=False)))
        logits = self.head_(self.layer_(x).value).numpy()
        return logits[:, 1] - logits[:, 0] if len(self.classes_) == 2 else logits

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class, (samples, classes)."""
        logits = torch.as_tensor(self.decision_function(X))
        if len(self.classes_) == 2:
            logits = torch.stack([torch.zeros_like(logits), logits], dim=1)
        return logits.softmax(1).numpy()
