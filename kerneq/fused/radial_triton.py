# mypy: ignore-errors
# (Triton is optional and its kernels are not Python that mypy can read.)
"""The radial patch step and its pullback as Triton programs, one pass over memory each, made for every formula.

A tile is T patches of one sample. It is read as R rows of T·U consecutive numbers: in channels-last memory U = split
and a row is one pixel (i, j) of every patch, in NCHW memory U = patch and a row is one (channel, i). So the reads are
contiguous whatever the patch, and only registers see patches; Q is read in the same entry order.

Numbers moved, with N in `a`: forward reads a and v and writes m, 3N (2N without v): the floor. Backward reads u, a and
v and writes both gradients, 5N (4N if one is wanted, 3N without v): the floor of a pullback that recomputes r; saving r
instead would move as many and hold as many. On top come 8n² bytes a program for the partial sums of ∂Q, 3.2 MB on an
H200 with n = 32 in bfloat16, against 336 MB at batch 512, 64 × 32 × 32; and 8 bytes a tile for S.
"""

import ast
import dataclasses
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import processors

height = weight = slope = None  # in the programs of a formula, its functions: see `programs`
# What torch and triton.language have under one name and with one meaning.
_SHARED = {
    "abs",
    "cos",
    "erf",
    "exp",
    "exp2",
    "log",
    "log2",
    "maximum",
    "minimum",
    "rsqrt",
    "sigmoid",
    "sin",
    "sqrt",
    "where",
}


@dataclasses.dataclass(frozen=True)
class Programs:
    """The two programs of one formula."""

    forward: Callable
    backward: Callable


@functools.cache
def programs(formula: type) -> Programs | None:
    """The programs below with η, ω and ω′ of this formula in them; None where Triton has no words for them."""
    names = {name: _translated(getattr(formula, name)) for name in ("height", "weight", "slope")}
    if None in names.values():
        return None
    scope = {**globals(), **names}
    return Programs(*(triton.jit(types.FunctionType(f.__code__, scope)) for f in (radial_forward, radial_backward)))


def _translated(function: Callable) -> Callable | None:
    """The same source, with `torch` standing for triton.language; None if it says more than both understand."""
    try:
        source = inspect.getsource(function)
    except OSError:  # typed at a prompt
        return None
    known = {"torch", "Tensor", "staticmethod", *function.__code__.co_varnames}
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        match node:
            case ast.Name(id=name) if name not in known:
                return None
            case ast.Attribute(attr=name) if name not in _SHARED:
                return None
            case ast.Pow():
                return None
    scope = {"torch": tl, "Tensor": tl.tensor, "__name__": function.__module__}
    return triton.jit(types.FunctionType(function.__code__, scope))


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
def _residual(a, v, at, mask, HAS_V: tl.constexpr):
    r = tl.load(a + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_V:
        r -= tl.load(v + at, mask=mask, other=0.0).to(tl.float32)
    return r


def radial_forward(
    a, v, Q, gamma, m, S_parts, tiles,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, S: tl.constexpr, P: tl.constexpr, T: tl.constexpr,
    LAST: tl.constexpr, HAS_V: tl.constexpr, VALUE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """m, and with VALUE the sum of η(s)/γ over each tile."""
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
        r = _to_patches(_residual(a, v, at, mask, HAS_V), R, T, U)
        q = tl.dot(r.to(D), Qt, input_precision=PRECISION)
        s = g * tl.sum(q * r, 1)
        w = weight(s)
        tl.store(m + at, _to_rows((w[:, None] * q).to(D), R, T, U), mask=mask)
        if VALUE:
            inside = start + tl.arange(0, T) < COUNT
            tl.store(S_parts + tile, tl.sum(tl.where(inside, height(s), 0.0), 0) / g)


def radial_backward(
    u, tau, a, v, Q, gamma, grad_a, grad_v, Q_parts, gamma_parts, tiles,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, S: tl.constexpr, P: tl.constexpr, T: tl.constexpr,
    LAST: tl.constexpr, HAS_V: tl.constexpr, VALUE: tl.constexpr, PRECISION: tl.constexpr,
    WANT_A: tl.constexpr, WANT_V: tl.constexpr, WANT_Q: tl.constexpr, WANT_GAMMA: tl.constexpr,
):  # fmt: skip
    """The gradients of a and v, and each program's share of those of Q and γ; the symbols are those of `radial`."""
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
        r = _to_patches(_residual(a, v, at, mask, HAS_V), R, T, U)
        ut = _to_patches(tl.load(u + at, mask=mask, other=0.0), R, T, U).to(D)
        q = tl.dot(r.to(D), Qt, input_precision=PRECISION)
        uQ = tl.dot(ut, Qt, input_precision=PRECISION)
        t = tl.sum(q * r, 1)
        s = g * t
        w = weight(s)
        b = slope(s) * tl.sum(uQ * r, 1)
        c = g * b
        if VALUE:
            one = tl.load(tau + tile // TILES).to(tl.float32)
            c -= 0.5 * one * w
            if WANT_GAMMA:
                inside = start + tl.arange(0, T) < COUNT
                sum_gamma -= one * tl.sum(tl.where(inside, height(s) + 0.5 * s * w, 0.0), 0) / (g * g)
        if WANT_GAMMA:
            sum_gamma += tl.sum(b * t, 0)
        if WANT_Q:
            left = w[:, None] * ut.to(tl.float32) + c[:, None] * r
            sum_Q = tl.dot(tl.trans(r.to(D)), left.to(D), sum_Q, input_precision=PRECISION)
        if WANT_A or WANT_V:
            gr = w[:, None] * uQ + (2 * c)[:, None] * q
            if WANT_A:
                tl.store(grad_a + at, _to_rows(gr.to(D), R, T, U), mask=mask)
            if WANT_V:
                tl.store(grad_v + at, _to_rows((-gr).to(grad_v.dtype.element_ty), R, T, U), mask=mask)
    if WANT_Q:
        tl.store(Q_parts + tl.program_id(0) * (N * N) + in_Q, sum_Q)
    if WANT_GAMMA:
        tl.store(gamma_parts + tl.program_id(0), sum_gamma)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a program is spread over the card."""

    patches: int  # in a tile
    warps: int  # in a program
    programs: int  # on a multiprocessor, each looping over its share of the tiles

    def grid(self, a: Tensor, n: int) -> tuple[int, int, int]:
        """Patches a tile (at least 16, the smallest matrix product), tiles in all, programs."""
        count = a.shape[1:].numel() // n
        T = max(16, min(self.patches, triton.next_power_of_2(count)))
        tiles = a.shape[0] * triton.cdiv(count, T)
        return T, tiles, min(tiles, processors(a) * self.programs)


def forward_tiling(a: Tensor, n: int) -> Tiling:
    """As many patches as registers hold without spilling (read off the compiled code for sm_90)."""
    half = a.dtype != torch.float32
    return Tiling(64 if half or n <= 32 else 16, warps=4 if n <= 64 else 8, programs=8 if half and n <= 32 else 4)


def backward_tiling(a: Tensor, n: int, want_Q: bool) -> Tiling:
    """Likewise; few programs where each writes its own n × n part of ∂Q."""
    half = a.dtype != torch.float32
    patches = (64 if half else 32) if n <= 32 else (32 if half else 16)
    return Tiling(patches, warps=4 if n <= 64 else 8, programs=(3 if half else 2) if want_Q else 6)


def precision() -> str:
    """float32 products as the user asked of PyTorch: exact unless they allowed TF32."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def forward(
    formula: type, a: Tensor, v: Tensor | None, Q: Tensor, gamma: Tensor, split: int, patch: int, value: bool
) -> tuple[Tensor, Tensor]:
    """m like `a`, and S per sample (empty unless `value`)."""
    n = split * patch * patch
    tiling = forward_tiling(a, n)
    a, v, last = _stored(a, v)
    m = torch.empty_like(a)
    T, tiles, count = tiling.grid(a, n)
    parts = torch.empty((a.shape[0], tiles // a.shape[0]) if value else (0, 1), device=a.device)
    with torch.cuda.device_of(a):
        programs(formula).forward[(count,)](
            a, a if v is None else v, Q.contiguous(), gamma, m, parts, tiles,
            *a.shape[1:], split, patch, T, last, v is not None, value, precision(), num_warps=tiling.warps,
        )  # fmt: skip
    return m, parts.sum(1) if value else parts.flatten()


def backward(
    formula: type, u: Tensor, tau: Tensor | None, a: Tensor, v: Tensor | None, Q: Tensor, gamma: Tensor,
    split: int, patch: int, wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients with respect to a, v, Q and γ; empty where not `wanted`."""
    n = split * patch * patch
    want_a, want_v, want_Q, want_gamma = wanted
    tiling = backward_tiling(a, n, want_Q)
    a, v, last = _stored(a, v)
    u = u.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    grad_a = torch.empty_like(a) if want_a else a.new_empty(0)
    grad_v = torch.empty_like(v) if want_v else a.new_empty(0)
    T, tiles, count = tiling.grid(a, n)
    Q_parts = torch.empty((count if want_Q else 0, n, n), device=a.device)
    gamma_parts = torch.empty(count if want_gamma else 0, device=a.device)
    with torch.cuda.device_of(a):
        programs(formula).backward[(count,)](
            u, a if tau is None else tau.contiguous(), a, a if v is None else v, Q.contiguous(), gamma,
            grad_a, grad_v, Q_parts, gamma_parts, tiles,
            *a.shape[1:], split, patch, T, last, v is not None, tau is not None, precision(), *wanted,
            num_warps=tiling.warps,
        )  # fmt: skip
    grad_Q = Q_parts.sum(0).to(Q.dtype) if want_Q else a.new_empty(0)
    return grad_a, grad_v, grad_Q, gamma_parts.sum().to(gamma.dtype) if want_gamma else a.new_empty(0)


def _stored(a: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor | None, bool]:
    """Both without holes and in the order of `a`, and whether that is channels-last."""
    last = a.is_contiguous(memory_format=torch.channels_last) and not a.is_contiguous()
    form = torch.channels_last if last else torch.contiguous_format
    return a.contiguous(memory_format=form), None if v is None else v.contiguous(memory_format=form), last
