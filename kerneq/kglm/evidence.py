"""Choose λ and the length scale of a kernel by the marginal likelihood of the data, with its gradient.

Exact for the Gaussian family, whose noise has a closed form; Laplace's approximation otherwise. The gradient goes
through the solution: `declarative.minimise` is differentiable.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from .declarative import minimise
from .exact import Gram
from .families import AbstractFamily, Gaussian, Weighted
from .kernels import Matern, SquaredExponential, squared_distance
from .newton import Problem

ROWS = 1000  # random samples that the evidence is of, at most: it costs n³ a value
LARGEST = 1e4  # factors that λ may change by, and a tenth of it for the length, up and down
GRID = (-2.0, 0.0, 2.0)  # natural logarithms of the factors that are tried first


@final
@dataclasses.dataclass(frozen=True)
class Choice:
    """The kernel's length and λ of the largest evidence, and that evidence less Σ log h(y)."""

    lengthscale: float
    lam: float  # of the family with unit noise, where it is Gaussian
    noise: float  # s² of the Gaussian family; 1 for others
    log_evidence: float


def maximise_evidence(
    X: Tensor,
    t: Tensor,
    family: AbstractFamily,
    kernel: SquaredExponential | Matern,
    *,
    lam: float,
    offset: Tensor,
    choose_length: bool = True,
    choose_lam: bool = True,
    weights: Tensor | None = None,
) -> Choice:
    """Maximise the evidence of the statistics t, (n,) or (n, classes), over the kernel's length and λ; start at those.

    `weights` and `offset` are (n,), and for vectors (n, 1). The best of a small grid starts L-BFGS.
    """
    if weights is not None and not isinstance(family, Gaussian):
        family, t = Weighted(family, weights), weights * t
    squared = squared_distance(X, X) / kernel.lengthscale / kernel.lengthscale
    unit = dataclasses.replace(kernel, lengthscale=1.0)
    bounds = [math.log(LARGEST / 10) * choose_length, math.log(LARGEST) * choose_lam]

    def change(u: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors of length and λ, within their bounds."""
        logs = [bound * torch.tanh(x / max(bound, 1.0)) for bound, x in zip(bounds, u.unbind(), strict=True)]
        return logs[0].exp(), logs[1].exp()

    def evaluate(u: Tensor) -> tuple[Tensor, Tensor]:
        length, factor = change(u)
        K = unit.at(squared / length.square()) / (lam * factor)
        K = K + 1e-10 * K.diagonal().mean() * torch.eye(len(K), dtype=K.dtype, device=K.device)
        if isinstance(family, Gaussian):
            return _gaussian_evidence(K, t - offset, weights)
        problem = Problem(Gram(K), t[None], family, 1.0, offset=offset)
        alpha = minimise(problem)
        eta = problem.canonical(alpha)
        return problem.log_evidence(eta, problem.objective(alpha, eta))[0], torch.ones((), dtype=K.dtype)

    with warnings.catch_warnings():  # of fits at the borders, which lose
        warnings.simplefilter("ignore", RuntimeWarning)
        u = _search(evaluate, [choose_length, choose_lam], t)
        value, noise = evaluate(u)
        length, factor = change(u)
    return Choice(kernel.lengthscale * length.item(), lam * factor.item(), noise.item(), value.item())


def _search(evaluate: Callable[[Tensor], tuple[Tensor, Tensor]], free: list[bool], like: Tensor) -> Tensor:
    """Return the u with the largest value: L-BFGS from the best point of a grid over its free coordinates."""
    axes = [torch.tensor(GRID if is_free else (0.0,), dtype=like.dtype) for is_free in free]
    grid = torch.cartesian_prod(*axes).to(like.device)
    with torch.no_grad():
        u = max(grid, key=lambda point: evaluate(point)[0].item()).clone().requires_grad_()
    best = torch.optim.LBFGS([u], max_iter=30, tolerance_grad=1e-4, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        best.zero_grad()
        value = -evaluate(u)[0]
        torch.autograd.backward(value)
        return value

    if any(free):
        best.step(loss)  # type: ignore[no-untyped-call]
    return u.detach()


def _gaussian_evidence(K: Tensor, y: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return log p(y) of y ~ N(0, s²(K + C⁻¹)) less its constants, at the s² that is best, and that s²."""
    noise = torch.ones_like(y) if weights is None else 1 / weights.clamp(min=1e-12)
    factor = torch.linalg.cholesky(K + torch.diag(noise))
    half = torch.linalg.solve_triangular(factor, y[:, None], upper=False)
    s2 = half.square().mean().clamp(min=torch.finfo(y.dtype).tiny)
    return -0.5 * len(y) * s2.log() - factor.diagonal().log().sum(), s2
