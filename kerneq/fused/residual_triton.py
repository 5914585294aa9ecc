# mypy: ignore-errors
# (Triton is optional and its kernels are not Python that mypy can read.)
"""‖f(z) − z‖ and ‖f(z)‖ in one pass over memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # numbers a step of a program
SPAN = 16  # steps of a program, at most
EPS, TINY = tl.constexpr(torch.finfo(torch.float32).eps), tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def residual_parts(z, image, parts, numbers, span, BLOCK: tl.constexpr):
    """Σ (f(z) − z)² and Σ f(z)² over one part of one sample."""
    sample, part, count = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    start = sample.to(tl.int64) * numbers
    gap = tl.zeros((BLOCK,), tl.float32)
    size = tl.zeros((BLOCK,), tl.float32)
    for step in range(span):
        at = (part * span + step) * BLOCK + tl.arange(0, BLOCK)
        inside = at < numbers
        f = tl.load(image + start + at, mask=inside, other=0.0).to(tl.float32)
        d = f - tl.load(z + start + at, mask=inside, other=0.0).to(tl.float32)
        gap += d * d
        size += f * f
    to = parts + (sample * count + part) * 2
    tl.store(to, tl.sum(gap, 0))
    tl.store(to + 1, tl.sum(size, 0))


@triton.jit
def residual_finish(parts, residual, gap, count, BLOCK: tl.constexpr):
    sample, part = tl.program_id(0), tl.arange(0, BLOCK)
    inside = part < count
    at = parts + (sample * count + part) * 2
    distance = tl.sqrt(tl.sum(tl.load(at, mask=inside, other=0.0), 0))
    size = tl.sqrt(tl.sum(tl.load(at + 1, mask=inside, other=0.0), 0))
    size = tl.maximum(size, EPS * distance)
    tl.store(gap + sample, distance)
    tl.store(residual + sample, distance / tl.maximum(size, TINY))


def residual_and_gap(z: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
    batch, numbers = len(image), image[0].numel()
    blocks = triton.cdiv(numbers, BLOCK)
    span = min(SPAN, blocks)
    count = triton.cdiv(blocks, span)
    parts = torch.empty(batch, count, 2, device=image.device)
    residual, gap = torch.empty(2, batch, device=image.device)
    with torch.cuda.device_of(image):
        residual_parts[(batch, count)](z, image, parts, numbers, span, BLOCK)
        residual_finish[(batch,)](parts, residual, gap, count, triton.next_power_of_2(count))
    return residual, gap
