"""A training step of many small dense equilibrium models on a GPU: one program a model and 64 rows of its batch.

A program solves z = tanh(W₁z + W₂y + b) and reads out f = V₁z + V₂y + c, another solves the adjoint
u = W₁ᵀσ′u + V₁ᵀ∂L/∂f, without touching memory in between; the residual is that of the rows together. Products are
in TF32. The gradients of the weights are batched matrix products.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from bank import Iteration
from torch import Tensor
from torch.nn import functional as F

ROWS = 64
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def _tanh(x):
    return 1 - 2 / (tl.exp(2 * x) + 1)


@triton.jit
def _residual(gap, image):
    """‖f(z) − z‖ / ‖f(z)‖ of all rows together."""
    size = tl.sqrt(tl.sum(tl.sum(image * image, 1), 0))
    return tl.sqrt(tl.sum(tl.sum(gap * gap, 1), 0)) / tl.where(size >= TINY, size, TINY)


@triton.jit
def _transposed(matrix, model, N: tl.constexpr):
    """Wᵀ of a model, from W stored (models, N, N): in the order in which matrix units want it."""
    return tl.load(matrix + model * N * N + tl.arange(0, N)[None, :] * N + tl.arange(0, N)[:, None])


@triton.jit
def _forward(
    y, x, W1, W2, V1, V2, b, c, z_, slope_, g_, losses, count, tol, relaxation, max_steps, scale,
    n: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """The equilibrium from the z that is there, the loss, and for a backward pass z, σ′ and ∂L/∂f."""
    model, block, blocks = tl.program_id(1), tl.program_id(0), tl.num_programs(0)
    row, column = block * ROWS + tl.arange(0, ROWS), tl.arange(0, N)
    keep = (row < count)[:, None] & (column < n)[None, :]
    at = model.to(tl.int64) * count * n + (row[:, None] * n + column[None, :])
    drive = tl.dot(tl.load(y + at, mask=keep, other=0.0), _transposed(W2, model, N))
    drive = tl.where(keep, drive + tl.load(b + model * N + column)[None, :], 0.0)
    z = tl.load(z_ + at, mask=keep, other=0.0)
    matrix = _transposed(W1, model, N)
    step = 0
    going = step < max_steps
    while going:
        f = _tanh(tl.dot(z, matrix) + drive)
        residual = _residual(f - z, f)
        z = tl.where(residual <= tol, z, z + relaxation * (f - z))
        step += 1
        going = (step < max_steps) & (residual > tol)
    if BACKWARD:
        tl.store(z_ + at, z, mask=keep)
        image = _tanh(tl.dot(z, matrix) + drive)
        tl.store(slope_ + at, 1 - image * image, mask=keep)
    e = tl.dot(z, _transposed(V1, model, N)) + tl.load(c + model * N + column)[None, :]
    e += tl.dot(tl.load(y + at, mask=keep, other=0.0), _transposed(V2, model, N))
    e = tl.where(keep, e - tl.load(x + at, mask=keep, other=0.0), 0.0)
    tl.store(losses + model * blocks + block, tl.sum(tl.sum(e * e, 1), 0))
    if BACKWARD:
        tl.store(g_ + at, scale * e, mask=keep)


@triton.jit
def _adjoint(
    W1, V1, slope_, g_, count, tol, relaxation, max_steps, n: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr
):
    """u = W₁ᵀσ′u + V₁ᵀg, from W₁ᵀ and V₁ᵀ; σ′u takes the place of σ′."""
    model, block = tl.program_id(1), tl.program_id(0)
    row, column = block * ROWS + tl.arange(0, ROWS), tl.arange(0, N)
    keep = (row < count)[:, None] & (column < n)[None, :]
    at = model.to(tl.int64) * count * n + (row[:, None] * n + column[None, :])
    source = tl.dot(tl.load(g_ + at, mask=keep, other=0.0), _transposed(V1, model, N))
    slope = tl.load(slope_ + at, mask=keep, other=0.0)
    matrix = _transposed(W1, model, N)
    u = source
    step = 0
    going = step < max_steps
    while going:
        f = tl.dot(slope * u, matrix) + source
        residual = _residual(f - u, f)
        u = tl.where(residual <= tol, u, u + relaxation * (f - u))
        step += 1
        going = (step < max_steps) & (residual > tol)
    tl.store(slope_ + at, slope * u, mask=keep)


def _padded(weight: Tensor, width: int) -> Tensor:
    """Matrices (models, n, n) or rows (models, 1, n) with zeros up to the width."""
    short = width - weight.shape[-1]
    return F.pad(weight, (0, short, 0, short if weight.shape[1] > 1 else 0)).contiguous()


class _Errors(torch.autograd.Function):
    """The loss of each model; the gradients are made with it."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        x: Tensor,
        start: Tensor | None,
        iteration: Iteration,
        backward: bool,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        limits = (iteration.tol, iteration.relaxation, iteration.max_steps)
        models, count, n = y.shape
        width = max(16, triton.next_power_of_2(n))
        weights = tuple(_padded(weight.detach(), width) for weight in weights)
        z = torch.zeros_like(y) if start is None else start
        d, g = (torch.empty_like(y) if backward else z for _ in range(2))
        blocks = triton.cdiv(count, ROWS)
        losses = y.new_empty(models, blocks)
        grid, W1, V1 = (blocks, models), weights[0], weights[2]
        with torch.cuda.device_of(y):
            _forward[grid](
                y, x, *weights, z, d, g, losses, count, *limits, 2 / (count * n),
                n, ROWS, width, backward, num_warps=8, num_stages=1,
            )  # fmt: skip
            if backward:
                turned = (W1.mT.contiguous(), V1.mT.contiguous())
                _adjoint[grid](*turned, d, g, count, *limits, n, ROWS, width, num_warps=8, num_stages=1)
        if backward:
            products = [torch.bmm(a.mT, v) for a, v in ((d, z), (d, y), (g, z), (g, y))]
            ctx.gradients = [*products, d.sum(1, keepdim=True), g.sum(1, keepdim=True)]
        ctx.mark_non_differentiable(z)
        return losses.sum(1) / (count * n), z

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, None, None, *(grad[:, None, None] * made for made in ctx.gradients)


def errors(
    weights: tuple[Tensor, ...], y: Tensor, x: Tensor, start: Tensor | None, iteration: Iteration
) -> tuple[Tensor, Tensor]:
    """Mean squared errors (models,) of the predictions from y for x, (models, count, n) each, with gradients, and z.

    `weights` are W₁, W₂, V₁, V₂, b, c; `start`, where the solve begins, is overwritten by the equilibrium.
    """
    found, z = _Errors.apply(y, x, start, iteration, torch.is_grad_enabled(), *weights)
    return found, z
