"""The basis of many samples: r features φ, whose matrix Φ = φ(X), (n, r), is read one block of rows after another.

No matrix of n × n numbers is made. The rows may be a memmap's, and those of several processes.
"""

import dataclasses
import math
import os
import sys
from collections.abc import Iterator
from typing import Any, final

import numpy as np
import torch
import torch.distributed
from torch import Tensor

from ..tensors import per_sample_dot
from .exact import Curvature, Inverse, columns, uncolumns
from .lowrank import AbstractLowRank, Features, jittered_cholesky
from .rows import Rows, read_rows

BLOCK = 2**26  # bytes of k(X, C) that are made at once on a CPU; eight times more on a GPU
SAMPLED = 2  # rows per feature of the Hessian that preconditions
GRAM = 200  # a Gram matrix of r features costs as much as 2nr/GRAM products with Φ and Φᵀ: it is compute-bound
Group = Any  # a ProcessGroup of `torch.distributed`, which some builds of PyTorch lack


def free_memory(device: torch.device) -> int:
    """Return the bytes that a fit may use: a quarter of what the CPU has free, half of what a GPU has."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4 if sys.platform == "linux" else 2**31


@final
@dataclasses.dataclass(frozen=True)
class Approximation:
    """How far a kernel of low rank is from the kernel, from a sample of the coordinates."""

    trace: float  # of K − K̃, an unbiased estimate; over n it is the variance that the features miss
    norm: float  # ‖K − K̃‖, from the sample's own matrix
    fit: float | None  # ‖f − f*‖ in the kernel's norm, f* of the full kernel: |f(x) − f*(x)| ≤ √k(x, x) times it


@final
class Design:
    """f = φᵀw of coefficients w, (batch, r) or (batch, r, classes), with ‖f‖ = ‖w‖; φ(x) = Rᵀψ(x).

    All of ψ(X) is kept where it fits in the memory, else made again in every pass. Products are summed in float64 and,
    with a `group`, over its processes, each of which has rows of its own.
    """

    # The relative residual of the first linear system and of the later ones: every product is a pass over the data.
    inner = (0.05, 0.005)

    def __init__(self, features: Features, X: Rows, like: Tensor, memory: int, group: Group | None) -> None:
        self.features, self.X, self.like, self.memory, self.group = features, X, like, memory, group
        row = features.raws * like.element_size()
        self.rows = max(1, min(BLOCK * (8 if like.is_cuda else 1), memory // 4) // row)
        self.keeps = len(X) * row <= memory
        self._kept: list[Tensor] = []
        self._sample: tuple[Design, float, Tensor | None] | None = None
        self.passes = 0

    def __getstate__(self) -> dict[str, Any]:
        """Return what is saved: not ψ(X), which can be made again."""
        return {**self.__dict__, "_kept": [], "_sample": None, "group": None}

    def release(self) -> None:
        """Give the memory of ψ(X) back; a later pass makes it again."""
        self._kept.clear()
        self._sample = None

    @property
    def leads(self) -> bool:
        """Whether this process is the one that writes."""
        return self.group is None or torch.distributed.get_rank(self.group) == 0

    def tolerance(self, tol: float | None) -> float:
        """Return `tol`, 1e-6 by default, but no less than products in the dtype of the data can reach."""
        return max(1e-6 if tol is None else tol, 1e3 * torch.finfo(self.like.dtype).eps)

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

    def matrix(self) -> Tensor:
        """Return Φ, (n, r)."""
        if len(self.X) * self.features.rank * self.like.element_size() > self.memory:
            raise ValueError("The layer's weights Φ, (n, r), do not fit in the memory: use fewer centres or samples.")
        return torch.cat([self.features.map(read_rows(self.X, rows, self.like)) for rows, _ in self.blocks()])

    def zero(self, t: Tensor) -> Tensor:
        """Return the coefficients of f = 0."""
        return t.new_zeros(len(t), self.features.rank, *t.shape[2:])

    def lift(self, w: Tensor) -> Tensor:
        """Return f at the samples, Φw, (batch, n, …)."""
        v = self.features.to_raw(columns(w)).to(self.like.dtype)
        return uncolumns(torch.cat([(block @ v).double() for _, block in self.blocks()]), w)

    def project(self, u: Tensor, exactly: bool = False) -> Tensor:
        """Return Φᵀu; `exactly` multiplies in float64, whatever the dtype of ψ."""
        dtype = torch.float64 if exactly else self.like.dtype
        matrix = columns(u).to(dtype)
        return self._sum_raw((block.to(dtype).mT @ matrix[rows] for rows, block in self.blocks()), u)

    def _sum_raw(self, parts: Iterator[Tensor], like: Tensor) -> Tensor:
        shape = self.features.raws, columns(like).shape[1]
        total = torch.zeros(shape, dtype=torch.float64, device=self.like.device)
        for part in parts:
            total += part
        return uncolumns(self.features.from_raw(self.sum(total)), like)

    def square(self, w: Tensor, f: Tensor) -> Tensor:
        """Return ‖f‖², per data set, from the coefficients and f at the samples."""
        return per_sample_dot(w, w)

    def hessian(self, curvature: Curvature, lam: float) -> Inverse:
        """Return p ↦ (Hp, ⟨p, Hp⟩), H = ΦᵀDΦ + λI, in one pass."""

        def apply(p: Tensor) -> tuple[Tensor, Tensor]:
            v = self.features.to_raw(columns(p)).to(self.like.dtype)

            def weigh(block: Tensor, rows: slice) -> Tensor:
                u = curvature.times(uncolumns((block @ v).double(), p), rows)
                return block.mT @ columns(u).to(self.like.dtype)

            image = self._sum_raw((weigh(block, rows) for rows, block in self.blocks()), p) + lam * p
            return image, per_sample_dot(p, image)

        return apply

    def invert(self, curvature: Curvature, lam: float) -> Inverse:
        """Return the inverse of (n/s)Φ_SᵀDΦ_S + λI, per data set: S are s sampled rows, D the weights at them.

        Of the rows of the centres it would be Falkon's (Rudi et al., 2017); made again as D moves it follows A″. Where
        a Gram matrix of all rows costs less than the products it saves, S are all. Of vectors, and of more data sets
        than the memory holds factors for, all share the mean weights.
        """
        weights, r = curvature.mean(), self.features.rank
        shared = len(weights) * r * r * 8 > self.memory // 4
        sample, scale, index = self._draw_sample(r * (1 if shared else len(weights)), columns(curvature.weights))
        weights = weights if index is None else weights[:, index]
        differ = self.sum((weights - weights[:1]).abs().sum())
        weights = weights.mean(0, keepdim=True) if shared or not bool(differ) else weights
        factor = sample._factor(weights, lam / scale)

        def apply(g: Tensor) -> tuple[Tensor, Tensor]:
            p = torch.cholesky_solve(g.flatten(2) if g.ndim > 2 else g[..., None], factor).view_as(g) / scale
            return p, per_sample_dot(p, g)

        return apply

    def _draw_sample(self, cost: int, outputs: Tensor) -> tuple["Design", float, Tensor | None]:
        """Return rows whose Gram matrix is about that of all, how many times more those are, and which."""
        n, r = len(self.X), self.features.rank
        total = int(self.sum(torch.tensor([n], device=outputs.device)).item())
        if total <= SAMPLED * r or cost <= GRAM * outputs.shape[1]:
            return self, 1.0, None
        if self._sample is None:
            share = min(n, math.ceil(SAMPLED * r * n / total))
            index = torch.randperm(n, generator=torch.Generator().manual_seed(0))[:share].to(outputs.device)
            rows = read_rows(self.X, index, self.like)
            # φ itself, as its Gram matrices need it
            mapped = Features(self.features.map, None, r, self.features.kernel)
            scale = total / int(self.sum(torch.tensor([share], device=outputs.device)).item())
            self._sample = Design(mapped, rows, self.like, self.memory, self.group), scale, index
        return self._sample

    def _factor(self, weights: Tensor, lam: float) -> Tensor:
        """Return the Cholesky factor of ΦᵀDΦ + λI, (…, r, r), for weights D ≥ 0, (…, n)."""
        r, root = self.features.rank, self.features.root
        gram = torch.zeros(len(weights), r, r, dtype=torch.float64, device=self.like.device)
        for rows, block in self.blocks():
            phi = (block if root is None else block @ root.to(block)).double()  # RᵀψᵀDψR would square the rounding
            for total, each in zip(gram, weights[:, rows], strict=True):
                half = phi * each[:, None].sqrt()
                total += half.mT @ half
        gram = self.sum(gram)
        gram.diagonal(dim1=-2, dim2=-1).add_(lam)
        return jittered_cholesky(gram, torch.finfo(gram.dtype).eps)[0]

    def log_det(self, curvature: Curvature, lam: float) -> Tensor:
        """Return log |I + ΦᵀDΦ/λ|, (batch,)."""
        if curvature.vector:
            raise ValueError(
                "The evidence of a low-rank kernel is not available for Categorical: fit a subset exactly."
            )
        factor = self._factor(curvature.weights, lam)
        return 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) - self.features.rank * math.log(lam)

    def covariance(self, curvature: Curvature, lam: float, across: Tensor, prior: Tensor) -> Tensor:
        """Return Laplace's covariance of f at m points, (batch, m, m); where the features see nothing it is the prior.

        `across`, (m, r), are the features there, and `prior`, (m, m), is the kernel.
        """
        half = torch.linalg.solve_triangular(self._factor(curvature.weights, lam), across.mT, upper=False)
        return half.mT @ half + (prior - across @ across.mT) / lam

    def approximate(self, gap: Tensor, lam: float, error: float, samples: int) -> "Approximation":
        """Return the errors of k̃ and of the fit, from a sample of the rows; exact where it is all of them.

        The full problem is λ-strongly convex in the kernel's norm, and f minimises it over the features' span: so
        ‖f − f*‖ ≤ √(gᵀ(K − K̃)g)/λ + ‖∇J‖/λ, g the `gap`, `error` the last. Random features span other functions.
        """
        if self.group is not None:
            raise ValueError("Ask for the approximation where one process has all rows.")
        n, kernel, g = len(self.X), self.features.kernel, columns(gap)
        generator = torch.Generator().manual_seed(1)  # other rows than those the centres were drawn from
        index = torch.randperm(n, generator=generator)[:samples].to(gap.device)
        XS = read_rows(self.X, index, self.like)
        phi = self.features.map(XS).double()
        missed = kernel(XS, XS).double() - phi @ phi.mT
        share, fit = n / len(XS), None
        if self.features.centres is not None:
            Kg = -phi @ columns(self.project(gap))
            for start in range(0, n, self.rows):
                rows = slice(start, min(n, start + self.rows))
                Kg += kernel(XS, read_rows(self.X, rows, self.like)).double() @ g[rows]
            fit = math.sqrt(share * (g[index] * Kg).sum().clamp(min=0).item()) / lam + error
        trace, norm = share * missed.trace().item(), share * torch.linalg.matrix_norm(missed, 2).item()
        return Approximation(trace if fit is None else max(trace, 0.0), norm, fit)  # below 0 is rounding

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
    leads = group is None or torch.distributed.get_rank(group) == 0
    chosen: list[Any] = [plan.choose(sample, n, lam) if leads else None]
    if group is not None:
        torch.distributed.broadcast_object_list(chosen, src=torch.distributed.get_global_rank(group, 0), group=group)
    memory = free_memory(like.device) if plan.memory is None else plan.memory
    return Design(chosen[0].prepare(like), X, like, memory, group)
