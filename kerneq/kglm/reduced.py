"""The fit of a kernel GLM in features φ: (5) for the w of f = φᵀw, by Newton's method and conjugate gradient.

(5)  min over w   J(w) = 1ᵀ(A + Q)(η) − ηᵀT + ½λ‖w‖²,      η = Φw + m,  Φ = φ(X), (n, r)

J is λ-strongly convex: ‖w − w*‖ ≤ ‖∇J(w)‖/λ, whatever else is known. No matrix of n × n numbers is made. Everything per
sample is (n, outputs): the classes of a `Categorical` family, or several data sets at the same coordinates.
"""

import dataclasses
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self, final

import numpy as np
import torch
import torch.distributed
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..conjugate_gradient import conjugate_gradient
from .equilibrium import FeatureCell, FeatureEquilibrium
from .exact import Posterior
from .families import AbstractFamily, Prior, Weighted
from .guarantee import check_assumptions
from .kernels import coordinates
from .lowrank import AbstractLowRank, Features, Rows, jittered_cholesky

BLOCK = 2**26  # bytes of k(X, C) that are made at once on a CPU; eight times more on a GPU
SAMPLED = 2  # rows per feature of the preconditioner's Hessian
GRAM = 200  # a Gram matrix of r features costs as much as 2nr/GRAM products with Φ and Φᵀ: it is compute-bound
STALE = 0.1  # a preconditioner serves as long as the weights have moved by less than this share
INNER = 0.05  # residual of the inner solve, relative
INNER_STEPS = 200
Group = Any  # a ProcessGroup of `torch.distributed`, which some builds of PyTorch lack


def read_rows(X: Rows, rows: slice | Tensor, like: Tensor) -> Tensor:
    """Return some rows of a tensor, an array or a memmap, on the device and in the dtype of `like`."""
    if isinstance(X, Tensor):
        found = X[rows.to(X.device) if isinstance(rows, Tensor) else rows]
    else:
        found = torch.from_numpy(np.array(X[rows if isinstance(rows, slice) else rows.cpu().numpy()]))
    return found.to(like)


def save_rows(path: str | Path, chunks: Iterable[Any], dtype: Any = np.float64) -> np.memmap:
    """Write chunks of rows, (k, d) each, to one .npy file, and return it as a memmap (n, d) to fit a kernel GLM to.

    For data that do not fit: a chunk is whatever `np.asarray` understands, such as a batch of a Parquet or Arrow file.
    """
    target = Path(path)
    part = target.with_name(f".{target.name}.part")
    rows, width = 0, None
    with part.open("wb") as file:

        def write_header() -> None:  # NumPy leaves room in it for any number of rows
            facts = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (rows, width or 0)}
            np.lib.format.write_array_header_1_0(file, facts)

        for chunk in chunks:
            block = np.ascontiguousarray(chunk, dtype=dtype)
            if block.ndim != 2 or block.shape[1] != (width or block.shape[1]):
                raise ValueError(f"Chunks must be (k, {width or 'd'}), got shape {block.shape}.")
            if width is None:
                width = block.shape[1]
                write_header()
            block.tofile(file)
            rows += len(block)
        if width is None:
            raise ValueError("There must be one chunk of rows at least.")
        file.seek(0)
        write_header()
    part.replace(target)
    return np.load(target, mmap_mode="r")


def free_memory(device: torch.device) -> int:
    """Return the bytes that a fit may use: a quarter of what the CPU has free, half of what a GPU has."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4 if sys.platform == "linux" else 2**31


@final
class Design:
    """Φ = ψ(X)R, one block of rows after another: kept where all of ψ(X) fits in the memory, else made again.

    Products are summed in float64 and, with a `group`, over its processes, each of which has rows of its own.
    """

    def __init__(self, features: Features, X: Rows, like: Tensor, memory: int, group: Group | None) -> None:
        self.features, self.X, self.like, self.memory, self.group = features, X, like, memory, group
        row = features.raws * like.element_size()
        self.rows = max(1, min(BLOCK * (8 if like.is_cuda else 1), memory // 4) // row)
        self.keeps = len(X) * row <= memory
        self._kept: list[Tensor] = []
        self.passes = 0

    def __getstate__(self) -> dict[str, Any]:
        """Return what is saved: not ψ(X), which can be made again."""
        return {**self.__dict__, "_kept": [], "group": None}

    def release(self) -> None:
        """Give the memory of ψ(X) back; a later pass makes it again."""
        self._kept.clear()

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Give the rows and ψ there, (rows, p), of each block."""
        n, complete = len(self.X), len(self._kept) * self.rows >= len(self.X)
        for number, start in enumerate(range(0, n, self.rows)):
            rows = slice(start, min(n, start + self.rows))
            block = self._kept[number] if complete else self.features.raw(self._read(rows))
            if self.keeps and not complete:
                self._kept.append(block)
            yield rows, block
        self.passes += 1

    def _read(self, rows: slice) -> Tensor:
        X = read_rows(self.X, rows, self.like)
        if not bool(X.isfinite().all()):
            raise ValueError("Coordinates must be finite: remove the samples with NaN or infinite values.")
        return X

    def lift(self, w: Tensor) -> Tensor:
        """Return Φw, (n, outputs)."""
        v = self.features.to_raw(w).to(self.like.dtype)
        return torch.cat([(block @ v).double() for _, block in self.blocks()])

    def project(self, u: Tensor, exactly: bool = False) -> Tensor:
        """Return Φᵀu, (r, outputs); `exactly` multiplies in float64, whatever the dtype of ψ."""
        dtype = torch.float64 if exactly else self.like.dtype
        parts = (block.to(dtype).mT @ u[rows].to(dtype) for rows, block in self.blocks())
        return self._sum_raw(parts, u.shape[1])

    def multiply(self, weigh: Callable[[Tensor, slice], Tensor], w: Tensor) -> Tensor:
        """Return Φᵀ weigh(Φw), (r, outputs), in one pass."""
        v, dtype = self.features.to_raw(w).to(self.like.dtype), self.like.dtype
        parts = (block.mT @ weigh((block @ v).double(), rows).to(dtype) for rows, block in self.blocks())
        return self._sum_raw(parts, w.shape[1])

    def _sum_raw(self, parts: Iterator[Tensor], outputs: int) -> Tensor:
        total = torch.zeros(self.features.raws, outputs, dtype=torch.float64, device=self.like.device)
        for part in parts:
            total += part
        return self.features.from_raw(self.sum(total))

    def gram(self, weights: Tensor) -> Tensor:
        """Return ΦᵀDΦ for each column of the weights D ≥ 0, (n, columns): (columns, r, r)."""
        r, root = self.features.rank, self.features.root
        total = torch.zeros(weights.shape[1], r, r, dtype=torch.float64, device=self.like.device)
        for rows, block in self.blocks():
            phi = (block if root is None else block @ root.to(block)).double()  # RᵀψᵀDψR would square the rounding
            for column in range(weights.shape[1]):
                half = phi * weights[rows, column, None].sqrt()
                total[column] += half.mT @ half
        return self.sum(total)

    def sum(self, t: Tensor) -> Tensor:
        """Return the sum over the processes."""
        if self.group is not None:
            torch.distributed.all_reduce(t, group=self.group)
        return t

    def largest(self, t: Tensor) -> Tensor:
        """Return the largest over the processes."""
        if self.group is not None:
            torch.distributed.all_reduce(t, torch.distributed.ReduceOp.MAX, group=self.group)
        return t


@final
@dataclasses.dataclass(frozen=True)
class ReducedProblem:
    """Everything that stays the same while w, (r, outputs), is sought."""

    design: Design
    t: Tensor  # (n, outputs), T(Y)
    family: AbstractFamily
    lam: float
    prior: Prior
    offset: Tensor  # m, (n, 1) or (n, outputs)

    def columns(self, each: Tensor) -> Tensor:
        """Return the sum over the rows: per output (outputs,), or of all, (1,), where η is a vector."""
        return self.design.sum(each.sum().reshape(1) if self.family.vector else each.sum(0))

    def objective(self, w: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
        """Return J, per output or of all, and how much of it is rounding; +∞ where it overflows."""
        A, rest = self.family.log_partition(eta), self.prior.penalty(eta) - eta * self.t
        size = w.square() * (0.5 * self.lam)
        penalty = size.sum().reshape(1) if self.family.vector else size.sum(0)
        terms = torch.stack([self.columns(A) + self.columns(rest), self.columns(A.abs()) + self.columns(rest.abs())])
        value, scale = torch.nan_to_num(terms, nan=torch.inf, posinf=torch.inf) + penalty
        return value, 4 * torch.finfo(torch.float64).eps * scale

    def descent(self, w: Tensor, eta: Tensor, exactly: bool = False) -> Tensor:
        """Return −∇J = Φᵀ(T − A′(η) − Q′(η)) − λw."""
        return self.design.project(self.t - self.family.mean(eta) - self.prior.slope(eta), exactly) - self.lam * w

    def hessian(self, eta: Tensor) -> Callable[[Tensor], Tensor]:
        """Return p ↦ (Φᵀ(A″ + Q″)Φ + λ)p; for vectors A″u = c(q∘u − q(qᵀu)), q = softmax."""
        weights, z = self.family.variance(eta) + self.prior.curvature(eta), self.family.mean(eta)
        total = z.sum(1, keepdim=True).clamp(min=torch.finfo(z.dtype).tiny)  # c

        def weigh(u: Tensor, rows: slice) -> Tensor:
            if not self.family.vector:
                return weights[rows] * u
            q = z[rows] / total[rows]
            return z[rows] * (u - (q * u).sum(1, keepdim=True))

        return lambda p: self.design.multiply(weigh, p) + self.lam * p


@final
class Preconditioner:
    """Cholesky factors L of (n/s)Φ_SᵀDΦ_S + λI, per output: S are s sampled rows, D the weights at them.

    Of the rows of the centres it would be Falkon's (Rudi et al., 2017); made again in each Newton step it follows A″.
    Where a Gram matrix of all rows costs less than the products it saves, S are all, and the factor is Newton's own.
    """

    def __init__(self, problem: ReducedProblem) -> None:
        design, features, memory = problem.design, problem.design.features, problem.design.memory
        n, outputs = problem.t.shape
        total = int(design.sum(torch.tensor([n], device=problem.t.device)).item())
        r = features.rank
        self.problem, self.shared = problem, outputs * r * r * 8 > memory // 4
        self._at, self._factor = problem.t.new_zeros(1), problem.t.new_zeros(0)  # the weights, and L there
        self.index: Tensor | None = None
        self.sample, self.scale = design, 1.0
        if total > SAMPLED * r and r * (1 if self.shared else outputs) > GRAM * outputs:
            share = min(n, math.ceil(SAMPLED * r * n / total))
            self.index = torch.randperm(n, generator=torch.Generator().manual_seed(0))[:share].to(problem.t.device)
            rows = read_rows(design.X, self.index, design.like)
            mapped = Features(features.map, None, r, features.kernel)  # φ itself, as its Gram matrices need it
            self.sample = Design(mapped, rows, design.like, memory, design.group)
            self.scale = total / int(design.sum(torch.tensor([share], device=problem.t.device)).item())

    def factor(self, eta: Tensor) -> Tensor:
        """Return L, (columns, r, r), with one column where the outputs have the same weights."""
        weights = self.problem.family.variance(eta) + self.problem.prior.curvature(eta)
        weights = weights if self.index is None else weights[self.index]
        facts = (weights - weights[:, :1]).abs().sum(), (weights - self._at).abs().sum(), self._at.sum()
        differ, change, before = self.problem.design.sum(torch.stack(facts)).tolist()
        if self._factor.numel() and change <= STALE * before:
            return self._factor
        if self.shared or not differ:
            weights = weights.mean(1, keepdim=True)
        gram = self.scale * self.sample.gram(weights)
        gram.diagonal(dim1=-2, dim2=-1).add_(self.problem.lam)
        self._at, self._factor = weights, jittered_cholesky(gram, torch.finfo(gram.dtype).eps)[0]
        return self._factor


@final
@dataclasses.dataclass(frozen=True)
class ReducedFit:
    """Where Newton's method stopped; per output, or of all where η is a vector."""

    w: Tensor  # (r, outputs), float64: f = φᵀw
    eta: Tensor  # (n, outputs)
    objective: Tensor  # (steps + 1, outputs or 1), J before every step and at the end
    error: Tensor  # a bound on ‖w − w*‖, the error of f in the kernel's norm: ‖∇J‖/λ, ∇J in float64
    converged: Tensor  # whether √(J − J*) ≤ 10 tol·√(J(0) − J), ∇J in float64; tol is 1e-4 at least for float32 data
    steps: int
    passes: int  # over the data

    def warn_if_unsolved(self) -> Self:
        """Return the fit; warn the caller's caller if the minimum was not reached, as in float32 with a small λ."""
        if not bool(self.converged.all()):
            stopped = f"after {self.steps} steps f may be off by {self.error.max().item():.1e} in the kernel's norm"
            warnings.warn(
                f"The kernel GLM was not solved: {stopped}. Raise `lam`, use float64 or allow more steps.",
                RuntimeWarning,
                stacklevel=3,
            )
        return self


@final
@dataclasses.dataclass(frozen=True)
class FitProgress:
    """What a fit reports after each of Newton's steps."""

    step: int
    objective: float  # J, summed over outputs
    decrement: float  # √(gᵀH⁻¹g) over its target: 1 and the fit ends
    passes: int
    seconds: float
    seconds_left: float | None  # a guess from the last steps

    def __str__(self) -> str:
        left = "" if self.seconds_left is None else f", about {self.seconds_left:.0f} s left"
        return f"step {self.step}: J = {self.objective:.6g}, {self.passes} passes, {self.seconds:.0f} s{left}"


def minimise_reduced(
    problem: ReducedProblem,
    *,
    start: Tensor | None = None,
    tol: float = 1e-6,
    max_steps: int = 100,
    checkpoint: Path | None = None,
    progress: Callable[[FitProgress], object] | None = None,
) -> ReducedFit:
    """Minimise J from w = 0 or `start` until √(gᵀH⁻¹g) ≤ tol·√(J(0) − J), which bounds J − J* over J(0) − J by tol².

    Steps are damped as in `exact.newton`. The `checkpoint` file keeps w after every step; a later call continues there.
    """
    design, begin = problem.design, time.perf_counter()
    tol = max(tol, 1e3 * torch.finfo(design.like.dtype).eps)  # the products are in that dtype
    nothing = problem.offset.expand_as(problem.t)  # η of w = 0
    zero = torch.zeros(design.features.rank, problem.t.shape[1]).to(problem.t)
    origin, rounding = problem.objective(zero, nothing)
    if not bool(origin.isfinite().all()):
        raise ValueError("The objective is not finite at the start; check the kernel, the offset and the targets.")
    w, eta, value, done = zero, nothing, origin, 0
    g = first = problem.descent(zero, nothing)
    if checkpoint is not None and checkpoint.exists():
        start, done = _resume(checkpoint, first)
    if start is not None:
        there = design.lift(start) + problem.offset
        found, noise = problem.objective(start, there)
        if bool((found <= origin).all()):  # better than none
            w, eta, value, rounding, g = start, there, found, noise, problem.descent(start, there)
    preconditioner = Preconditioner(problem)
    factor, history, reports = preconditioner.factor(eta), [value], [(begin, math.inf)]
    for step in range(done, max_steps):
        factor = preconditioner.factor(eta)
        p, decrement = _solve_newton(problem, eta, g, factor, INNER if step == done else INNER / 10)
        w, eta, value, rounding = _search(problem, w, eta, value, rounding, p, decrement)
        history.append(value)
        g = problem.descent(w, eta)
        target = tol * (origin - value).clamp(min=0).sqrt() + rounding.sqrt()
        reports.append((time.perf_counter(), (decrement / target.clamp(min=1e-300)).max().item()))
        if _leads(design.group) and checkpoint is not None:
            _save(checkpoint, w, step + 1, first)
        if _leads(design.group) and progress is not None:
            (now, ratio), left = reports[-1], _guess_time_left(reports)
            progress(FitProgress(step + 1, value.sum().item(), ratio, design.passes, now - begin, left))
        if bool((decrement <= target).all()) or bool((value >= history[-2]).all()):
            break
    g = problem.descent(w, eta, exactly=True)
    left = torch.linalg.solve_triangular(factor, g.mT[..., None], upper=False)[..., 0].mT
    norms = [(x.square().sum().reshape(1) if problem.family.vector else x.square().sum(0)).sqrt() for x in (g, left)]
    converged = norms[1] <= 10 * tol * (origin - value).clamp(min=0).sqrt() + 10 * rounding.sqrt()
    return ReducedFit(w, eta, torch.stack(history), norms[0] / problem.lam, converged, len(history) - 1, design.passes)


def _solve_newton(problem: ReducedProblem, eta: Tensor, g: Tensor, factor: Tensor, tol: float) -> tuple[Tensor, Tensor]:
    """Return Newton's step p, Hp = g to a relative residual of tol, and the decrement √(gᵀp), per output or of all."""
    hessian, shape = problem.hessian(eta), g.mT.shape
    whole = (1, -1) if problem.family.vector else tuple(shape)

    def half(b: Tensor, L: Tensor, upper: bool) -> Tensor:
        return torch.linalg.solve_triangular(L, b.reshape(*shape, 1), upper=upper)[..., 0]

    def matvec(y: Tensor) -> Tensor:
        return half(hessian(half(y, factor.mT, True).mT).mT, factor, False).reshape(whole)

    b = half(g.mT, factor, False).reshape(whole)
    y = conjugate_gradient(matvec, b, tol, INNER_STEPS, check_every=1).value
    return half(y, factor.mT, True).mT, (y * b).sum(1).clamp(min=0).sqrt()


def _search(
    problem: ReducedProblem, w: Tensor, eta: Tensor, value: Tensor, rounding: Tensor, p: Tensor, decrement: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return w, η, J and its rounding after the longest step of 1, ½, ¼ … along p that lowers J enough, per output."""
    moved, length = problem.design.lift(p), torch.ones_like(value)
    for _ in range(60):
        trial, trial_eta = w + length * p, eta + length * moved
        new, noise = problem.objective(trial, trial_eta)
        refused = (length > 0) & ~(new <= value - 0.25 * length * decrement.square() + rounding)
        if not bool(refused.any()):
            return trial, trial_eta, new, noise
        length = torch.where(refused, 0.5 * length, length)
    length = torch.where(refused, 0.0, length)
    trial, trial_eta = w + length * p, eta + length * moved
    return trial, trial_eta, *problem.objective(trial, trial_eta)


def _guess_time_left(reports: list[tuple[float, float]]) -> float | None:
    """Return the seconds until the decrement is its target, if it goes on falling as it did over the last step."""
    (before, high), (now, low) = reports[-2:]
    if low <= 1:
        return 0.0
    if not math.isfinite(high) or low >= high:
        return None
    return math.log(low) / math.log(high / low) * (now - before)


def _leads(group: Group | None) -> bool:
    return group is None or torch.distributed.get_rank(group) == 0


def _save(path: Path, w: Tensor, step: int, first: Tensor) -> None:
    """Write the file anew, and put it in its place at once."""
    part = path.with_name(f".{path.name}.part")
    save_file({"w": w.contiguous(), "step": torch.tensor([step]), "first": first.contiguous()}, part)
    part.replace(path)


def _resume(path: Path, first: Tensor) -> tuple[Tensor, int]:
    """Return w and the step of a checkpoint; refuse one whose first gradient, and so whose problem, was another."""
    try:
        found = load_file(path)
        same = found["first"].shape == first.shape and torch.allclose(found["first"].to(first), first, rtol=1e-4)
        w, step = found["w"].to(first), int(found["step"])
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise ValueError(f"{path} is not a checkpoint of a fit ({error}): remove it, or name another file.") from None
    if not same or w.shape != first.shape:
        raise ValueError(f"{path} is the checkpoint of another fit: remove it, or name another file.")
    return w, step


@final
@dataclasses.dataclass(frozen=True)
class Approximation:
    """How far a kernel of low rank is from the kernel, from a sample of the coordinates."""

    trace: float  # of K − K̃, an unbiased estimate; over n it is the variance that the features miss
    norm: float  # ‖K − K̃‖, from the sample's own matrix
    fit: float | None  # ‖f − f*‖ in the kernel's norm, f* of the full kernel: |f(x) − f*(x)| ≤ √k(x, x) times it


@final
@dataclasses.dataclass(frozen=True)
class Reduced:
    """A fitted kernel GLM in features."""

    problem: ReducedProblem
    fit: ReducedFit
    offset_at: Callable[[Tensor], Tensor]  # (n, d) → (n,) or, for vectors, (n, 1) or (n, classes)
    single: bool  # whether the targets were those of one data set

    @property
    def features(self) -> Features:
        """φ."""
        return self.problem.design.features

    def shape(self, eta: Tensor) -> Tensor:
        """Return (m, outputs) in the dtype of the data as `KernelGLM` returns it: (m,), (batch, m) or (m, classes)."""
        eta = eta.to(self.problem.design.like.dtype)
        return eta if self.problem.family.vector else eta[:, 0] if self.single else eta.mT

    def points(self, X2: Rows) -> Rows:
        """Return X2 as (m, d), d that of the data; a vector means d = 1."""
        like = self.problem.design.like
        if isinstance(X2, np.ndarray) and X2.ndim == 2 and X2.shape[1] == like.shape[1]:
            return X2  # may be a memmap
        return coordinates(torch.as_tensor(X2), like=like)

    def canonical(self, X2: Rows) -> Tensor:
        """Return η at X2, (m, outputs), in float64."""
        X2 = self.points(X2)
        design = Design(self.features, X2, self.problem.design.like, BLOCK, None)
        return design.lift(self.fit.w) + offset_of(X2, design.like, self.offset_at)

    def posterior(self, X2: Tensor) -> Posterior:
        """Return Laplace's approximation; where the features see nothing it is the prior of the kernel itself."""
        X2 = coordinates(X2, like=self.problem.design.like)
        phi, lam = self.features.map(X2).double(), self.problem.lam
        half = torch.linalg.solve_triangular(self._factor(), phi.mT, upper=False)
        missed = (self.features.kernel(X2, X2).double() - phi @ phi.mT) / lam
        covariance = (half.mT @ half + missed).to(X2.dtype)
        family = self.problem.family
        return Posterior(self.shape(self.canonical(X2)), covariance[0] if self.single else covariance, family)

    def log_evidence(self) -> Tensor:
        """Return Laplace's log ∫ p(Y | f) p(f) df of the low-rank prior, less Σ log h(y), per output."""
        if self.problem.family.vector:
            raise ValueError(
                "The evidence of a low-rank kernel is not available for Categorical: fit a subset exactly."
            )
        log_det = 2 * self._factor().diagonal(dim1=-2, dim2=-1).log().sum(-1)
        evidence = -self.fit.objective[-1] - 0.5 * (log_det - self.features.rank * math.log(self.problem.lam))
        return evidence[0] if self.single else evidence

    def _factor(self) -> Tensor:
        """Return the Cholesky factor of ∇²J at the solution, (outputs, r, r)."""
        weights = self.problem.family.variance(self.fit.eta) + self.problem.prior.curvature(self.fit.eta)
        gram = self.problem.design.gram(weights)
        gram.diagonal(dim1=-2, dim2=-1).add_(self.problem.lam)
        return jittered_cholesky(gram, torch.finfo(gram.dtype).eps)[0]

    def approximation(self, samples: int = 1000) -> Approximation:
        """Return the errors of k̃ and of the fit, from a sample of the rows; exact where it is all of them.

        The full problem is λ-strongly convex in the kernel's norm, and f minimises it over the features' span: so
        ‖f − f*‖ ≤ √(gᵀ(K − K̃)g)/λ + ‖∇J‖/λ with g = T − A′(η) − Q′(η). Random features span other functions.
        """
        problem, design = self.problem, self.problem.design
        if design.group is not None:
            raise ValueError("Ask for the approximation where one process has all rows.")
        n = len(design.X)
        generator = torch.Generator().manual_seed(1)  # other rows than those the centres were drawn from
        index = torch.randperm(n, generator=generator)[:samples].to(problem.t.device)
        XS = read_rows(design.X, index, design.like)
        phi = self.features.map(XS).double()
        missed = self.features.kernel(XS, XS).double() - phi @ phi.mT
        share = n / len(XS)
        fit = None
        if self.features.centres is not None:
            g = problem.t - problem.family.mean(self.fit.eta) - problem.prior.slope(self.fit.eta)
            Kg = -phi @ design.project(g)
            for start in range(0, n, design.rows):
                rows = slice(start, min(n, start + design.rows))
                Kg += self.features.kernel(XS, read_rows(design.X, rows, design.like)).double() @ g[rows]
            square = share * (g[index] * Kg).sum().clamp(min=0).item()
            fit = math.sqrt(square) / problem.lam + self.fit.error.norm().item()
        trace, norm = share * missed.trace().item(), share * torch.linalg.matrix_norm(missed, 2).item()
        return Approximation(trace if fit is None else max(trace, 0.0), norm, fit)  # below 0 is rounding

    def layer(self, X2: Tensor | None) -> FeatureEquilibrium:
        """Return Y ↦ f*(X2) as an equilibrium of the r numbers w = Φᵀ(T − z)/λ, whose Φ are its weights."""
        problem, design = self.problem, self.problem.design
        if len(design.X) * self.features.rank * design.like.element_size() > design.memory:
            raise ValueError("The layer's weights Φ, (n, r), do not fit in the memory: use fewer centres or samples.")
        Phi = torch.cat([self.features.map(read_rows(design.X, rows, design.like)) for rows, _ in design.blocks()])
        guarantee = check_assumptions(Phi.mT.double() @ Phi.double(), problem.lam, problem.family, problem.prior)
        guarantee = dataclasses.replace(guarantee, smallest=0.0)  # of K̃ = ΦΦᵀ, whose other eigenvalues are ΦᵀΦ's
        m2, Phi2 = problem.offset, Phi
        if X2 is not None:
            X2 = coordinates(X2, like=design.like)
            m2, Phi2 = offset_of(X2, design.like, self.offset_at), self.features.map(X2)
        family = problem.family
        if isinstance(family, Weighted) and not family.vector:  # of samples in the last dimension again
            family = Weighted(family.family, family.weights[:, 0])
        m, m2 = (each.to(Phi) if family.vector else each[:, 0].to(Phi) for each in (problem.offset, m2))
        cell = FeatureCell(Phi, m, family, problem.lam, problem.prior)
        return FeatureEquilibrium(cell, Phi2, m2, guarantee)


def offset_of(X: Rows, like: Tensor, offset_at: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the offset of all rows, (n, 1) or (n, outputs), in float64, block by block."""
    parts = [offset_at(read_rows(X, slice(i, i + 2**16), like)) for i in range(0, len(X), 2**16)]
    found = torch.cat(parts).double()
    return found[:, None] if found.ndim == 1 else found


def draw_rows(X: Rows, count: int, like: Tensor, group: Group | None) -> tuple[Tensor, int]:
    """Return about `count` random rows, of all processes, and the number of all rows."""
    numbers = [len(X)]
    if group is not None:
        gathered: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(gathered, len(X), group=group)
        numbers = list(gathered)
    share = min(len(X), math.ceil(count * len(X) / sum(numbers)))
    index = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))[:share].sort().values
    rows = read_rows(X, index, like)
    if group is not None:
        torch.distributed.all_gather_object(gathered, rows.cpu(), group=group)
        rows = torch.cat(gathered).to(like)
    return rows, sum(numbers)


def open_design(plan: AbstractLowRank, X: Rows, lam: float, group: Group | None) -> Design:
    """Return Φ of the plan at the rows of X, with what it chooses from a sample of all processes' rows."""
    like = X[:0] if isinstance(X, Tensor) else torch.from_numpy(np.array(X[:0]))
    like = like if like.is_floating_point() else like.to(torch.get_default_dtype())
    like = like if plan.device is None else like.to(plan.device)
    sample, n = draw_rows(X, plan.candidates(), like, group)
    if not bool(sample.isfinite().all()):
        raise ValueError("Coordinates must be finite: remove the samples with NaN or infinite values.")
    chosen: list[Any] = [plan.choose(sample, n, lam) if _leads(group) else None]
    if group is not None:
        torch.distributed.broadcast_object_list(chosen, src=torch.distributed.get_global_rank(group, 0), group=group)
    memory = free_memory(like.device) if plan.memory is None else plan.memory
    return Design(chosen[0].prepare(like), X, like, memory, group)
