"""The Gaussian patch step mᵢ = exp(−γ rᵢQrᵢᵀ) rᵢQ, r = a − v: one pass over memory where Triton runs.

`patch_step` chooses between two forms of the same function. `fused_reference` is plain PyTorch: every device
and dtype, and it can be compiled, exported, vmapped and differentiated as often as one likes. The operator
`kerneq::patch_step` is one Triton kernel a direction (`fused_operator`, `fused_triton`).
"""

from typing import Literal, overload

import torch
from torch import Tensor

from ..cards import HAS_TRITON
from . import fused_reference as reference
from .fused_operator import step, step_backward

# n: from the least a matrix unit takes to the most that fits in registers
_FUSED_SIZES = {
    torch.bfloat16: (16, 32, 64, 128),
    torch.float16: (16, 32, 64, 128),
    torch.float32: (16, 32, 64),
}


@overload
def patch_step(
    a: Tensor,
    v: Tensor | None,
    Q: Tensor,
    gamma: Tensor | float,
    *,
    split: int,
    patch: int,
    similarity: Literal[False] = False,
    negated: bool = False,
) -> Tensor: ...


@overload
def patch_step(
    a: Tensor,
    v: Tensor | None,
    Q: Tensor,
    gamma: Tensor | float,
    *,
    split: int,
    patch: int,
    similarity: Literal[True],
    negated: bool = False,
) -> tuple[Tensor, Tensor]: ...


def patch_step(
    a: Tensor,
    v: Tensor | None,
    Q: Tensor,
    gamma: Tensor | float,
    *,
    split: int,
    patch: int,
    similarity: bool = False,
    negated: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """m (B, C, H, W) in the dtype of `a`; with `similarity` also S = Σᵢ exp(−sᵢ) / 2γ per sample, in float32.

    r = a − v is cut into patches of `split` channels × `patch` × `patch` pixels, whose n entries Q (n × n,
    symmetric) counts in the order (channel, row, column). No `v` means v = 0, and nothing is read for it.
    `negated` says that `v` holds −Wz, so that r = a + v: then a and v have one gradient, written once. A γ
    that is a float32 tensor on the device saves a kernel launch.
    """
    _check(a, v, Q, gamma, split, patch)
    gamma = torch.as_tensor(gamma, dtype=reference.accumulator(a), device=a.device)
    if not _fusable(a, split, patch):
        m, S = reference.forward(a, v, Q, gamma, split, patch, negated)
        return (m, S) if similarity else m
    form = torch.channels_last if reference.is_channels_last(a) else torch.contiguous_format
    v = None if v is None else v.contiguous(memory_format=form)
    m, S = step(a.contiguous(memory_format=form), v, Q, gamma, split, patch, negated, similarity)
    return (m, S) if similarity else m


def patch_pullback(u: Tensor, a: Tensor, v: Tensor, Q: Tensor, gamma: Tensor, *, split: int, patch: int) -> Tensor:
    """(∂m/∂r)ᵀu = exp(−sᵢ)(Q − 2γ qᵢᵀqᵢ)uᵢ at r = a − v, which is symmetric; no gradients flow through it."""
    gamma = gamma.to(reference.accumulator(a))
    if not _fusable(a, split, patch):
        return reference.pull_r(u, a, v, Q, gamma, split, patch)
    form = torch.channels_last if reference.is_channels_last(a) else torch.contiguous_format
    a, v, u = (t.contiguous(memory_format=form) for t in (a, v, u))
    wanted = [True, False, False, False]
    return step_backward(u.to(a.dtype), None, a, v, Q, gamma, split, patch, False, wanted)[0]


def _fusable(a: Tensor, split: int, patch: int) -> bool:
    powers = split & (split - 1) == 0 and patch & (patch - 1) == 0
    known = powers and split * patch * patch in _FUSED_SIZES.get(a.dtype, ())
    return a.is_cuda and HAS_TRITON and known and a.numel() > 0


def _check(a: Tensor, v: Tensor | None, Q: Tensor, gamma: Tensor | float, split: int, patch: int) -> None:
    if a.dim() != 4:
        raise ValueError(f"`a` must have the shape (batch, channels, height, width), got {tuple(a.shape)}.")
    if v is not None and v.shape != a.shape:
        raise ValueError(f"`v` must have the shape of `a`, {tuple(a.shape)}, got {tuple(v.shape)}.")
    if split < 1 or patch < 1:
        raise ValueError(f"`split` and `patch` must be at least 1, got {split} and {patch}.")
    if a.shape[1] % split or a.shape[2] % patch or a.shape[3] % patch:
        raise ValueError(
            f"Patches of {split} channels × {patch} × {patch} pixels do not tile {tuple(a.shape[1:])}: "
            "`split` must divide the channels and `patch` the height and the width."
        )
    n = split * patch * patch
    if Q.shape != (n, n):
        raise ValueError(f"`Q` must be {n} × {n} (split · patch²) here, got {tuple(Q.shape)}.")
    if isinstance(gamma, Tensor) and gamma.dim() != 0:
        raise ValueError(f"`gamma` must be a number or a tensor of no dimensions, got shape {tuple(gamma.shape)}.")
