"""A training step of many small convolutional equilibrium models on a GPU: one program a model and picture.

A program solves z = σ(W₁z + W₂y), reads out f = V₁z + V₂y, and solves the adjoint u = W₁ᵀσ′u + V₁ᵀ∂L/∂f, all three
channels of its picture in registers; only a convolution's neighbours pass through memory (of the size of the cache).
The gradients of the filters are correlations of σ′u and ∂L/∂f with z and y: five batched matrix products each.

Pictures are stored (models, batch, h + k − 1, 3, width): a border of zeros instead of masks, and rows outside channels,
so that the rows of all pictures of a model are one matrix.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from bank import Iteration
from torch import Tensor
from torch.nn import functional as F

EPS, TINY = tl.constexpr(torch.finfo(torch.float32).eps), tl.constexpr(torch.finfo(torch.float32).tiny)
CHANNELS = tl.constexpr(3)


@triton.jit
def _convolve(source, filters, at, row, PLANE: tl.constexpr, K: tl.constexpr, ADJOINT: tl.constexpr):
    """Three channels of the convolution, or of its adjoint, at the pixels whose upper left neighbours are `at`."""
    a0 = tl.zeros(at.shape, tl.float32)
    a1 = tl.zeros(at.shape, tl.float32)
    a2 = tl.zeros(at.shape, tl.float32)
    for dy in range(K):
        for i in tl.static_range(3):
            for dx in tl.static_range(K):
                v = tl.load(source + at + dy * row + i * PLANE + dx)
                if ADJOINT:
                    tap = filters + i * CHANNELS * K * K + (K - 1 - dy) * K + (K - 1 - dx)
                    a0 += tl.load(tap) * v
                    a1 += tl.load(tap + K * K) * v
                    a2 += tl.load(tap + 2 * K * K) * v
                else:
                    tap = filters + i * K * K + dy * K + dx
                    a0 += tl.load(tap) * v
                    a1 += tl.load(tap + CHANNELS * K * K) * v
                    a2 += tl.load(tap + 2 * CHANNELS * K * K) * v
    return a0, a1, a2


@triton.jit
def _put(to, at, PLANE: tl.constexpr, a0, a1, a2, keep):
    tl.store(to + at, a0, mask=keep)
    tl.store(to + at + PLANE, a1, mask=keep)
    tl.store(to + at + 2 * PLANE, a2, mask=keep)


@triton.jit
def _relu(x):
    return tl.where(x <= 0, 0.0, x)  # not a number stays so


@triton.jit
def _residual(d0, d1, d2, f0, f1, f2):
    """‖f(z) − z‖ / ‖f(z)‖, as `kerneq.solvers.base.relative_residual`."""
    gap = tl.sqrt(tl.sum(d0 * d0 + d1 * d1 + d2 * d2, 0))
    size = tl.sqrt(tl.sum(f0 * f0 + f1 * f1 + f2 * f2, 0))
    size = tl.where(size >= EPS * gap, size, EPS * gap)
    return gap / tl.where(size >= TINY, size, TINY)


@triton.jit(do_not_specialize=["row"])  # a stride of unknown divisibility: every load one number a thread, side by side
def _step(
    noisy, clean, W1, W2, V1, V2, spare, z_, d_, g_, losses, batch, row, tol, relaxation, max_steps, scale,
    S: tl.constexpr, K: tl.constexpr, PLANE: tl.constexpr, RECTIFIED: tl.constexpr, RESCUE: tl.constexpr,
    BACKWARD: tl.constexpr,
):  # fmt: skip
    pid = tl.num_programs(0) - 1 - tl.program_id(0)  # large norms are last and take longest: they go first
    model, b = pid // batch, pid % batch
    pixel = tl.arange(0, S * S)
    y, x = pixel // S, pixel % S
    at = y * row + x
    inner = at + (K // 2) * row + K // 2  # a pixel itself
    size: tl.constexpr = CHANNELS * CHANNELS * K * K
    W1, W2, V1, V2 = W1 + model * size, W2 + model * size, V1 + model * size, V2 + model * size
    whole = (S + K - 1) * row
    noisy = noisy + b * whole
    one, z_, d_, g_ = spare + pid * 2 * whole, z_ + pid * whole, d_ + pid * whole, g_ + pid * whole
    every = pixel >= 0
    zero = tl.zeros((S * S,), tl.float32)

    c0, c1, c2 = _convolve(noisy, W2, at, row, PLANE, K, False)
    u0, u1, u2 = zero, zero, zero
    _put(one, inner, PLANE, zero, zero, zero, every)
    _put(z_, inner, PLANE, zero, zero, zero, every)
    tl.debug_barrier()
    best = tl.sum(zero, 0) + float("inf")
    step = 0
    going = step < max_steps
    while going:
        f0, f1, f2 = _convolve(one + (step % 2) * whole, W1, at, row, PLANE, K, False)
        f0, f1, f2 = _relu(f0 + c0), _relu(f1 + c1), _relu(f2 + c2)
        residual = _residual(f0 - u0, f1 - u1, f2 - u2, f0, f1, f2)
        n0, n1, n2 = u0 + relaxation * (f0 - u0), u1 + relaxation * (f1 - u1), u2 + relaxation * (f2 - u2)
        done = residual <= tol
        keep = every
        if RESCUE:
            keep = zero + residual <= best
            best = tl.where(residual <= best, residual, best)
        _put(z_, inner, PLANE, tl.where(done, u0, n0), tl.where(done, u1, n1), tl.where(done, u2, n2), keep)
        step += 1
        _put(one + (step % 2) * whole, inner, PLANE, n0, n1, n2, every)
        tl.debug_barrier()
        u0, u1, u2 = n0, n1, n2
        going = (step < max_steps) & (residual > tol)  # not a number ends it
        if not RESCUE:
            going = (step < max_steps) & (done == 0)

    f0, f1, f2 = _convolve(z_, V1, at, row, PLANE, K, False)
    e0, e1, e2 = _convolve(noisy, V2, at, row, PLANE, K, False)
    f0, f1, f2 = f0 + e0, f1 + e1, f2 + e2
    if RECTIFIED:
        f0, f1, f2 = _relu(f0), _relu(f1), _relu(f2)
    target = clean + b * CHANNELS * S * S + y * CHANNELS * S + x
    e0, e1, e2 = f0 - tl.load(target), f1 - tl.load(target + S), f2 - tl.load(target + 2 * S)
    tl.store(losses + pid, tl.sum(e0 * e0 + e1 * e1 + e2 * e2, 0) / (CHANNELS * S * S))
    if BACKWARD:
        e0, e1, e2 = scale * e0, scale * e1, scale * e2
        if RECTIFIED:
            e0, e1, e2 = tl.where(f0 == 0, 0.0, e0), tl.where(f1 == 0, 0.0, e1), tl.where(f2 == 0, 0.0, e2)
        _put(g_, inner, PLANE, e0, e1, e2, every)
        m0, m1, m2 = _convolve(z_, W1, at, row, PLANE, K, False)
        m0, m1, m2 = tl.where(m0 + c0 > 0, 1.0, 0.0), tl.where(m1 + c1 > 0, 1.0, 0.0), tl.where(m2 + c2 > 0, 1.0, 0.0)
        tl.debug_barrier()
        c0, c1, c2 = _convolve(g_, V1, at, row, PLANE, K, True)
        u0, u1, u2 = c0, c1, c2
        _put(one, inner, PLANE, m0 * u0, m1 * u1, m2 * u2, every)
        _put(d_, inner, PLANE, m0 * u0, m1 * u1, m2 * u2, every)
        tl.debug_barrier()
        best = tl.sum(zero, 0) + float("inf")
        step = 0
        going = step < max_steps
        while going:
            f0, f1, f2 = _convolve(one + (step % 2) * whole, W1, at, row, PLANE, K, True)
            f0, f1, f2 = f0 + c0, f1 + c1, f2 + c2
            residual = _residual(f0 - u0, f1 - u1, f2 - u2, f0, f1, f2)
            n0, n1, n2 = u0 + relaxation * (f0 - u0), u1 + relaxation * (f1 - u1), u2 + relaxation * (f2 - u2)
            done = residual <= tol
            keep = every
            if RESCUE:
                keep = zero + residual <= best
                best = tl.where(residual <= best, residual, best)
            v0, v1, v2 = tl.where(done, u0, n0), tl.where(done, u1, n1), tl.where(done, u2, n2)
            _put(d_, inner, PLANE, m0 * v0, m1 * v1, m2 * v2, keep)
            step += 1
            _put(one + (step % 2) * whole, inner, PLANE, m0 * n0, m1 * n1, m2 * n2, every)
            tl.debug_barrier()
            u0, u1, u2 = n0, n1, n2
            going = (step < max_steps) & (residual > tol)
            if not RESCUE:
                going = (step < max_steps) & (done == 0)


def fits(y: Tensor, filters: Tensor) -> bool:
    """Three channels, and a picture of 2ⁿ × 2ⁿ pixels that fits a program's registers."""
    batch, channels, height, width = y.shape
    powers = height == width and width & (width - 1) == 0 and 8 <= width <= 32
    return channels == filters.shape[2] == filters.shape[1] == 3 and powers


def _bordered(images: Tensor, side: int, plane: int) -> Tensor:
    """(batch, 3, h, w) → (batch, h + k − 1, 3, plane) with zeros around."""
    pad, width = side // 2, images.shape[-1]
    return F.pad(images.transpose(1, 2), (pad, plane - width - pad, 0, 0, pad, pad)).contiguous()


def _correlations(d: Tensor, z: Tensor, side: int, width: int) -> Tensor:
    """Σ over pictures and pixels p of d[o, p] z[i, p + δ]: (models, 3, 3, k, k), from rows (models, rows, 3, plane)."""
    models, rows, channels, plane = d.shape
    pad, count = side // 2, rows - side + 1
    left, right = d.flatten(2)[:, pad : pad + count].mT, z.flatten(2)
    products = torch.stack([torch.bmm(left, right[:, dy : dy + count]) for dy in range(side)], 1)
    line = channels * plane
    shape = (models, channels, channels, side, side, width)
    strides = (side * line * line, plane * line, plane, line * line, 1, line + 1)
    return products.as_strided(shape, strides, pad * line).sum(-1)


class _Errors(torch.autograd.Function):
    """The loss of each model; the gradients are made with it."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, iteration: Iteration, rectified: bool, backward: bool, *weights: Tensor
    ) -> Tensor:
        limits = (iteration.tol, iteration.relaxation, iteration.max_steps)
        weights = tuple(weight.detach().contiguous() for weight in weights)
        models, side, (batch, _, _, size) = len(weights[0]), weights[0].shape[-1], y.shape
        plane = -(-(size + side - 1) // 4) * 4
        shape = (models, batch, size + side - 1, 3, plane)
        noisy, clean = _bordered(y, side, plane), x.transpose(1, 2).contiguous()
        spare = y.new_zeros(2 * models, *shape[1:])
        z, d, g = (y.new_zeros(shape) if backward or i == 0 else y.new_empty(1) for i in range(3))
        losses = y.new_empty(models, batch)
        scale = 2 / (batch * 3 * size * size)
        with torch.cuda.device_of(y):
            _step[(models * batch,)](
                noisy, clean, *weights, spare, z, d, g, losses, batch, 3 * plane, *limits, scale,
                size, side, plane, rectified, iteration.rescue, backward, num_warps=4, maxnreg=168,
            )  # fmt: skip
        if backward:
            rows = (models, batch * shape[2], 3, plane)
            z, d, g = z.view(rows), d.view(rows), g.view(rows)
            seen = noisy.view(1, *rows[1:]).expand(rows)
            ctx.gradients = [_correlations(a, b, side, size) for a, b in ((d, z), (d, seen), (g, z), (g, seen))]
        return losses.mean(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, None, None, *(grad[:, None, None, None, None] * made for made in ctx.gradients)


def errors(
    weights: tuple[Tensor, Tensor, Tensor, Tensor], y: Tensor, x: Tensor, iteration: Iteration, rectified: bool
) -> Tensor:
    """Mean squared errors (models,) of the predictions from y for x, (batch, 3, h, w) each, with their gradients."""
    return _Errors.apply(y, x, iteration, rectified, torch.is_grad_enabled(), *weights)
