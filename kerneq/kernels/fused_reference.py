"""The Gaussian patch step and its pullback in plain PyTorch: any device, any dtype, any patch that divides.

With rᵢ the patches of r = a ∓ v, Q symmetric and u, t the cotangents of m and S:

    qᵢ = rᵢQ    sᵢ = γ⟨qᵢ, rᵢ⟩    wᵢ = exp(−sᵢ)    mᵢ = wᵢqᵢ    S = Σᵢ wᵢ / 2γ
    cᵢ = wᵢ(⟨uᵢQ, rᵢ⟩ + t/2γ)
    ∂r: wᵢuᵢQ − 2γcᵢqᵢ    ∂Q: Σᵢ rᵢᵀ(wᵢuᵢ − γcᵢrᵢ)    ∂γ: −Σᵢ cᵢ⟨qᵢ, rᵢ⟩ − ⟨t, S⟩/γ
"""

import torch
from torch import Tensor


def is_channels_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def cut(x: Tensor, split: int, patch: int, channels_last: bool) -> Tensor:
    """(B, C, H, W) as patches (B, count, n).

    Patches and entries run (row, column, channel) if `channels_last`, else (channel, row, column), so that
    either copy moves the longest runs its memory has."""
    B, C, H, W = x.shape
    if channels_last:
        blocks = x.permute(0, 2, 3, 1).reshape(B, H // patch, patch, W // patch, patch, C // split, split)
    else:
        blocks = x.reshape(B, C // split, split, H // patch, patch, W // patch, patch)
    return blocks.permute(0, 1, 3, 5, 2, 4, 6).reshape(B, -1, split * patch * patch)


def join(x: Tensor, like: Tensor, split: int, patch: int, channels_last: bool) -> Tensor:
    """The inverse of `cut`: patches back into the shape, memory order and dtype of `like`."""
    B, C, H, W = like.shape
    h, w, g = H // patch, W // patch, C // split
    x = x.to(like.dtype)
    if channels_last:
        blocks = x.reshape(B, h, w, g, patch, patch, split).permute(0, 1, 4, 2, 5, 3, 6)
        return blocks.reshape(B, H, W, C).permute(0, 3, 1, 2)
    return x.reshape(B, g, h, w, split, patch, patch).permute(0, 1, 4, 2, 5, 3, 6).reshape(B, C, H, W)


def reorder(Q: Tensor, split: int, patch: int, channels_last: bool) -> Tensor:
    """Q for the entry order of `cut`; the stored order is (channel, row, column)."""
    if not channels_last:
        return Q
    blocks = Q.reshape(split, patch * patch, split, patch * patch)
    return blocks.permute(1, 0, 3, 2).reshape(Q.shape)


def restore(Q: Tensor, split: int, patch: int, channels_last: bool) -> Tensor:
    """The inverse of `reorder`."""
    if not channels_last:
        return Q
    blocks = Q.reshape(patch * patch, split, patch * patch, split)
    return blocks.permute(1, 0, 3, 2).reshape(Q.shape)


def difference(a: Tensor, v: Tensor | None, negated: bool) -> Tensor:
    if v is None:
        return a
    return (a + v if negated else a - v).to(a.dtype)


def accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def forward(
    a: Tensor, v: Tensor | None, Q: Tensor, gamma: Tensor, split: int, patch: int, negated: bool
) -> tuple[Tensor, Tensor]:
    """m in the dtype and memory order of `a`, and Σᵢ wᵢ / 2γ per sample in float32 (float64 for float64)."""
    last = is_channels_last(a)
    r = cut(difference(a, v, negated), split, patch, last)
    q = r @ reorder(Q, split, patch, last).to(r.dtype)
    w = torch.exp(-gamma * (q * r).sum(-1, dtype=accumulator(a)))
    m = w.unsqueeze(-1).to(q.dtype) * q
    return join(m, a, split, patch, last), w.sum(1) / (2 * gamma)


def pull_r(u: Tensor, a: Tensor, v: Tensor, Q: Tensor, gamma: Tensor, split: int, patch: int) -> Tensor:
    """The gradient of ⟨u, m⟩ with respect to r alone."""
    last = is_channels_last(a)
    r, u = cut(difference(a, v, False), split, patch, last), cut(u, split, patch, last)
    Q = reorder(Q, split, patch, last).to(r.dtype)
    q, uQ = r @ Q, u.to(r.dtype) @ Q
    w = torch.exp(-gamma * (q * r).sum(-1, dtype=accumulator(a)))
    c = 2 * gamma * w * (uQ * r).sum(-1, dtype=accumulator(a))
    return join(w.unsqueeze(-1).to(r.dtype) * uQ - c.unsqueeze(-1).to(r.dtype) * q, a, split, patch, last)


def pullback(
    u: Tensor,
    t: Tensor | None,
    a: Tensor,
    v: Tensor | None,
    Q: Tensor,
    gamma: Tensor,
    split: int,
    patch: int,
    negated: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ⟨u, m⟩ + ⟨t, S⟩ with respect to r, Q and γ, by plain operations."""
    last = is_channels_last(a)
    r = cut(difference(a, v, negated), split, patch, last)
    u = cut(u, split, patch, last).to(r.dtype)
    Qr = reorder(Q, split, patch, last).to(r.dtype)
    q, uQ = r @ Qr, u @ Qr
    dtype = accumulator(a)
    rQr = (q * r).sum(-1, dtype=dtype)
    w = torch.exp(-gamma * rQr)
    c = w * (uQ * r).sum(-1, dtype=dtype)
    grad_gamma = torch.zeros_like(gamma)
    if t is not None:
        half = (t / (2 * gamma)).unsqueeze(-1)
        c = c + w * half
        grad_gamma = -(w * half).sum() / gamma
    grad_gamma = grad_gamma - (c * rQr).sum()
    w, gc = w.unsqueeze(-1).to(r.dtype), (gamma * c).unsqueeze(-1).to(r.dtype)
    grad_r = w * uQ - 2 * gc * q
    grad_Q = r.flatten(0, 1).mT @ (w * u - gc * r).flatten(0, 1)
    return (
        join(grad_r, a, split, patch, last),
        restore(grad_Q, split, patch, last).to(Q.dtype),
        grad_gamma.to(gamma.dtype),
    )
