"""The residual in one pass over memory, and a step of Anderson's history: enter, weigh and mix in two launches, or in
one where samples are small.

Numbers moved, with N in a state: the residual reads z and the image, 2N. Entering reads z, the image and the other
m − 1 gaps and writes two entries, mixing reads m images and writes the mixture: (2m + 4) N, which is the floor.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import processors

BLOCK = 4096  # numbers a step of a program that measures the residual
SPAN = 16  # steps of such a program, at most
TILE = 8192  # numbers of all entries together that a program holds
SMALL = 8192  # numbers of a sample that one program does alone, start to end
PROGRAMS = 16  # a multiprocessor, at least, where samples are shared between programs
EPS, TINY = tl.constexpr(torch.finfo(torch.float32).eps), tl.constexpr(torch.finfo(torch.float32).tiny)
INF = tl.constexpr(float("inf"))


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
    tl.store(residual + sample, tl.where(size == INF, size, distance / tl.maximum(size, TINY)))


def residual_and_gap(z: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
    """‖f(z) − z‖ / ‖f(z)‖ and ‖f(z) − z‖ of each sample; z and image are stored alike, without holes."""
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


@triton.jit
def _enter(z, image, images, gaps, beta, b, start, stop, slot, filled, numbers, COUNT, M, BLOCK):
    """Write the entry between start and stop; ⟨gapⱼ, gap⟩ there, (M,)."""
    j = tl.arange(0, M)[:, None]
    others = (j < filled) & (j != slot)
    entry = (b * COUNT + slot) * numbers
    total = tl.zeros((M, BLOCK), tl.float32)
    for block in range(start, stop, BLOCK):
        at = block + tl.arange(0, BLOCK)
        inside = at < stop
        f = tl.load(image + b * numbers + at, mask=inside, other=0.0).to(tl.float32)
        wide = f - tl.load(z + b * numbers + at, mask=inside, other=0.0).to(tl.float32)
        gap = wide.to(gaps.dtype.element_ty)
        if beta is not None:
            f -= (1 - tl.load(beta).to(tl.float32)) * wide
        tl.store(images + entry + at, f.to(images.dtype.element_ty), mask=inside)
        tl.store(gaps + entry + at, gap, mask=inside)
        many = tl.load(gaps + (b * COUNT + j) * numbers + at[None, :], mask=others & inside[None, :], other=0.0)
        gap = gap.to(tl.float32)[None, :]
        total += tl.where(j == slot, gap, many.to(tl.float32)) * gap
    return tl.sum(total, 1)


@triton.jit
def _weigh(products, gram, b, slot, filled, ridge, COUNT, M):
    """Enter the products in the Gram matrix: its diagonal, and α as `anderson_weights` has it, (M,) each; by
    Gauss-Jordan elimination."""
    i = tl.arange(0, M)
    row, column, counts = i[:, None], i[None, :], i < filled
    place = gram + b * COUNT * COUNT + row * COUNT + column
    both = (row < COUNT) & (column < COUNT)
    G = tl.load(place, mask=both, other=0.0)
    G = tl.where(row == slot, products[None, :], tl.where(column == slot, products[:, None], G))
    tl.store(place, G, mask=both & ((row == slot) | (column == slot)))

    square = tl.sum(tl.where(row == column, G, 0.0), 1)
    size = tl.where(counts, tl.sqrt(tl.where(square < TINY, TINY, square)), INF)
    inverse = tl.where(counts, tl.min(size, 0) / size, 0.0)
    unit = G / (size[:, None] * size[None, :])
    usable = counts[:, None] & counts[None, :] & (tl.abs(unit) < INF)
    A = tl.where(row == column, 1.0 + ridge, tl.where(usable, unit, 0.0))
    x = inverse
    for k in tl.static_range(COUNT):
        pivots = tl.sum(tl.where(row == k, A, 0.0), 0)
        factor = tl.sum(tl.where(column == k, A, 0.0), 1) / tl.sum(tl.where(i == k, pivots, 0.0), 0)
        factor = tl.where(i == k, 0.0, factor)
        A -= factor[:, None] * pivots[None, :]
        x -= factor * tl.sum(tl.where(i == k, x, 0.0), 0)
    y = x / tl.sum(tl.where(row == column, A, 0.0), 1) * inverse
    alpha = y / tl.sum(y, 0)
    finite = tl.sum((tl.abs(alpha) < INF).to(tl.int32), 0) == M
    return square, tl.where(finite, alpha, (i == slot).to(tl.float32))


@triton.jit
def _decide(
    squares, alpha, beta, average, rate, fraction, accepted, accepts, S, length, penalty, noise, ceiling, lowers,
    b, slot, before, M,
):  # fmt: skip
    """`decide` of `GapGuard` and `EnergyGuard`: α, 1 for the entry that a refused sample goes on from; that entry, and
    its gap's share to take off. What a step leaves to the next, `accepts` and `lowers`, is not where it was read from:
    other programs of the sample may still have to read it."""
    i = tl.arange(0, M)
    square = tl.sum(tl.where(i == slot, squares, 0.0), 0)
    known = tl.load(accepted + b) != 0
    most = tl.load(rate).to(tl.float32)
    share = 1 - tl.load(average).to(tl.float32)
    entry = before
    if ceiling is None:
        good = (square <= most * tl.sum(tl.where(i == before, squares, 0.0), 0)) | (known == 0)
    else:
        size, similarity, U = tl.load(length + b), tl.load(S + b), tl.load(ceiling + b)
        half = 0.5 * size * size
        E = half - similarity
        if penalty is not None:
            E += tl.load(penalty + b)
        good = E + fraction * most * square <= U + noise * (half + tl.abs(similarity))
        lower = tl.where(known, U, U - most * square)
        tl.store(lowers + b, tl.where(good, tl.where(E < U, E, U), lower))
        less = 0.0
        if beta is not None:
            less = 1 - tl.load(beta).to(tl.float32)
        entry = tl.where(known, before, slot)
        share = tl.where(known, -less, share - less)
    tl.store(accepts + b, good)
    return tl.where(good, alpha, (i == entry).to(tl.float32)), entry, tl.where(good, 0.0, share)


@triton.jit
def _mix(images, gaps, alpha, share, entry, mixture, b, start, stop, numbers, COUNT, M, BLOCK):
    """Σ αⱼ imageⱼ between start and stop, less a share of the gap of one entry; entries without weight are not read."""
    j = tl.arange(0, M)[:, None]
    counts = alpha[:, None] != 0
    if share is not None:
        end = tl.where(share != 0, stop, start)
    for block in range(start, stop, BLOCK):
        at = block + tl.arange(0, BLOCK)
        inside = at < stop
        many = tl.load(images + (b * COUNT + j) * numbers + at[None, :], mask=counts & inside[None, :], other=0.0)
        total = tl.sum(alpha[:, None] * many.to(tl.float32), 0)
        if share is not None:
            gap = tl.load(gaps + (b * COUNT + entry) * numbers + at, mask=at < end, other=0.0)
            total -= share * gap.to(tl.float32)
        tl.store(mixture + b * numbers + at, total.to(mixture.dtype.element_ty), mask=inside)


@triton.jit
def _propose(
    products, gram, images, gaps, beta, average, rate, fraction, accepted, accepts, S, length, penalty, noise, ceiling,
    lowers, mixture, b, start, stop, slot, before, filled, ridge, numbers, COUNT, M, BLOCK,
):  # fmt: skip
    """Weigh, decide and mix between start and stop."""
    squares, alpha = _weigh(products, gram, b, slot, filled, ridge, COUNT, M)
    if accepted is None:
        _mix(images, gaps, alpha, None, slot, mixture, b, start, stop, numbers, COUNT, M, BLOCK)
    else:
        alpha, entry, share = _decide(
            squares, alpha, beta, average, rate, fraction, accepted, accepts, S, length, penalty, noise, ceiling,
            lowers, b, slot, before, M,
        )  # fmt: skip
        _mix(images, gaps, alpha, share, entry, mixture, b, start, stop, numbers, COUNT, M, BLOCK)


@triton.jit(do_not_specialize=["slot", "filled"])
def enter_kernel(
    z, image, images, gaps, beta, parts, slot, filled, numbers, span,
    COUNT: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = part * span
    stop = tl.minimum(start + span, numbers)
    products = _enter(z, image, images, gaps, beta, b, start, stop, slot, filled, numbers, COUNT, M, BLOCK)
    tl.store(parts + (b * tl.num_programs(1) + part) * M + tl.arange(0, M), products)


@triton.jit(do_not_specialize=["slot", "before", "filled"])
def mix_kernel(
    parts, gram, images, gaps, beta, average, rate, fraction, accepted, accepts, S, length, penalty, noise, ceiling,
    lowers, mixture, slot, before, filled, ridge, numbers, span,
    COUNT: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Every program of a sample weighs for itself, which is cheaper than a launch. They write the same numbers, and
    what one reads does not depend on whether another has written: the newest row comes from the parts."""
    b, count, part = tl.program_id(0).to(tl.int64), tl.num_programs(1), tl.arange(0, PARTS)[:, None]
    at = (b * count + part) * M + tl.arange(0, M)[None, :]
    products = tl.sum(tl.load(parts + at, mask=part < count, other=0.0), 0)
    start = tl.program_id(1) * span
    stop = tl.minimum(start + span, numbers)
    _propose(
        products, gram, images, gaps, beta, average, rate, fraction, accepted, accepts, S, length, penalty, noise,
        ceiling, lowers, mixture, b, start, stop, slot, before, filled, ridge, numbers, COUNT, M, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["slot", "before", "filled"])
def whole_kernel(
    z, image, gram, images, gaps, beta, average, rate, fraction, accepted, accepts, S, length, penalty, noise, ceiling,
    lowers, mixture, slot, before, filled, ridge, numbers,
    COUNT: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All of it for one sample a program."""
    b = tl.program_id(0).to(tl.int64)
    products = _enter(z, image, images, gaps, beta, b, 0, numbers, slot, filled, numbers, COUNT, M, BLOCK)
    tl.debug_barrier()  # the entry is read by other threads than those that wrote it
    _propose(
        products, gram, images, gaps, beta, average, rate, fraction, accepted, accepts, S, length, penalty, noise,
        ceiling, lowers, mixture, b, 0, numbers, slot, before, filled, ridge, numbers, COUNT, M, BLOCK,
    )  # fmt: skip


def extrapolate(history, z: Tensor, image: Tensor, ridge: float, guard: tuple | None) -> tuple:
    """Enter (z, image), contiguous (batch, numbers), as the newest of `history`, a `solvers.anderson.History`.

    Returns the mixture (batch, numbers), which samples were accepted, and the next ceiling; `guard` is what
    `program_inputs` of the history's guard returns, None without one.
    """
    images, gaps, gram, beta = history.images, history.gaps, history.gram, history.relaxation
    batch, count, numbers = images.shape
    M = max(4, triton.next_power_of_2(count))
    block = min(TILE // M, max(16, triton.next_power_of_2(numbers)))
    mixture = torch.empty_like(image)
    if guard is None:
        accepts = lowers = None
        checks = (None, None, 0.0, *[None] * 5, 0.0, None, None)
    else:
        average, rate, fraction, accepted, similarity, length, penalty, rounding, ceiling = guard
        accepts, lowers = torch.empty_like(accepted), None if ceiling is None else torch.empty_like(ceiling)
        checks = (
            average, rate, fraction, accepted, accepts, similarity, length, penalty, rounding, ceiling, lowers,
        )  # fmt: skip
    places = (history.newest, history.before, history.filled, ridge, numbers)
    with torch.cuda.device_of(image):
        if numbers <= SMALL:
            whole_kernel[(batch,)](z, image, gram, images, gaps, beta, *checks, mixture, *places, count, M, block)
            return mixture, accepts, lowers
        # A program's numbers, in whole blocks: few enough that all multiprocessors are busy.
        shares = min(triton.cdiv(numbers, block), triton.cdiv(PROGRAMS * processors(image), batch))
        span = triton.cdiv(triton.cdiv(numbers, shares), block) * block
        splits = triton.cdiv(numbers, span)
        parts = gram.new_empty(batch, splits, M)
        enter_kernel[(batch, splits)](
            z, image, images, gaps, beta, parts, history.newest, history.filled, numbers, span, count, M, block
        )
        mix_kernel[(batch, splits)](
            parts, gram, images, gaps, beta, *checks, mixture, *places, span,
            count, M, block, triton.next_power_of_2(splits),
        )  # fmt: skip
    return mixture, accepts, lowers
