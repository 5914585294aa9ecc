# mypy: ignore-errors
# (Triton is optional and its kernels are not Python that mypy can read.)
"""The Gaussian patch step and its pullback as Triton kernels: one pass over memory each.

A tile is T patches of one sample. It is read as R rows of T·U consecutive numbers: in channels-last memory
U = split and a row is one pixel (i, j) of every patch, in NCHW memory U = patch and a row is one (channel,
i). So the reads are contiguous whatever the patch, and only registers see patches; Q is read in the same
entry order.
"""

import triton
import triton.language as tl


@triton.jit
def _columns(
    k, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, S: tl.constexpr, P: tl.constexpr, LAST: tl.constexpr
):
    """Where the k-th number of the first row of the patches lies in its sample."""
    if LAST:
        at = k // C
        return (at // (W // P)) * (P * W * C) + (at % (W // P)) * (P * C) + k % C
    else:
        at = k // W
        return (at // (H // P)) * (S * H * W) + (at % (H // P)) * (P * W) + k % W


@triton.jit
def _rows(C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, P: tl.constexpr, R: tl.constexpr, LAST: tl.constexpr):
    """How far the rows of a patch lie from its first."""
    row = tl.arange(0, R)
    if LAST:
        return ((row // P) * W + row % P) * C
    else:
        return (row // P) * (H * W) + (row % P) * W


@triton.jit
def _entries(S: tl.constexpr, P: tl.constexpr, LAST: tl.constexpr):
    """The place in Q, which is ordered (channel, i, j), of each entry of a patch in registers."""
    e = tl.arange(0, S * P * P)
    if LAST:
        return (e % S) * (P * P) + e // S
    else:
        return e


@triton.jit
def _to_patches(x, R: tl.constexpr, T: tl.constexpr, U: tl.constexpr):
    return tl.reshape(tl.permute(tl.reshape(x, (R, T, U)), (1, 0, 2)), (T, R * U))


@triton.jit
def _to_rows(x, R: tl.constexpr, T: tl.constexpr, U: tl.constexpr):
    return tl.reshape(tl.permute(tl.reshape(x, (T, R, U)), (1, 0, 2)), (R, T * U))


@triton.jit
def _residual(a, v, at, mask, HAS_V: tl.constexpr, NEGATED: tl.constexpr):
    r = tl.load(a + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_V:
        x = tl.load(v + at, mask=mask, other=0.0).to(tl.float32)
        if NEGATED:
            r += x
        else:
            r -= x
    return r


@triton.jit
def forward(
    a, v, Q, gamma, m, S_parts, tiles,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, S: tl.constexpr, P: tl.constexpr, T: tl.constexpr,
    LAST: tl.constexpr, HAS_V: tl.constexpr, NEGATED: tl.constexpr, SIMILARITY: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = S * P * P
    U: tl.constexpr = S if LAST else P
    R: tl.constexpr = N // U
    COUNT: tl.constexpr = C * H * W // N  # patches in a sample
    TILES: tl.constexpr = (COUNT + T - 1) // T  # tiles in a sample
    D = a.dtype.element_ty
    g = tl.load(gamma).to(tl.float32)
    entry = _entries(S, P, LAST)
    Qt = tl.load(Q + entry[:, None] * N + entry[None, :]).to(D)
    rows = _rows(C, H, W, P, R, LAST)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        start = (tile % TILES) * T
        k = start * U + tl.arange(0, T * U)
        at = tl.cast(tile // TILES, tl.int64) * (C * H * W) + (
            rows[:, None] + _columns(k, C, H, W, S, P, LAST)[None, :]
        )
        mask = (k < COUNT * U)[None, :]
        r = _to_patches(_residual(a, v, at, mask, HAS_V, NEGATED), R, T, U)
        q = tl.dot(r.to(D), Qt, input_precision=PRECISION)
        w = tl.exp(-g * tl.sum(q * r, 1))
        tl.store(m + at, _to_rows((w[:, None] * q).to(D), R, T, U), mask=mask)
        if SIMILARITY:
            inside = start + tl.arange(0, T) < COUNT
            tl.store(S_parts + tile, tl.sum(tl.where(inside, w, 0.0), 0) / (2 * g))


@triton.jit
def backward(
    u, t, a, v, Q, gamma, grad_a, grad_v, Q_parts, gamma_parts, tiles,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, S: tl.constexpr, P: tl.constexpr, T: tl.constexpr,
    LAST: tl.constexpr, HAS_V: tl.constexpr, NEGATED: tl.constexpr, SIMILARITY: tl.constexpr,
    PRECISION: tl.constexpr,
    WANT_A: tl.constexpr, WANT_V: tl.constexpr, WANT_Q: tl.constexpr, WANT_GAMMA: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = S * P * P
    U: tl.constexpr = S if LAST else P
    R: tl.constexpr = N // U
    COUNT: tl.constexpr = C * H * W // N
    TILES: tl.constexpr = (COUNT + T - 1) // T
    D = a.dtype.element_ty
    g = tl.load(gamma).to(tl.float32)
    entry = _entries(S, P, LAST)
    in_Q = entry[:, None] * N + entry[None, :]
    Qt = tl.load(Q + in_Q).to(D)
    rows = _rows(C, H, W, P, R, LAST)
    if WANT_Q:
        sum_Q = tl.zeros((N, N), tl.float32)
    sum_gamma = 0.0
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        start = (tile % TILES) * T
        k = start * U + tl.arange(0, T * U)
        at = tl.cast(tile // TILES, tl.int64) * (C * H * W) + (
            rows[:, None] + _columns(k, C, H, W, S, P, LAST)[None, :]
        )
        mask = (k < COUNT * U)[None, :]
        r = _to_patches(_residual(a, v, at, mask, HAS_V, NEGATED), R, T, U)
        ut = _to_patches(tl.load(u + at, mask=mask, other=0.0), R, T, U).to(D)
        q = tl.dot(r.to(D), Qt, input_precision=PRECISION)
        uQ = tl.dot(ut, Qt, input_precision=PRECISION)
        rQr = tl.sum(q * r, 1)
        w = tl.exp(-g * rQr)
        c = w * tl.sum(uQ * r, 1)
        if SIMILARITY:
            inside = start + tl.arange(0, T) < COUNT
            half = tl.where(inside, w, 0.0) * (tl.load(t + tile // TILES).to(tl.float32) / (2 * g))
            c += half
            if WANT_GAMMA:
                sum_gamma -= tl.sum(half, 0) / g
        if WANT_GAMMA:
            sum_gamma -= tl.sum(c * rQr, 0)
        if WANT_Q:
            left = w[:, None] * ut.to(tl.float32) - (g * c)[:, None] * r
            sum_Q = tl.dot(tl.trans(r.to(D)), left.to(D), sum_Q, input_precision=PRECISION)
        if WANT_A or WANT_V:
            gr = w[:, None] * uQ - (2 * g * c)[:, None] * q
            if WANT_A:
                tl.store(grad_a + at, _to_rows(gr.to(D), R, T, U), mask=mask)
            if WANT_V:
                gv = gr if NEGATED else -gr
                tl.store(grad_v + at, _to_rows(gv.to(grad_v.dtype.element_ty), R, T, U), mask=mask)
    if WANT_Q:
        tl.store(Q_parts + tl.program_id(0) * (N * N) + in_Q, sum_Q)
    if WANT_GAMMA:
        tl.store(gamma_parts + tl.program_id(0), sum_gamma)
