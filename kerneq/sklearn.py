"""Estimators for scikit-learn: NumPy arrays in and out, so that `Pipeline`, `GridSearchCV` and `clone` work.

>>> KernelGLMClassifier(lam="auto").fit(X, y).predict_proba(X2)
>>> GridSearchCV(KernelGLMClassifier(), {"lam": [0.1, 1, 10], "lengthscale": [1.0, 3.0]}).fit(X, y)
>>> KernelGLMRegressor(family="poisson", centres=2000).fit(X, counts, exposure=years)  # 10⁵ samples in a minute
"""

import abc
import dataclasses
import functools
import math
from typing import Any, Self, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from .cells import DenseCell
from .equilibrium import Equilibrium
from .kernels import AbstractKernel, Gaussian
from .kglm import (
    AbstractCovariance,
    AbstractFamily,
    Bernoulli,
    Categorical,
    DotProduct,
    KernelGLM,
    Matern,
    Nystrom,
    Poisson,
    SquaredExponential,
)
from .kglm import Gaussian as GaussianFamily
from .kglm.evidence import ROWS, maximise_evidence
from .tensors import check_whole

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, clone
    from sklearn.preprocessing import StandardScaler
    from sklearn.utils import check_random_state
    from sklearn.utils.class_weight import compute_sample_weight
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "`kerneq.sklearn` needs scikit-learn: install it by `pip install scikit-learn`.", name=error.name
    ) from None


__all__ = ["EquilibriumClassifier", "EquilibriumRegressor", "KernelGLMClassifier", "KernelGLMRegressor"]
KERNELS: dict[str, AbstractCovariance] = {
    "rbf": SquaredExponential(),
    "matern": Matern(),
    "matern12": Matern(smoothness=0.5),
    "matern32": Matern(smoothness=1.5),
    "matern52": Matern(smoothness=2.5),
    "linear": DotProduct(),
}
FAMILIES: dict[str, AbstractFamily] = {"gaussian": GaussianFamily(), "poisson": Poisson()}


def _tensor(X: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(X, dtype=np.float64))  # a copy: a data frame's own numbers are read-only


def _constant(value: float, X: Tensor) -> Tensor:
    return X.new_full((len(X),), value)


@dataclasses.dataclass(eq=False, repr=False)
class AbstractKernelGLM(BaseEstimator, abc.ABC):
    """What the kernel GLMs share: most parameters, and the choice of kernel, length and λ."""

    kernel: Any = None
    lengthscale: float | str | None = None
    lam: float | str = 0.1
    _: dataclasses.KW_ONLY
    centres: Any = None
    max_iter: int = 100
    random_state: Any = None
    verbose: bool = False

    def _fit_glm(
        self,
        X: np.ndarray,
        y: Tensor,
        family: AbstractFamily,
        weights: Tensor | None,
        mean: float,
        log_exposure: Tensor | None = None,
    ) -> None:
        """Fit f to the targets y, and set `model_`, `lam_`, `lengthscale_`, `loss_curve_` and `n_iter_`."""
        points = _tensor(X)
        kernel, length, lam, noise = self._choose(points, y, family, weights, mean, log_exposure)
        self.lam_, self.lengthscale_ = lam, length
        if isinstance(family, GaussianFamily) and noise is not None:
            family, lam = GaussianFamily(noise), lam / noise
        low_rank = self.centres is not None
        if low_rank:
            centres = int(self.centres) if np.ndim(self.centres) == 0 else _tensor(self.centres)
            if isinstance(centres, int):
                check_whole("centres", centres)
                centres = min(centres, len(points))
            seed = int(check_random_state(self.random_state).randint(2**31 - 1))
            kernel = Nystrom(kernel, centres, seed=seed)
        glm = KernelGLM(kernel, family, lam=lam, offset=functools.partial(_constant, mean) if mean else None)
        self.model_ = glm.fit(
            points,
            y,
            weights=weights,
            offset=log_exposure,
            max_steps=int(self.max_iter),
            progress=print if self.verbose else None,
        )
        if low_rank:
            self.model_.reduced.design.release()
        self.loss_curve_ = self.model_.result.objective[:, 0].tolist()
        self.n_iter_ = max(1, self.model_.result.steps)

    def _choose(
        self,
        X: Tensor,
        y: Tensor,
        family: AbstractFamily,
        weights: Tensor | None,
        mean: float,
        log_exposure: Tensor | None,
    ) -> tuple[Any, float | None, float, float | None]:
        """Return the kernel, its length where it is ours to set, λ, and the noise where the evidence chose it."""
        kernel, length = self._make_kernel(X, weights)
        auto_lam = isinstance(self.lam, str)
        auto_length = self.lengthscale == "auto" or (self.lengthscale is None and auto_lam and length is not None)
        if auto_lam and self.lam != "auto":
            raise ValueError(f'`lam` must be a positive number or "auto", got {self.lam!r}.')
        lam = 1.0 if auto_lam else float(self.lam)
        if not (auto_lam or auto_length):
            return kernel, length, lam, None
        if not isinstance(kernel, SquaredExponential | Matern):
            raise ValueError('"auto" knows the kernels "rbf" and "matern…": give others a number, or search a grid.')
        generator = torch.Generator().manual_seed(int(check_random_state(self.random_state).randint(2**31 - 1)))
        known = family.for_targets(y)
        count = (
            ROWS if not known.vector else int(ROWS / 2 / known.statistic(y[:1]).shape[1] ** (1 / 3))
        )  # K + 1 factors a step
        rows = torch.randperm(len(X), generator=generator)[:count]
        columns = (slice(None), None) if known.vector else (slice(None),)
        offset = torch.full((len(rows),), mean, dtype=X.dtype)
        choice = maximise_evidence(
            X[rows],
            known.statistic(y[rows]),
            known,
            kernel,
            lam=lam,
            offset=(offset if log_exposure is None else offset + log_exposure[rows])[columns],
            choose_length=auto_length,
            choose_lam=auto_lam,
            weights=None if weights is None else weights[rows][columns],
        )
        noise = max(choice.noise, 1e-10 * choice.lam) if isinstance(family, GaussianFamily) else None
        return dataclasses.replace(kernel, lengthscale=choice.lengthscale), choice.lengthscale, choice.lam, noise

    def _make_kernel(self, X: Tensor, weights: Tensor | None) -> tuple[Any, float | None]:
        """Return a copy of the kernel and, of a name, its length: by default as wide as the data, √(d·Var X)."""
        if self.kernel is not None and not isinstance(self.kernel, str):
            if isinstance(self.kernel, AbstractKernel):
                name = type(self.kernel).__name__
                raise TypeError(
                    f'`kernel` must be a covariance, such as "rbf" or `kerneq.kglm.SquaredExponential()`; {name} of '
                    "`kerneq.kernels` defines an equilibrium layer: it is for EquilibriumClassifier and -Regressor."
                )
            return clone(self.kernel, safe=False), None  # one of scikit-learn's can be set anew: for the next fit
        name = self.kernel or "rbf"
        if name not in KERNELS:
            raise ValueError(f"`kernel` must be a kernel or one of {', '.join(KERNELS)}, got {name!r}.")
        kernel = KERNELS[name]
        if not isinstance(kernel, SquaredExponential | Matern):
            return kernel, None
        length = self.lengthscale
        if isinstance(length, str) and length != "auto":
            raise ValueError(f'`lengthscale` must be a positive number, None or "auto", got {length!r}.')
        if length is None or isinstance(length, str):
            c = torch.ones(len(X), dtype=X.dtype) if weights is None else weights
            share = c[:, None] / (c.sum() * X.shape[1])
            centre = (share * X).sum()
            length = math.sqrt(X.shape[1] * (share * (X - centre).square()).sum().item()) or 1.0
        return dataclasses.replace(kernel, lengthscale=float(length)), float(length)


class AbstractClassifier(ClassifierMixin, abc.ABC):
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
class KernelGLMClassifier(AbstractClassifier, AbstractKernelGLM):
    """Kernel logistic regression: `kerneq.kglm.KernelGLM`, Bernoulli for two classes, Categorical (softmax) for more.

    Parameters
    ----------
    kernel : "rbf", "matern12", "matern32" ("matern"), "matern52", "linear"; or a kernel of `kerneq.kglm`, scikit-learn
        or GPyTorch, or any function k(X, X2). None is "rbf".
    lengthscale : the length ℓ of a kernel given by name. None is √(d·Var X), or chosen with `lam="auto"`; "auto" is
        chosen by the marginal likelihood.
    lam : λ > 0, the weight of ‖f‖²/2 in the kernel's norm; larger is smoother. "auto" maximises the marginal
        likelihood (Laplace's approximation), over ℓ too unless that is given, of at most 1 000 random samples (of
        three classes 346, of ten 232).
    centres : None fits exactly, with n × n numbers. A number m (or centres (m, d)) is for large n: Nyström's
        approximation with m centres, n × m numbers.
    class_weight : None, "balanced" or {class: weight}; multiplies `sample_weight`.
    max_iter : the most steps of Newton's method.
    random_state : seeds the choice of centres and of the samples that "auto" looks at.
    verbose : prints a line after each of Newton's steps.

    Attributes: `classes_`, `lam_`, `lengthscale_` (None of a kernel that was given), `model_` (the `KernelGLM`),
    `loss_curve_` (the objective before each step and at the end), `n_iter_`.
    """

    class_weight: Any = None

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit to X (samples, features) and labels y (samples)."""
        X, labels = self._check_data(X, y)
        weights = None
        if sample_weight is not None or self.class_weight is not None:
            weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
            weights = _tensor(weights * compute_sample_weight(self.class_weight, self.classes_[labels]))
        family = Bernoulli() if len(self.classes_) == 2 else Categorical(len(self.classes_))
        self._fit_glm(X, _tensor(labels), family, weights, mean=0.0)
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """Return the canonical parameter η of each class (samples, classes), of two classes the second's (samples)."""
        check_is_fitted(self)
        eta: np.ndarray = self.model_.canonical(_tensor(validate_data(self, X, dtype=np.float64, reset=False))).numpy()
        return eta

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class, (samples, classes)."""
        eta = torch.as_tensor(self.decision_function(X))
        if len(self.classes_) == 2:
            return torch.stack([(-eta).sigmoid(), eta.sigmoid()], dim=1).numpy()
        return eta.softmax(1).numpy()


@final
@dataclasses.dataclass(eq=False, repr=False)
class KernelGLMRegressor(RegressorMixin, AbstractKernelGLM):
    """A kernel GLM: kernel ridge regression around the mean of y, or another family such as counts.

    Parameters
    ----------
    kernel, lengthscale, centres, max_iter, random_state, verbose : as in `KernelGLMClassifier`.
    lam : λ > 0, the weight of ‖f‖²/2; of kernel ridge regression the ridge. "auto" maximises the marginal likelihood,
        exact for the Gaussian family, whose noise is then estimated as well.
    family : "gaussian", "poisson", or a family of `kerneq.kglm`, for example `Binomial(10)`. None is "gaussian".

    Attributes: those of `KernelGLMClassifier` but `classes_`.
    """

    family: AbstractFamily | str | None = None

    def fit(self, X: Any, y: Any, sample_weight: Any = None, exposure: Any = None) -> Self:
        """Fit to X (samples, features) and targets y (samples); counts have an `exposure`, such as years, (samples)."""
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        family = self.family or "gaussian"
        if isinstance(family, str):
            if family not in FAMILIES:
                raise ValueError(f"`family` must be a family of `kerneq.kglm`, gaussian or poisson, got {family!r}.")
            family = FAMILIES[family]
        weights, targets = None, _tensor(y)
        if sample_weight is not None:
            weights = _tensor(_check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True))
        shares = torch.ones_like(targets) if weights is None else weights
        mean = (shares @ targets / shares.sum()).item() if isinstance(family, GaussianFamily) else 0.0
        log_exposure = None if exposure is None else _log_exposure(exposure, family, len(y))
        self._fit_glm(X, targets, family, weights, mean, log_exposure)
        return self

    def predict(self, X: Any, return_std: bool = False, exposure: Any = None) -> Any:
        """Return the mean response of each sample; with `return_std` also the deviation of f (canonical)."""
        check_is_fitted(self)
        points = _tensor(validate_data(self, X, dtype=np.float64, reset=False))
        family = self.model_.family
        log_exposure = None if exposure is None else _log_exposure(exposure, family, len(points))
        mean = self.model_.predict(points, offset=log_exposure).numpy()
        return (mean, self.model_.posterior(points).deviation.numpy()) if return_std else mean


def _log_exposure(exposure: Any, family: AbstractFamily, n: int) -> Tensor:
    """Return the logarithm of positive numbers (n,), which is their offset."""
    found = np.asarray(exposure, dtype=np.float64)
    if not isinstance(family, Poisson):
        raise ValueError('`exposure` is for counts: use `family="poisson"`.')
    if found.shape != (n,) or not (np.isfinite(found) & (found > 0)).all():
        raise ValueError(f"`exposure` must be {n} positive numbers, one per sample.")
    return _tensor(np.log(found))


@dataclasses.dataclass(eq=False, repr=False)
class AbstractEquilibriumEstimator(BaseEstimator, abc.ABC):
    """What the equilibrium estimators share: the parameters, and their training by AdamW."""

    kernel: AbstractKernel | None = None
    state: int = 64
    features: int = 32
    norm: float = 1.0
    epochs: int = 60
    batch_size: int = 64
    learning_rate: float = 0.01
    weight_decay: float = 1e-4
    random_state: Any = None
    early_stopping: bool = False
    validation_fraction: float = 0.1
    n_iter_no_change: int = 10
    verbose: bool = False

    def _fit_layer(self, X: np.ndarray, targets: Tensor, outputs: int, loss: Any) -> None:
        """Train layer and head on standardised features, and set `loss_curve_` and `n_iter_`."""
        check_whole("epochs", self.epochs)
        check_whole("batch_size", self.batch_size)
        self.scaler_ = StandardScaler().fit(X)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            kernel = self.kernel or Gaussian(0.5, split=1)
            cell = DenseCell(kernel, inputs=X.shape[1], state=self.state, features=self.features, norm=self.norm)
            self.layer_ = Equilibrium(cell.double(), tol=1e-4, max_steps=200, on_failure="warn")
            self.head_ = nn.Linear(self.state, outputs, dtype=torch.float64)
            self._train(_tensor(self.scaler_.transform(X)), targets, loss)
        self.layer_.eval()

    def _train(self, x: Tensor, targets: Tensor, loss: Any) -> None:
        """Train for `epochs`, or until the loss of held-out samples has not fallen for `n_iter_no_change` of them."""
        order = torch.randperm(len(x)) if self.early_stopping else torch.arange(len(x))
        count = math.ceil(self.validation_fraction * len(x)) if self.early_stopping else 0
        if count >= len(x):
            raise ValueError(f"`validation_fraction` must leave samples to train on, got {self.validation_fraction!r}.")
        held_out, kept = order[:count], order[count:]
        network = nn.ModuleList([self.layer_, self.head_])
        adam = torch.optim.AdamW(network.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay)
        self.loss_curve_: list[float] = []
        self.validation_losses_: list[float] = []
        best = {name: value.clone() for name, value in network.state_dict().items()}
        for epoch in range(self.epochs):
            total = 0.0
            for rows in torch.split(kept[torch.randperm(len(kept))], int(self.batch_size)):
                adam.zero_grad()
                value = loss(self.head_(self.layer_(x[rows]).value), targets[rows])
                torch.autograd.backward(value)
                adam.step()
                total += value.item() * len(rows)
            self.loss_curve_.append(total / len(kept))
            if self.early_stopping:
                with torch.no_grad():
                    network.eval()
                    found = loss(self.head_(self.layer_(x[held_out]).value), targets[held_out]).item()
                    network.train()
                if found < min(self.validation_losses_, default=math.inf):
                    best = {name: value.clone() for name, value in network.state_dict().items()}
                self.validation_losses_.append(found)
            if self.verbose:
                print(f"epoch {epoch + 1}: loss {self.loss_curve_[-1]:.4g}", *self.validation_losses_[-1:])
            since = len(self.validation_losses_) - 1 - int(np.argmin(self.validation_losses_ or [0.0]))
            if self.early_stopping and since >= self.n_iter_no_change:
                break
        if self.early_stopping:
            network.load_state_dict(best)
        self.n_iter_ = len(self.loss_curve_)

    @torch.no_grad()
    def _outputs(self, X: Any) -> np.ndarray:
        """Return what the head makes of the equilibria, (samples, outputs)."""
        check_is_fitted(self)
        x = _tensor(self.scaler_.transform(validate_data(self, X, dtype=np.float64, reset=False)))
        return self.head_(self.layer_(x).value).numpy()


@final
@dataclasses.dataclass(eq=False, repr=False)
class EquilibriumClassifier(AbstractClassifier, AbstractEquilibriumEstimator):
    """One dense equilibrium layer between standardised features and a linear head, trained by AdamW.

    The equilibria of `predict` are found to a relative residual of 1e-4; a warning says where they were not.

    Parameters
    ----------
    kernel : a kernel of `kerneq.kernels`; None is `Gaussian(0.5, split=1)`.
    state, features : the numbers in z, and in v = Wz.
    norm : the bound on ‖W‖‖W_h‖; below 1 the equilibrium is unique for every kernel.
    epochs, batch_size, learning_rate, weight_decay : of AdamW.
    early_stopping : whether to hold out `validation_fraction` of the samples, and to end and return to the best
        epoch after `n_iter_no_change` epochs without a smaller loss there.
    random_state : the seed. verbose : prints a line after each epoch.

    Attributes: `classes_`, `layer_`, `head_`, `loss_curve_` (per epoch), `validation_losses_`, `n_iter_`.
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Fit to X (samples, features) and labels y (samples)."""
        X, labels = self._check_data(X, y)
        self._fit_layer(X, torch.as_tensor(labels), len(self.classes_), cross_entropy)
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """Return the logits (samples, classes); with two classes the log-odds of the second (samples)."""
        logits = self._outputs(X)
        return logits[:, 1] - logits[:, 0] if len(self.classes_) == 2 else logits

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class, (samples, classes)."""
        logits = torch.as_tensor(self.decision_function(X))
        if len(self.classes_) == 2:
            logits = torch.stack([torch.zeros_like(logits), logits], dim=1)
        return logits.softmax(1).numpy()


@final
@dataclasses.dataclass(eq=False, repr=False)
class EquilibriumRegressor(RegressorMixin, AbstractEquilibriumEstimator):
    """One dense equilibrium layer between standardised features and a linear head for one number, trained by AdamW.

    The loss is the mean squared error of the standardised target. Parameters and attributes are those of
    `EquilibriumClassifier`, but `classes_`.
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Fit to X (samples, features) and targets y (samples)."""
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        self.mean_, self.deviation_ = float(y.mean()), float(y.std()) or 1.0
        self._fit_layer(X, _tensor((y - self.mean_) / self.deviation_)[:, None], 1, mse_loss)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Return the prediction of each sample."""
        outputs = self._outputs(X)
        return self.mean_ + self.deviation_ * outputs[:, 0]
