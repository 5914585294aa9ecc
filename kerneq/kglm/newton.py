"""The problem that a kernel GLM's fit minimises, kGLM's (5), and Newton's method for it.

(5)  min over f   J(f) = 1ᵀ(A + Q)(η) − ηᵀT + ½λ‖f‖²,      η = f(X) + m

A is the family's log-partition, Q = −log q the prior factor's penalty, m the offset, T the sufficient statistics. f is
a combination of the functions of a basis: k(·, xᵢ), one per sample (`Gram`), or r features (`Design`). Numbers per
sample are (batch, n), or (batch, n, classes) where η is a vector; coefficients likewise, with n or r in the middle.
"""

import dataclasses
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Self, final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..tensors import per_sample, per_sample_norm
from .design import Design
from .exact import Curvature, Gram, Inverse
from .families import FLAT, AbstractFamily, Prior

ROUNDED = 1e-12  # a gradient below this share of the first one is none
STALE = 0.1  # an inverse serves as long as the weights have moved by less than this share
INNER_STEPS = 200
ACCURATE = 5e-2, 1e-4  # errors of η and of the mean above these shares of the largest, or of 1, are warned of


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """Everything that stays the same while the coefficients are sought."""

    basis: Gram | Design
    t: Tensor  # the sufficient statistics T(Y)
    family: AbstractFamily
    lam: float
    prior: Prior = FLAT
    offset: Tensor | float = 0.0  # m at the coordinates, (n,) or (batch, n); (n, classes) or (n, 1) for vectors

    def double(self) -> "Problem":
        """Return the exact problem in float64."""
        assert isinstance(self.basis, Gram)
        basis, m = Gram(self.basis.K.double()), torch.as_tensor(self.offset).double()
        return dataclasses.replace(self, basis=basis, t=self.t.double(), offset=m)

    def canonical(self, coefficients: Tensor) -> Tensor:
        """Return η = f(X) + m."""
        return self.basis.lift(coefficients) + self.offset

    def _sum(self, each: Tensor) -> Tensor:
        """Return the sum over samples, (batch,)."""
        return self.basis.sum(each.flatten(1).sum(-1))

    def objective(self, coefficients: Tensor, eta: Tensor) -> Tensor:
        """Return J per data set (5); +∞ where it overflows, so that a line search turns back."""
        rest = self.prior.penalty(eta) - eta * self.t
        loss = self.family.log_partition(eta) + (rest.sum(-1) if self.family.vector else rest)
        value = self._sum(loss) + 0.5 * self.lam * self.basis.square(coefficients, eta - self.offset)
        return torch.nan_to_num(value, nan=torch.inf, posinf=torch.inf)

    def rounding(self, coefficients: Tensor, eta: Tensor) -> Tensor:
        """Return how much of J is rounding, per data set: two values closer than this are the same value."""
        size = self._sum(self.prior.penalty(eta).abs() + (eta * self.t).abs())
        size = size + self._sum(self.family.log_partition(eta).abs())
        size = size + self.lam * self.basis.square(coefficients, eta).abs()
        return 4 * torch.finfo(eta.dtype).eps * size

    def gap(self, eta: Tensor) -> Tensor:
        """Return T − A′(η) − Q′(η)."""
        return self.t - self.family.mean(eta) - self.prior.slope(eta)

    def residual(self, coefficients: Tensor, eta: Tensor) -> Tensor:
        """Return −∇J, as coefficients; it is 0 at the equilibrium."""
        return self.basis.project(self.gap(eta)) - self.lam * coefficients

    def curvature(self, eta: Tensor) -> Curvature:
        """Return A″ + Q″, the Hessian in η."""
        if self.family.vector:
            return Curvature(self.family.mean(eta), vector=True)
        return Curvature(self.family.variance(eta) + self.prior.curvature(eta), vector=False)

    def log_evidence(self, eta: Tensor, objective: Tensor) -> Tensor:
        """Return log ∫ p(Y | f) p(f) df by Laplace's approximation, less Σ log h(y), (batch,); for the flat factor q.

        `eta` is the solution's, `objective` is J there. Differentiable in K, T and η.
        """
        return -objective - 0.5 * self.basis.log_det(self.curvature(eta), self.lam)


@final
@dataclasses.dataclass(frozen=True)
class Posterior:
    """What is known about f after the fit: f(X2) ≈ N(mode, covariance), in canonical coordinates.

    Laplace's approximation; for the Gaussian family the Gaussian-process posterior itself.
    """

    mode: Tensor  # (…, m)
    covariance: Tensor  # (…, m, m)
    family: AbstractFamily

    @property
    def deviation(self) -> Tensor:
        """The standard deviation of f at each coordinate, (…, m)."""
        return self.covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()

    @property
    def mean(self) -> Tensor:
        """The response of the most probable f, (…, m)."""
        return self.family.response(self.mode)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the central interval of the mean response; as that is monotone in f, quantiles carry over exactly."""
        if not 0 < level < 1:
            raise ValueError(f"`level` must lie between 0 and 1, got {level}.")
        width = math.sqrt(2) * torch.erfinv(torch.tensor(level, dtype=self.mode.dtype)).item() * self.deviation
        return self.family.response(self.mode - width), self.family.response(self.mode + width)


@final
@dataclasses.dataclass(frozen=True)
class Fit:
    """Where Newton's method stopped, per data set."""

    coefficients: Tensor  # α of f = k(·, X)α, (batch, n), or those of the features, (batch, r); (…, classes)
    eta: Tensor  # canonical parameters at the coordinates
    objective: Tensor  # (steps + 1, batch), J before every step and at the end
    # For an exact fit: an estimate of max |η − η*|, from the residual and the rounding behind it. For a kernel of low
    # rank: a bound on the error of f in the kernel's norm, ‖∇J‖/λ, with ∇J in float64.
    error: Tensor
    converged: Tensor  # whether √(J − J*) ≤ 10 tol·√(J(0) − J), to rounding
    steps: int
    passes: int  # over the data of a kernel of low rank
    doubt: str  # what is not certain about it, in words; empty if nothing is

    def warn_if_unsolved(self) -> Self:
        """Return the fit; warn the caller's caller if it is farther from solved than rounding explains."""
        if self.doubt:
            warnings.warn(f"The inner problem was not solved: {self.doubt}", RuntimeWarning, stacklevel=3)
        return self


@final
@dataclasses.dataclass(frozen=True)
class FitProgress:
    """What a fit reports after each of Newton's steps."""

    step: int
    objective: float  # J, summed over data sets
    decrement: float  # √(gᵀH⁻¹g) over its target: 1 and the fit ends
    passes: int
    seconds: float
    seconds_left: float | None  # a guess from the last steps

    def __str__(self) -> str:
        passes = f", {self.passes} passes" if self.passes else ""
        left = "" if self.seconds_left is None else f", about {self.seconds_left:.0f} s left"
        return f"step {self.step}: J = {self.objective:.6g}{passes}, {self.seconds:.0f} s{left}"


def newton(
    problem: Problem,
    *,
    start: Tensor | None = None,
    tol: float | None = None,
    max_steps: int = 100,
    checkpoint: Path | None = None,
    progress: Callable[[FitProgress], object] | None = None,
) -> Fit:
    """Minimise J from f = 0, or `start`, by IRWLS (12), damped, until √(J − J*) is `tol` of √(J(0) − J), or rounding.

    A step solves Hp = −∇J by conjugate gradient, with the inverse of an H that may be some steps old or, of many
    samples, of some of them only. It is halved, per data set, until J falls by a quarter of what its slope promises: J
    is convex, so Newton's method then converges from anywhere. The `checkpoint` file keeps the coefficients after every
    step; a later call continues there. `tol` is 1e-12 for the exact fit and 1e-6 for features, but rounding of float32.
    """
    basis, begin = problem.basis, time.perf_counter()
    tol = basis.tolerance(tol)
    zero, nothing = basis.zero(problem.t), problem.offset + torch.zeros_like(problem.t)
    origin = problem.objective(zero, nothing)
    if not bool(origin.isfinite().all()):
        raise ValueError("The objective is not finite at the start; check the kernel, the offset and the targets.")
    first = problem.residual(zero, nothing)
    c, eta, value, r, done = zero, nothing, origin, first, 0
    if checkpoint is not None and checkpoint.exists():
        start, done = _resume(checkpoint, first)
    if start is not None:
        there = problem.canonical(start)
        found = problem.objective(start, there)
        if bool((found <= origin).all()):  # better than none
            c, eta, value, r = start, there, found, problem.residual(start, there)
    history, least, reports = [value], torch.full_like(value, math.inf), [(begin, math.inf)]
    inverse, active = _Inverse(problem), torch.ones_like(value, dtype=torch.bool)
    for step in range(done, max_steps):
        if step > done and bool((per_sample_norm(r) <= ROUNDED * per_sample_norm(first)).all()):
            break
        curvature = problem.curvature(eta)
        p, square = _solve(problem, curvature, r, inverse.at(curvature), basis.inner[step > done])
        c, eta, value = _line_search(problem, c, eta, value, p, square, active)
        history.append(value)
        decrement = square.sqrt()
        r = problem.residual(c, eta)
        target = tol * (origin - value).clamp(min=0).sqrt()
        reports.append((time.perf_counter(), (decrement / target.clamp(min=1e-300)).max().item()))
        if basis.leads and checkpoint is not None:
            _save(checkpoint, c, step + 1, first)
        if basis.leads and progress is not None:
            (now, ratio), left = reports[-1], _guess_time_left(reports)
            progress(FitProgress(step + 1, value.sum().item(), ratio, basis.passes, now - begin, left))
        # a data set whose objective and decrement both stand still has reached the floor of its dtype
        moves = (history[-2] - value > problem.rounding(c, eta)) | (decrement < 0.5 * least)
        active, least = active & (decrement > target) & moves, torch.minimum(least, decrement)
        if not bool(active.any()):
            break
    return _assess(problem, c, eta, torch.stack(history), inverse, tol * (origin - value).clamp(min=0).sqrt())


@final
class _Inverse:
    """The inverse Hessian of the basis, made again where the weights have moved."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.made: tuple[Tensor, Inverse] | None = None

    def at(self, curvature: Curvature) -> Inverse:
        basis, weights = self.problem.basis, curvature.weights
        if self.made is not None:
            facts = torch.stack([(weights - self.made[0]).abs().sum(), self.made[0].sum()])
            change, before = basis.sum(facts).tolist()
            if change <= STALE * before:
                return self.made[1]
        self.made = weights, basis.invert(curvature, self.problem.lam)
        return self.made[1]


def _solve(problem: Problem, curvature: Curvature, r: Tensor, inverse: Inverse, tol: float) -> tuple[Tensor, Tensor]:
    """Return p, Hp = r to a relative residual of tol, and ⟨r, p⟩ per data set, by preconditioned conjugate gradient."""
    hessian = problem.basis.hessian(curvature, problem.lam)
    p, square = torch.zeros_like(r), r.new_zeros(len(r))
    z, size = inverse(r)
    d, limit = z, tol**2 * size
    for step in range(INNER_STEPS):
        if step and not bool((size > limit).any()):
            break
        image, steep = hessian(d)
        # the first step is that of the inverse itself where rounding hides how long it is
        length = torch.where((size > limit) & (steep > 0), size / steep, float(step == 0))
        p, r = p + per_sample(length, p) * d, r - per_sample(length, r) * image
        square = square + length * size
        z, new = inverse(r)
        d = z + per_sample(torch.where(size > limit, new / size, 0.0), d) * d
        size = torch.where(length > 0, new, 0.0)
    # so is the last: what K does not see of r, and conjugate gradient neither, it solves exactly
    return p + z, square.clamp(min=0)


def _line_search(
    problem: Problem, c: Tensor, eta: Tensor, value: Tensor, p: Tensor, square: Tensor, active: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return coefficients, η and J after the longest step of 1, ½, ¼ … along p that lowers J enough, per data set."""
    lifted, length, rounding = problem.basis.lift(p), active.to(c.dtype), problem.rounding(c, eta)
    for _ in range(60):
        trial, trial_eta = c + per_sample(length, p) * p, eta + per_sample(length, eta) * lifted
        new = problem.objective(trial, trial_eta)
        refused = (length > 0) & ~(new <= value - 0.25 * length * square + rounding)
        if not bool(refused.any()):
            break
        length = torch.where(refused, 0.5 * length, length)
    stay = refused | (length == 0)
    c, eta = (torch.where(per_sample(stay, old), old, moved) for old, moved in ((c, trial), (eta, trial_eta)))
    return c, eta, torch.where(stay, value, new)


def _assess(problem: Problem, c: Tensor, eta: Tensor, history: Tensor, inverse: _Inverse, target: Tensor) -> Fit:
    """Return the fit at c, with its error."""
    basis, curvature = problem.basis, problem.curvature(eta)
    r = basis.project(problem.gap(eta), exactly=True) - problem.lam * c
    left = inverse.at(curvature)(r)[1].clamp(min=0).sqrt()
    converged = left <= 10 * (target + problem.rounding(c, eta).sqrt())
    steps, doubt = len(history) - 1, ""
    if isinstance(basis, Gram):
        residual = (per_sample_norm(r) / per_sample_norm(problem.t).clamp(min=1)).max().item()
        error, mean_error = _estimate_error(problem, c, eta, r, inverse.at(curvature))
        shares = error / eta.abs().flatten(1).amax(1).clamp(min=1), mean_error
        if not residual <= torch.finfo(r.dtype).eps ** 0.5:
            doubt = f"worst residual {residual:.1e} after {steps} steps."
        elif not bool(((shares[0] <= ACCURATE[0]) & (shares[1] <= ACCURATE[1])).all()):
            words = f"{shares[0].max().item():.0e} of η and {shares[1].max().item():.0e} of the mean response"
            doubt = f"rounding leaves about {words} uncertain."
        advice = " Raise `lam`, or choose a positive semi-definite kernel if it is not one."
    else:
        error = per_sample_norm(r) / problem.lam
        if not bool(converged.all()):
            doubt = f"after {steps} steps f may be off by {error.max().item():.1e} in the kernel's norm."
        advice = " Raise `lam`, use float64 or allow more steps."
    return Fit(c, eta, history, error, converged, steps, basis.passes, doubt and doubt + advice)


def _estimate_error(
    problem: Problem, alpha: Tensor, eta: Tensor, residual: Tensor, inverse: Inverse
) -> tuple[Tensor, Tensor]:
    """Return |δη| and |δA′(η)| over the largest |T| or 1, per data set, for one draw of the signs of what is uncertain.

    That is r itself, the rounding of its terms, and D times the rounding of η = Kα. To first order δη = K(λI + DK)⁻¹δr.
    """
    basis, weights, eps = problem.basis, problem.family.variance(eta), torch.finfo(alpha.dtype).eps
    assert isinstance(basis, Gram)
    root = basis.K.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    root = root[..., None] if problem.family.vector else root
    weights = weights + problem.prior.curvature(eta)
    product = root * per_sample(per_sample_norm(root * alpha), alpha) + eta.abs()
    terms = problem.t.abs() + problem.family.mean(eta).abs() + problem.prior.slope(eta).abs()
    terms = terms + problem.lam * alpha.abs() + weights * product
    signs = torch.randint(0, 2, alpha.shape[1:], generator=torch.Generator().manual_seed(0)).to(alpha) * 2 - 1
    uncertain = signs * (residual.abs() + eps * terms)
    change = basis.lift(inverse(uncertain)[0]).abs() + eps * product
    largest = problem.t.abs().flatten(1).amax(1).clamp(min=1)
    return change.flatten(1).amax(1), (weights * change).flatten(1).amax(1) / largest


def _guess_time_left(reports: list[tuple[float, float]]) -> float | None:
    """Return the seconds until the decrement is its target, if it goes on falling as it did over the last step."""
    (before, high), (now, low) = reports[-2:]
    if low <= 1:
        return 0.0
    if not math.isfinite(high) or low >= high:
        return None
    return math.log(low) / math.log(high / low) * (now - before)


def _save(path: Path, coefficients: Tensor, step: int, first: Tensor) -> None:
    """Write the file anew, and put it in its place at once."""
    part = path.with_name(f".{path.name}.part")
    save_file({"w": coefficients.contiguous(), "step": torch.tensor([step]), "first": first.contiguous()}, part)
    part.replace(path)


def _resume(path: Path, first: Tensor) -> tuple[Tensor, int]:
    """Return coefficients and step of a checkpoint; refuse one of another first gradient, and so of another problem."""
    try:
        found = load_file(path)
        same = found["first"].shape == first.shape and torch.allclose(found["first"].to(first), first, rtol=1e-4)
        w, step = found["w"].to(first), int(found["step"])
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise ValueError(f"{path} is not a checkpoint of a fit ({error}): remove it, or name another file.") from None
    if not same or w.shape != first.shape:
        raise ValueError(f"{path} is the checkpoint of another fit: remove it, or name another file.")
    return w, step
