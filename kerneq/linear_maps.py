"""Linear maps W from state to features, fixed for one solve, and their norm.

W is a matrix, or a zero-padded convolution. ‖W‖ is ‖Wu‖ at a unit vector u near the top singular vector, which Lanczos
finds; it is differentiable twice. That is from below: Lanczos also says by how much ‖W‖ may exceed it.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from .conjugate_gradient import conjugate_gradient
from .fused.convolution import convolve, convolve_relu, fuses_relu
from .tensors import cached, is_transformed, magnitude, needs_graph, widened

SETTLE_STEPS = 40  # Lanczos steps for a weight not seen before
TRACK_STEPS = 3  # in a training step, from the u of the step before; one power iteration let ‖W‖ run ahead by half
CHECK_STEPS = 20  # to see whether a saved u is still near the top singular vector
BELIEVED = (
    5e-3  # by what share ‖Wu‖ of a saved u that is believed may fall short of what these find: bfloat16 takes 4e-3
)
DOUBT = 1e-6  # how likely it may be that ‖W‖ exceeds its bound: that a random start has missed the top singular vector
NOISE = 1e-2  # of a random vector, that a known start gets, so that it cannot miss it
CURVATURE_STEPS = 500  # of conjugate gradient, at most, for a second derivative of the norm


@final
@dataclasses.dataclass(frozen=True)
class LinearMap:
    """W, by its weight: a matrix (features, state), or a convolution (features, state, k, k), k odd.

    z is (batch, state) and v = Wz (batch, features), or (batch, state, height, width) and (batch, features, height,
    width): pictures are zero-padded and keep their size. The products are differentiated like plain operations.
    """

    weight: Tensor

    def __call__(self, z: Tensor) -> Tensor:
        """Return Wz."""
        if self.weight.dim() == 2:
            return F.linear(z, self.weight)
        fused = convolve(z, self.weight) if z.is_cuda else None
        return F.conv2d(z, self.weight, padding=self.weight.shape[-1] // 2) if fused is None else fused

    def adjoint(self, v: Tensor) -> Tensor:
        """Return Wᵀv."""
        if self.weight.dim() == 2:
            return F.linear(v, self.weight.mT)
        return F.conv_transpose2d(v, self.weight, padding=self.weight.shape[-1] // 2)

    def adjoint_relu(self, v: Tensor, shift: Tensor | None) -> Tensor | None:
        """Return max(Wᵀv + shift, 0) in one pass over memory; None where no GPU program does that."""
        return convolve_relu(v, self._flipped, shift) if fuses_relu(v, self.weight, shift) else None

    def weight_gradient(self, z: Tensor, v: Tensor) -> Tensor:
        """Return the gradient of ⟨Wz, v⟩ with respect to the weight; without a graph."""
        if self.weight.dim() == 2:
            return v.mT @ z
        return conv2d_weight(z, list(self.weight.shape), v, padding=self.weight.shape[-1] // 2)  # type: ignore[no-untyped-call]

    @cached
    def _flipped(self) -> Tensor:
        """The weight of Wᵀ as a convolution of its own."""
        return self.weight.transpose(0, 1).flip(2, 3).contiguous(memory_format=torch.channels_last)


def norm_at(weight: Tensor, vector: Tensor) -> Tensor:
    """Return ‖Wu‖ / ‖u‖, a number that is differentiable twice with respect to W as ‖W‖ is."""
    u = widened(vector).clone()  # a later step may change the vector while this one waits for its backward pass
    w, again = LinearMap(widened(weight)), needs_graph(weight) and not is_transformed()
    with torch.autocast(u.device.type, enabled=False):
        norm: Tensor = torch.linalg.vector_norm(w(u.unsqueeze(0))) / torch.linalg.vector_norm(u)
    if again:
        norm = _OperatorNorm.apply(norm, weight, u)  # type: ignore[no-untyped-call]
    return norm


class _OperatorNorm(torch.autograd.Function):
    """‖Wu‖ as it was computed, with u held fixed: its gradient is that of ‖W‖, because ‖Wu‖ is largest at u.

    For a second derivative u has to depend on W: the gradient vuᵀ, v = Wu / ‖Wu‖, is then computed again with such a u.
    """

    @staticmethod
    def forward(ctx: Any, norm: Tensor, weight: Tensor, u: Tensor) -> Tensor:
        ctx.save_for_backward(weight, u)
        return norm.view_as(norm)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        if not torch.is_grad_enabled():
            return g, None, None
        weight, u = ctx.saved_tensors
        with torch.autocast(u.device.type, enabled=False):
            weight = widened(weight)
            u = _TopVector.apply(weight, _unit(u).unsqueeze(0))  # type: ignore[no-untyped-call]
            view = weight.view_as(weight)  # ∂‖Wu‖/∂W at fixed u: u depends on the weight, not on this view
            norm = torch.linalg.vector_norm(LinearMap(view)(u))
            return None, torch.autograd.grad(norm, view, g, create_graph=True)[0], None


class _TopVector(torch.autograd.Function):
    """The unit vector u, (1, ...), as a function of W: (σ²I − WᵀW) du = (I − uuᵀ) d(WᵀW) u, and du ⟂ u.

    It can be differentiated once. Its gradient needs the x with Bx = (I − uuᵀ)g, B = σ²(I + uuᵀ) − WᵀW, which is
    definite where the top singular value σ = ‖Wu‖ is simple. Where it is not, as for an orthogonal W_h, the norm has no
    second derivative, and u counts as constant in the directions of the same singular value. Where u has not
    converged, B may be indefinite. Conjugate gradient stops in both cases.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, u: Tensor) -> Tensor:
        u = u.clone()
        ctx.save_for_backward(weight, u)
        return u

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        weight, u = ctx.saved_tensors
        eps = torch.finfo(u.dtype).eps

        def apply(x: Tensor) -> Tensor:
            y = square * (x + (x * u).sum() * u) - w.adjoint(w(x))
            return torch.where((x * y).sum() > eps**0.5 * square * x.square().sum(), y, 0.0)

        with torch.autocast(u.device.type, enabled=False):
            w = LinearMap(weight)
            v = w(u)
            square = v.square().sum()
            off = g - (g * u).sum() * u
            x = conjugate_gradient(apply, off, eps**0.75, CURVATURE_STEPS, check_every=1).value
            return w.weight_gradient(x, v) + w.weight_gradient(u, w(x)), None


def track_top_vector(weight: Tensor, known: Tensor) -> Tensor:
    """Return u, near the top singular vector of W, by a few steps from the known one of a weight little different."""
    w = _unit_map(weight)
    with torch.autocast(weight.device.type, enabled=False):
        return top_singular_vector(w, w.adjoint, known.to(w.weight), TRACK_STEPS).to(weight.dtype)


def settle_top_vector(weight: Tensor, shape: tuple[int, ...], known: Tensor | None) -> tuple[Tensor, float]:
    """Return u, near the top singular vector of W, found by many steps, and the factor by which ‖W‖ may exceed ‖Wu‖.

    They start at a fixed random vector, so that neither the global seed nor the device changes where they end. A
    little of it is added to a known vector, which may be another singular vector of a changed weight.
    """
    w, noise = _unit_map(weight), _fixed_noise(weight, shape)
    start = noise if known is None else _unit(known.to(noise)) + NOISE * noise
    with torch.autocast(weight.device.type, enabled=False):
        found, bound = _search(w, start, SETTLE_STEPS, 1.0 if known is None else NOISE)
        return found.to(weight.dtype), _excess(w, found, bound)


def check_top_vector(vector: Tensor, weight: Tensor) -> float | None:
    """Return the factor by which ‖W‖ may exceed ‖Wu‖, or None where u is not the top singular vector, up to what saving
    loses.

    Any other singular vector solves WᵀWu = σ²u as well, and a mean of two models has the mark of both, and the u of
    neither: so a few steps look for a larger ‖Wu‖.
    """
    if weight.is_meta or vector.numel() == 0 or not bool(vector.isfinite().all()):
        return None
    w, u = _unit_map(weight), _unit(widened(vector))
    with torch.autocast(u.device.type, enabled=False):
        found, bound = _search(w, u + _fixed_noise(weight, tuple(vector.shape)), CHECK_STEPS, 0.5)
        known, better = (torch.linalg.vector_norm(w(x.unsqueeze(0))) for x in (u, found))
        return _excess(w, u, bound) if bool(better <= (1 + BELIEVED) * known) else None


def _fixed_noise(weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a unit vector that knows nothing of the weight."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return _unit(noise).to(widened(weight))


def _excess(w: LinearMap, u: Tensor, bound: float) -> float:
    """Return `bound` over ‖Wu‖, at least 1 and what rounding may take; 1 for W = 0."""
    norm = float(torch.linalg.vector_norm(w(_unit(widened(u)).unsqueeze(0))))
    rounding = 1 + 1e3 * torch.finfo(w.weight.dtype).eps
    if norm == 0:
        return 1.0 if bound == 0 else math.inf
    return max(1.0, bound / norm) * rounding if math.isfinite(bound / norm) else math.inf


def _unit_map(weight: Tensor) -> LinearMap:
    """Return W divided by a power of two: it has the same singular vectors, and WᵀW can be computed."""
    weight = widened(weight.detach())
    return LinearMap(weight / magnitude(weight.unsqueeze(0))[0])


def top_singular_vector(
    apply: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor], start: Tensor, steps: int
) -> Tensor:
    """Return a unit vector u with ‖Au‖ close to ‖A‖, by Lanczos: `steps` products with AᵀA, the first with `start`.

    u is the best vector of the Krylov space. Lanczos is far ahead of power iteration where singular values are close
    to each other, as they are for convolutions, and where another singular value has overtaken that of `start`.
    Nothing waits for the device, as it would with `torch.lobpcg` or an eigensolver.
    """
    basis, images, _ = run_lanczos(apply, adjoint, start, steps)
    return _best_vector(basis, images, rounds=1 if steps <= TRACK_STEPS else 4).view_as(start)


def run_lanczos(
    apply: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor], start: Tensor, steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return an orthonormal basis of the Krylov space of AᵀA and `start`, and AᵀA times it, both (steps, numbers).

    And βⱼ, (steps,): how long the part of the j-th product is that lies outside of the basis so far.
    """
    u = _unit(start)
    steps = min(steps, u.numel())
    basis, images = u.new_zeros(2, steps, u.numel())
    outside = u.new_zeros(steps)
    basis[0] = u.flatten()
    for step in range(steps):
        images[step] = w = adjoint(apply(basis[step].view_as(u).unsqueeze(0))).flatten()
        known = basis[: step + 1]
        w = torch.addmv(w, known.mT, known @ w, alpha=-1)
        outside[step] = torch.linalg.vector_norm(w)
        if step + 1 == steps:
            break
        # Where the Krylov space is exhausted, w is rounding. Made orthogonal to the basis it is as good a direction as
        # any, and finds what has overtaken an exact u. Where w is 0, a basis vector near 0 does no harm.
        w = _unit(w)
        w = _unit(torch.addmv(w, known.mT, known @ w, alpha=-1))
        basis[step + 1] = torch.addmv(w, known.mT, known @ w, alpha=-1)
    return basis, images, outside


def _best_vector(basis: Tensor, images: Tensor, rounds: int = 4) -> Tensor:
    """Return the unit vector of a Krylov space that AᵀA stretches most, (numbers,); one round leaves 0.1 % of the norm
    to be found."""
    found = _top_eigenvector((basis @ images.mT).double(), rounds).to(basis) @ basis
    length = torch.linalg.vector_norm(found)
    # A zero operator has no such direction; that an operator is not finite shows in ‖Au‖.
    return torch.where((length > 0) & (length < torch.inf), found / length, basis[0])


def _search(w: LinearMap, start: Tensor, steps: int, share: float) -> tuple[Tensor, float]:
    """Return a unit vector u with ‖Wu‖ close to ‖W‖, and an upper bound on ‖W‖ that fails with the probability `DOUBT`.

    After k steps the next Lanczos vector is pₖ(WᵀW)s, of length 1, with pₖ(t) = Πⱼ (t − θⱼ)/βⱼ, where θⱼ are the Ritz
    values. So pₖ(σ²)|⟨s, x⟩| ≤ 1 for the top singular value σ and its vector x; and as pₖ grows beyond the θⱼ, σ² is at
    most the t with pₖ(t) = 1/|⟨s, x⟩|. A random unit vector of n numbers has |⟨s, x⟩| < δ with a probability of at most
    δ√(2n/π), and if it has a `share` in s, δ/share of that (Hochstenbach, 2013).
    """
    basis, images, outside = run_lanczos(w, w.adjoint, start, steps)
    found, ritz = _best_vector(basis, images).view_as(start), (basis @ images.mT).double().cpu()
    if not bool(ritz.isfinite().all()):
        return found, math.inf
    theta = torch.linalg.eigvalsh((ritz + ritz.mT) / 2)
    top = float(theta[-1])
    if top <= 0:
        return found, 0.0
    betas = outside.double().cpu().clamp_min(10 * top * torch.finfo(basis.dtype).eps)  # below it is rounding: longer is
    least = DOUBT * share * math.sqrt(math.pi / (2 * start.numel()))  # safe
    limit = float(betas.log().sum()) - math.log(least)
    low, high = top, 2 * top + float(betas.max()) / least
    for _ in range(200):
        middle = (low + high) / 2
        reached = float((middle - theta).clamp_min(torch.finfo(theta.dtype).tiny).log().sum()) >= limit
        low, high = (low, middle) if reached else (middle, high)
    return found, math.sqrt(high)


def _top_eigenvector(square: Tensor, rounds: int) -> Tensor:
    """Return the top eigenvector of a small positive semidefinite matrix, with 1 as its largest entry.

    The matrix is squared 7 times a round, until its other eigenvalues vanish. The longest column is taken: the first
    has next to nothing of the eigenvector where another singular value has overtaken that of the start.
    """
    square = square + square.mT
    for _ in range(rounds):
        square = square / square.trace()  # of n eigenvalues the top one is 1/n at least: n⁻¹²⁸ can still be written
        for _ in range(7):
            square = square @ square
    column = square.index_select(1, square.diagonal().argmax(keepdim=True))[:, 0]
    return column / column.abs().amax()  # n⁻¹²⁸ cannot be squared


def bound_top_eigenvalue(gram: Tensor, squarings: int = 10) -> Tensor:
    """Return an upper bound on the eigenvalues of Hermitian matrices (..., m, m) ⪰ 0, near the largest of each, (...).

    It is ‖G^{2ᵗ}‖_F^{2⁻ᵗ}, by squaring t times (Delattre et al., 2023), too large by rank^{2⁻ᵗ⁻¹} at most, 1.003 for
    500 and t = 10: products only, which a GPU does fast, with a gradient that is nowhere infinite.
    """
    log = gram.new_zeros(gram.shape[:-2], dtype=gram.abs().dtype)
    for squared in range(squarings + 1):
        length = torch.linalg.matrix_norm(gram).clamp_min(torch.finfo(log.dtype).tiny)
        log = log + length.log() / 2**squared
        gram = gram / length[..., None, None]
        if squared < squarings:
            gram = gram @ gram
    return log.exp() * (1 + 4 * gram.shape[-1] * torch.finfo(log.dtype).eps)


def _unit(u: Tensor) -> Tensor:
    return u / torch.linalg.vector_norm(u).clamp_min(torch.finfo(u.dtype).tiny)
