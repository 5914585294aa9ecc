"""The radial patch step and its pullback as Triton programs, one pass over memory each, made for every formula.

A tile is T patches of one sample. It is read as R rows of T·U consecutive numbers: in channels-last memory U = split
and a row is one pixel (i, j) of every patch, in NCHW memory U = patch and a row is one (channel, i). So the reads are
contiguous whatever the patch, and only registers see patches; Q is read in the same entry order.

Numbers moved, with N in `a`: forward 3N (2N without v), backward 5N (4N if one gradient is wanted, 3N without v), which
is the floor of a pullback that recomputes r. On top come 8n² bytes a program for the partial sums of ∂Q (3.2 MB on an
H200 with n = 32 in bfloat16) and 8 bytes a tile for S.
"""

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..tensors import is_only_channels_last
from .device import processors

height = weight = slope = None  # in the programs of a formula, its functions: see `programs`


@functools.cache
def programs(formula: type) -> tuple[Callable, Callable] | None:
    """`radial_forward` and `radial_backward` with η, ω and ω′ of this formula in them.

    None where Triton has no words for them. A program is the same code for every formula, with other functions in its
    scope; that also makes Triton cache them apart.
    """
    names = {name: _translate(getattr(formula, name)) for name in ("height", "weight", "slope")}
    if None in names.values():
        return None
    scope = {**globals(), **names}
    return _compile_with(radial_forward, scope), _compile_with(radial_backward, scope)


def _compile_with(function: Callable, scope: dict) -> Callable:
    """The function as a Triton program that looks up its names in `scope`."""
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    copy.__annotations__ = function.__annotations__  # which arguments are constants
    return triton.jit(copy)


def _translate(function: Callable) -> Callable | None:
    """The same source, with `torch` standing for triton.language; None if it says more than both understand."""
    try:
        source = inspect.getsource(function)
    except OSError:  # typed at a prompt
        return None
    definition = ast.parse(textwrap.dedent(source)).body[0]
    definition.decorator_list = []  # which Triton leaves out as well
    known = {"torch", "Tensor", *function.__code__.co_varnames}
    for node in ast.walk(definition):
        match node:
            case ast.Name(id=name) if name not in known:
                return None
            case ast.Attribute(attr=name) if name not in vars(tl.math):  # exp, log, sqrt …: torch's names and meanings
                return None
            case ast.Pow():  # not in Triton's arithmetic
                return None
    scope = {"torch": tl, "Tensor": tl.tensor, "__name__": function.__module__}
    return _compile_with(function, scope)


@triton.jit
def _patch_tile(tile, C, H, W, S, P, T, LAST):
    """Where the R × T·U numbers of a tile lie, which of them exist, which of its T patches do, and its sample."""
    U: tl.constexpr = S if LAST else P
    COUNT: tl.constexpr = C * H * W // (S * P * P)  # patches in a sample
    TILES: tl.constexpr = (COUNT + T - 1) // T  # tiles in a sample
    start = (tile % TILES) * T
    k = start * U + tl.arange(0, T * U)  # along a row
    row = tl.arange(0, S * P * P // U)
    if LAST:
        n = k // C
        columns = (n // (W // P)) * (P * W * C) + (n % (W // P)) * (P * C) + k % C
        rows = ((row // P) * W + row % P) * C
    else:
        n = k // W
        columns = (n // (H // P)) * (S * H * W) + (n % (H // P)) * (P * W) + k % W
        rows = (row // P) * (H * W) + (row % P) * W
    sample = tile // TILES
    at = tl.cast(sample, tl.int64) * (C * H * W) + (rows[:, None] + columns[None, :])
    return at, (k < COUNT * U)[None, :], start + tl.arange(0, T) < COUNT, sample


@triton.jit
def _order_entries(S, P, LAST):
    """The place in Q, which is ordered (channel, i, j), of each entry of a patch in registers."""
    e = tl.arange(0, S * P * P)
    if LAST:
        return (e % S) * (P * P) + e // S
    else:
        return e


@triton.jit
def _to_patches(x, R, T, U):
    return tl.reshape(tl.permute(tl.reshape(x, (R, T, U)), (1, 0, 2)), (T, R * U))


@triton.jit
def _to_rows(x, R, T, U):
    return tl.reshape(tl.permute(tl.reshape(x, (T, R, U)), (1, 0, 2)), (R, T * U))


@triton.jit
def _residual(a, v, at, mask):
    r = tl.load(a + at, mask=mask, other=0.0).to(tl.float32)
    if v is not None:
        r -= tl.load(v + at, mask=mask, other=0.0).to(tl.float32)
    return r


def radial_forward(
    a, v, Q, gamma, m, S_parts, tiles,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, S: tl.constexpr, P: tl.constexpr, T: tl.constexpr,
    LAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """m, and where it has a place the sum of η(s)/γ over each tile."""
    N: tl.constexpr = S * P * P
    U: tl.constexpr = S if LAST else P
    R: tl.constexpr = N // U
    D = a.dtype.element_ty
    g = tl.load(gamma).to(tl.float32)
    entry = _order_entries(S, P, LAST)
    Qt = tl.load(Q + entry[:, None] * N + entry[None, :]).to(D)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        at, mask, inside, _ = _patch_tile(tile, C, H, W, S, P, T, LAST)
        r = _to_patches(_residual(a, v, at, mask), R, T, U)
        q = tl.dot(r.to(D), Qt, input_precision=PRECISION)
        s = g * tl.sum(q * r, 1)
        w = weight(s)
        tl.store(m + at, _to_rows((w[:, None] * q).to(D), R, T, U), mask=mask)
        if S_parts is not None:
            tl.store(S_parts + tile, tl.sum(tl.where(inside, height(s), 0.0), 0) / g)


def radial_backward(
    u, tau, a, v, Q, gamma, grad_a, grad_v, Q_parts, gamma_parts, tiles,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, S: tl.constexpr, P: tl.constexpr, T: tl.constexpr,
    LAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of a and v, and each program's share of those of Q and γ; the symbols are those of `radial`."""
    N: tl.constexpr = S * P * P
    U: tl.constexpr = S if LAST else P
    R: tl.constexpr = N // U
    D = a.dtype.element_ty
    g = tl.load(gamma).to(tl.float32)
    entry = _order_entries(S, P, LAST)
    in_Q = entry[:, None] * N + entry[None, :]
    Qt = tl.load(Q + in_Q).to(D)
    if Q_parts is not None:
        sum_Q = tl.zeros((N, N), tl.float32)
    sum_gamma = 0.0
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        at, mask, inside, sample = _patch_tile(tile, C, H, W, S, P, T, LAST)
        r = _to_patches(_residual(a, v, at, mask), R, T, U)
        ut = _to_patches(tl.load(u + at, mask=mask, other=0.0), R, T, U).to(D)
        q = tl.dot(r.to(D), Qt, input_precision=PRECISION)
        uQ = tl.dot(ut, Qt, input_precision=PRECISION)
        t = tl.sum(q * r, 1)
        s = g * t
        w = weight(s)
        b = slope(s) * tl.sum(uQ * r, 1)
        c = g * b
        if tau is not None:
            one = tl.load(tau + sample).to(tl.float32)
            c -= 0.5 * one * w
            if gamma_parts is not None:
                sum_gamma -= one * tl.sum(tl.where(inside, height(s) + 0.5 * s * w, 0.0), 0) / (g * g)
        if gamma_parts is not None:
            sum_gamma += tl.sum(b * t, 0)
        if Q_parts is not None:
            left = w[:, None] * ut.to(tl.float32) + c[:, None] * r
            sum_Q = tl.dot(tl.trans(r.to(D)), left.to(D), sum_Q, input_precision=PRECISION)
        if (grad_a is not None) or (grad_v is not None):
            gr = w[:, None] * uQ + (2 * c)[:, None] * q
            if grad_a is not None:
                tl.store(grad_a + at, _to_rows(gr.to(D), R, T, U), mask=mask)
            if grad_v is not None:
                tl.store(grad_v + at, _to_rows((-gr).to(grad_v.dtype.element_ty), R, T, U), mask=mask)
    if Q_parts is not None:
        tl.store(Q_parts + tl.program_id(0) * (N * N) + in_Q, sum_Q)
    if gamma_parts is not None:
        tl.store(gamma_parts + tl.program_id(0), sum_gamma)


def _grid(a: Tensor, n: int, patches: int, programs: int) -> tuple[int, int, int]:
    """Patches a tile (at least 16, the smallest matrix product), tiles in all, and programs, which share the tiles.

    `patches` is what registers hold without spilling (read off the compiled code for sm_90), `programs` are those on a
    multiprocessor.
    """
    count = a.shape[1:].numel() // n
    T = max(16, min(patches, triton.next_power_of_2(count)))
    tiles = a.shape[0] * triton.cdiv(count, T)
    return T, tiles, min(tiles, processors(a) * programs)


def _stored_like(x: Tensor, a: Tensor) -> Tensor:
    """x without holes and in the memory order of `a`."""
    return x.contiguous(memory_format=torch.channels_last if is_only_channels_last(a) else torch.contiguous_format)


def _warps(n: int) -> int:
    return 4 if n <= 64 else 8


def _precision() -> str:
    """float32 products as the user asked of PyTorch: exact unless they allowed TF32."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def forward(
    formula: type, a: Tensor, v: Tensor | None, Q: Tensor, gamma: Tensor, split: int, patch: int, value: bool
) -> tuple[Tensor, Tensor | None]:
    """m like `a`, and S per sample if `value`."""
    n, half = split * patch * patch, a.dtype != torch.float32
    a, v = _stored_like(a, a), None if v is None else _stored_like(v, a)
    T, tiles, count = _grid(a, n, 64 if half or n <= 32 else 16, 8 if half and n <= 32 else 4)
    m = torch.empty_like(a)
    parts = torch.empty((a.shape[0], tiles // a.shape[0]), device=a.device) if value else None
    program, _ = programs(formula)
    with torch.cuda.device_of(a):
        program[(count,)](
            a, v, Q.contiguous(), gamma, m, parts, tiles,
            *a.shape[1:], split, patch, T, is_only_channels_last(a), _precision(), num_warps=_warps(n),
        )  # fmt: skip
    return m, parts.sum(1) if value else None


def backward(
    formula: type, u: Tensor, tau: Tensor | None, a: Tensor, v: Tensor | None, Q: Tensor, gamma: Tensor,
    split: int, patch: int, wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients with respect to a, v, Q and γ; None where not `wanted`."""
    n, half = split * patch * patch, a.dtype != torch.float32
    want_a, want_v, want_Q, want_gamma = wanted
    u, v, a = _stored_like(u, a), None if v is None else _stored_like(v, a), _stored_like(a, a)
    patches = (64 if half else 32) if n <= 32 else (32 if half else 16)
    # Few programs where each writes its own n × n part of ∂Q.
    T, tiles, count = _grid(a, n, patches, (3 if half else 2) if want_Q else 6)
    grad_a = torch.empty_like(a) if want_a else None
    grad_v = torch.empty_like(v) if want_v else None
    Q_parts = torch.empty((count, n, n), device=a.device) if want_Q else None
    gamma_parts = torch.empty(count, device=a.device) if want_gamma else None
    _, program = programs(formula)
    with torch.cuda.device_of(a):
        program[(count,)](
            u, None if tau is None else tau.contiguous(), a, v, Q.contiguous(), gamma,
            grad_a, grad_v, Q_parts, gamma_parts, tiles,
            *a.shape[1:], split, patch, T, is_only_channels_last(a), _precision(), num_warps=_warps(n),
        )  # fmt: skip
    grad_Q = Q_parts.sum(0).to(Q.dtype) if want_Q else None
    return grad_a, grad_v, grad_Q, gamma_parts.sum().to(gamma.dtype) if want_gamma else None
