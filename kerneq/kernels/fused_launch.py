# mypy: ignore-errors
# (It starts Triton kernels, and Triton is optional: mypy cannot rely on seeing it.)
"""Starting the Triton kernels of the patch step: tiles, grids, buffers.

Numbers moved, with N in `a`: forward reads a and v and writes m, 3N (2N without v): the floor. Backward
reads u, a and v and writes both gradients, 5N (4N if `negated` or if one gradient is wanted, 3N without v):
the floor of a pullback that recomputes r; saving r instead would move as many and hold as many. On top come
8n² bytes a program for the partial sums of ∂Q, 3.2 MB on an H200 with n = 32 in bfloat16, against 336 MB at
batch 512, 64 × 32 × 32; and 8 bytes a tile for S.
"""

import contextlib
import dataclasses
from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from . import fused_triton


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a kernel is spread over the card."""

    patches: int  # in a tile
    warps: int  # in a program
    programs: int  # on a multiprocessor, each looping over its share of the tiles


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
    a: Tensor,
    v: Tensor | None,
    Q: Tensor,
    gamma: Tensor,
    split: int,
    patch: int,
    negated: bool,
    similarity: bool,
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor]:
    """m like `a`, and Σᵢ wᵢ / 2γ per sample (empty unless `similarity`)."""
    n = split * patch * patch
    tiling = tiling or forward_tiling(a, n)
    form = _memory_format(a)
    a, v = a.contiguous(memory_format=form), None if v is None else v.contiguous(memory_format=form)
    m = torch.empty_like(a)
    T, tiles, programs = _grid(a, n, tiling)
    parts = torch.empty((a.shape[0], tiles // a.shape[0]) if similarity else (0, 1), device=a.device)
    with _on(a):
        fused_triton.forward[(programs,)](
            a, a if v is None else v, Q.contiguous(), gamma, m, parts, tiles,
            *a.shape[1:], split, patch, T, form == torch.channels_last, v is not None, negated, similarity,
            precision(), num_warps=tiling.warps,
        )  # fmt: skip
    return m, parts.sum(1) if similarity else parts.flatten()


def backward(
    u: Tensor,
    t: Tensor | None,
    a: Tensor,
    v: Tensor | None,
    Q: Tensor,
    gamma: Tensor,
    split: int,
    patch: int,
    negated: bool,
    wanted: Sequence[bool],
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients with respect to a, v, Q and γ; empty where not `wanted`."""
    n = split * patch * patch
    tiling = tiling or backward_tiling(a, n, wanted[2])
    form = _memory_format(a)
    u, a = u.contiguous(memory_format=form), a.contiguous(memory_format=form)
    v = None if v is None else v.contiguous(memory_format=form)
    want_a, want_v, want_Q, want_gamma = wanted
    grad_a = torch.empty_like(a) if want_a else a.new_empty(0)
    grad_v = torch.empty_like(v) if want_v else a.new_empty(0)
    T, tiles, programs = _grid(a, n, tiling)
    Q_parts = torch.empty((programs if want_Q else 0, n, n), device=a.device)
    gamma_parts = torch.empty(programs if want_gamma else 0, device=a.device)
    with _on(a):
        fused_triton.backward[(programs,)](
            u, a if t is None else t.contiguous(), a, a if v is None else v, Q.contiguous(), gamma,
            grad_a, grad_v, Q_parts, gamma_parts, tiles,
            *a.shape[1:], split, patch, T, form == torch.channels_last, v is not None, negated, t is not None,
            precision(), *wanted, num_warps=tiling.warps,
        )  # fmt: skip
    grad_Q = Q_parts.sum(0).to(Q.dtype) if want_Q else Q.new_empty(0)
    return grad_a, grad_v, grad_Q, gamma_parts.sum().to(gamma.dtype) if want_gamma else gamma.new_empty(0)


def _memory_format(a: Tensor) -> torch.memory_format:
    last = a.is_contiguous(memory_format=torch.channels_last) and not a.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


def _grid(a: Tensor, n: int, tiling: Tiling) -> tuple[int, int, int]:
    """Patches a tile (at least 16, the smallest matrix product), tiles in all, programs."""
    count = a.shape[1:].numel() // n
    T = max(16, min(tiling.patches, triton.next_power_of_2(count)))
    tiles = a.shape[0] * triton.cdiv(count, T)
    cores = torch.cuda.get_device_properties(a.device).multi_processor_count if a.is_cuda else 2
    return T, tiles, min(tiles, cores * tiling.programs)


def _on(a: Tensor) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(a.device) if a.is_cuda else contextlib.nullcontext()
