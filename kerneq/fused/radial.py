"""The patch step of every radial kernel, its pullback and its Hessian product: the formulas, and which form runs them.

A radial kernel is three functions of one variable, s = γt with t = ‖rW_h‖² = rQrᵀ: the height η, the weight ω = −2η′
and its slope ω′. With rᵢ the patches of r = a − v, qᵢ = rᵢQ, Q = W_hW_hᵀ symmetric, and u, τ the cotangents of m, S:

    S = Σᵢ η(sᵢ)/γ    mᵢ = ∂S/∂vᵢ = ω(sᵢ) qᵢ    −∂²S/∂vᵢ² = ω(sᵢ) Q + 2γω′(sᵢ) qᵢᵀqᵢ
    pᵢ = ⟨uᵢQ, rᵢ⟩    cᵢ = γω′(sᵢ) pᵢ − τω(sᵢ)/2
    ∂r: ω(sᵢ) uᵢQ + 2cᵢqᵢ    ∂Q: Σᵢ rᵢᵀ(ω(sᵢ) uᵢ + cᵢrᵢ)    ∂γ: Σᵢ tᵢω′(sᵢ) pᵢ − τ(η(sᵢ) + sᵢω(sᵢ)/2)/γ²

Two forms. `plain_step` and `plain_pullback` are plain PyTorch: every device and dtype, every formula and patch, and
they can be compiled, exported, vmapped and differentiated as often as one likes. The operator `kerneq::radial_step` is
one pass over memory a direction (`radial_triton`); torch.compile sees no break in it, and it goes into a CUDA graph.
It saves only its inputs; a second derivative goes through the plain form.
"""

import functools
import pkgutil
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..tensors import is_channels_last, working_dtype
from .device import HAS_TRITON, runs_triton

# n, the numbers of a patch: from the least a matrix unit takes to the most that fits in registers
_FUSED_SIZES = {
    torch.bfloat16: (16, 32, 64, 128),
    torch.float16: (16, 32, 64, 128),
    torch.float32: (16, 32, 64),
}


class RadialFormula(Protocol):
    """A radial kernel as the patch step sees it: three functions of s ≥ 0, entry by entry.

    The fused kernel follows from them where they are arithmetic and functions that `triton.language` has under the
    same name as torch (`torch.exp`, `log`, `sqrt`, `rsqrt` …; no `**`), and the class stands at the top of a module;
    other formulas run as plain PyTorch.
    """

    @staticmethod
    def height(s: Tensor) -> Tensor:
        """η(s)."""

    @staticmethod
    def weight(s: Tensor) -> Tensor:
        """ω(s) = −2η′(s)."""

    @staticmethod
    def slope(s: Tensor) -> Tensor:
        """ω′(s)."""


Formula = type[RadialFormula]


def radial_step(
    formula: Formula, a: Tensor, v: Tensor | None, Q: Tensor, gamma: Tensor | float,
    *, split: int, patch: int, value: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """m = ∂S/∂v like `a`, and with `value` also S per sample, (batch,), in float32 (float64 for float64).

    `a` and `v` are (batch, channels, height, width), or (batch, features): pictures of one pixel. r = a − v is cut
    into patches of `split` channels × `patch` × `patch` pixels, whose n entries Q (n × n, symmetric) counts in the
    order (channel, row, column). No `v` means v = 0, and nothing is read for it. A γ that is a float32 tensor on the
    device saves a kernel launch. Differentiable in a, v, Q and γ.
    """
    shape = a.shape
    a, v = _picture(a), None if v is None else _picture(v)
    _check(a, v, Q, gamma, split, patch)
    gamma = torch.as_tensor(gamma, dtype=working_dtype(a.dtype), device=a.device)
    if not _fusable(formula, a, split, patch):
        m, S = plain_step(formula, a, v, Q, gamma, split, patch, value)
        return _like(m, shape), S
    a, v = stored_like(a, a), None if v is None else stored_like(v, a)
    m, total = fused_step(_name(formula), a, v, Q, gamma, split, patch, value)
    return _like(m, shape), total if value else None


def radial_hvp(
    formula: Formula, y: Tensor, a: Tensor, v: Tensor, Q: Tensor, gamma: Tensor, *, split: int, patch: int
) -> Tensor:
    """(ω Q + 2γω′ qᵀq) y, patch by patch, which is −∂²S/∂v² y; no gradients flow through it.

    ∂m/∂r is this (symmetric) matrix, so that the product is the pullback of the step to r.
    """
    shape = y.shape
    y, a, v = _picture(y), _picture(a), _picture(v)
    gamma = gamma.to(working_dtype(a.dtype))
    wanted = [True, False, False, False]
    if not _fusable(formula, a, split, patch):
        pulled = plain_pullback(formula, y, None, a, v, Q, gamma, split, patch, wanted)[0]
        assert pulled is not None
        return _like(pulled, shape)
    a, v, y = stored_like(a, a), stored_like(v, a), y.to(a.dtype)
    pulled = fused_pullback(_name(formula), y, None, a, v, Q, gamma, split, patch, wanted)[0]
    return _like(pulled, shape)


def patch_distances(r: Tensor, weight: Tensor, *, split: int, patch: int) -> Tensor:
    """t = ‖rᵢW_h‖² of every patch, (batch, patches); `weight` is W_hᵀ, hidden × n."""
    rows = cut(_picture(r).to(weight.dtype), split, patch, last=False)
    return (rows @ weight.mT).square().sum(-1)


def _picture(features: Tensor) -> Tensor:
    """Vectors as pictures of one pixel, so that dense and convolutional cells share one formula."""
    return features[:, :, None, None] if features.dim() == 2 else features


def _like(picture: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `_picture`: vectors again where vectors were given."""
    return picture.flatten(1) if len(shape) == 2 else picture


def reads_channels_last(a: Tensor) -> bool:
    """Whether patches are read in the order of channels-last memory; where both orders are one, they are not."""
    return is_channels_last(a) and not a.is_contiguous()


def stored_like(x: Tensor, a: Tensor) -> Tensor:
    """x without holes and in the memory order of `a`."""
    return x.contiguous(memory_format=torch.channels_last if reads_channels_last(a) else torch.contiguous_format)


def _fusable(formula: Formula, a: Tensor, split: int, patch: int) -> bool:
    """Whether the operator takes it; written so that a compiler can follow."""
    if "<locals>" in formula.__qualname__ or not a.is_cuda or not HAS_TRITON or a.numel() == 0:
        return False
    powers = split & (split - 1) == 0 and patch & (patch - 1) == 0
    return powers and split * patch * patch in _FUSED_SIZES.get(a.dtype, ())


def _check(a: Tensor, v: Tensor | None, Q: Tensor, gamma: Tensor | float, split: int, patch: int) -> None:
    if a.dim() != 4:
        raise ValueError(
            f"`a` must have the shape (batch, channels, height, width) or (batch, features), got {tuple(a.shape)}."
        )
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


# The plain form.


def cut(x: Tensor, split: int, patch: int, last: bool) -> Tensor:
    """(batch, channels, height, width) as patches (batch, patches, n).

    Patches and entries run (row, column, channel) if `last`, else (channel, row, column), so that either copy moves
    the longest runs its memory has.
    """
    B, C, H, W = x.shape
    if last:
        blocks = x.permute(0, 2, 3, 1).reshape(B, H // patch, patch, W // patch, patch, C // split, split)
    else:
        blocks = x.reshape(B, C // split, split, H // patch, patch, W // patch, patch)
    return blocks.permute(0, 1, 3, 5, 2, 4, 6).reshape(B, -1, split * patch * patch)


def join(x: Tensor, like: Tensor, split: int, patch: int, last: bool) -> Tensor:
    """The inverse of `cut`: patches back into the shape, memory order and dtype of `like`."""
    B, C, H, W = like.shape
    h, w, g = H // patch, W // patch, C // split
    x = x.to(like.dtype)
    if last:
        blocks = x.reshape(B, h, w, g, patch, patch, split).permute(0, 1, 4, 2, 5, 3, 6)
        return blocks.reshape(B, H, W, C).permute(0, 3, 1, 2)
    return x.reshape(B, g, h, w, split, patch, patch).permute(0, 1, 4, 2, 5, 3, 6).reshape(B, C, H, W)


def _reordered(Q: Tensor, outer: int, inner: int, last: bool) -> Tensor:
    """Q, its entries counted (outer, inner), counted (inner, outer) where the patches run that way."""
    if not last:
        return Q
    return Q.reshape(outer, inner, outer, inner).permute(1, 0, 3, 2).reshape(Q.shape)


def plain_step(
    formula: Formula, a: Tensor, v: Tensor | None, Q: Tensor, gamma: Tensor, split: int, patch: int, value: bool
) -> tuple[Tensor, Tensor | None]:
    """m in the dtype and memory order of `a`, and S per sample if `value`."""
    last = reads_channels_last(a)
    r = cut(a if v is None else (a - v).to(a.dtype), split, patch, last)
    q = r @ _reordered(Q, split, patch * patch, last).to(r.dtype)
    s = gamma * (q * r).sum(-1, dtype=working_dtype(a.dtype))
    m = formula.weight(s).unsqueeze(-1).to(q.dtype) * q
    return join(m, a, split, patch, last), formula.height(s).sum(1) / gamma if value else None


def plain_pullback(
    formula: Formula, u: Tensor, tau: Tensor | None, a: Tensor, v: Tensor | None, Q: Tensor, gamma: Tensor,
    split: int, patch: int, wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of ⟨u, m⟩ + ⟨τ, S⟩ with respect to a, v, Q and γ; None where not `wanted`."""
    want_a, want_v, want_Q, want_gamma = wanted
    last, dtype = reads_channels_last(a), working_dtype(a.dtype)
    r = cut(a if v is None else (a - v).to(a.dtype), split, patch, last)
    u = cut(u, split, patch, last).to(r.dtype)
    Qr = _reordered(Q, split, patch * patch, last).to(r.dtype)
    q, uQ = r @ Qr, u @ Qr
    t = (q * r).sum(-1, dtype=dtype)
    s = gamma * t
    w, b = formula.weight(s), formula.slope(s) * (uQ * r).sum(-1, dtype=dtype)
    c = gamma * b
    if tau is not None:
        c = c - 0.5 * tau.unsqueeze(-1) * w
    w, c = w.unsqueeze(-1), c.unsqueeze(-1).to(r.dtype)
    grad_a = grad_v = grad_Q = grad_gamma = None
    if want_a or want_v:
        grad_r = join(w.to(r.dtype) * uQ + 2 * c * q, a, split, patch, last)
        grad_a = grad_r if want_a else None
        grad_v = -grad_r.to((a if v is None else v).dtype) if want_v else None
    if want_Q:
        found = r.flatten(0, 1).mT @ (w.to(r.dtype) * u + c * r).flatten(0, 1)
        grad_Q = _reordered(found, patch * patch, split, last).to(Q.dtype)
    if want_gamma:
        grad_gamma = (b * t).sum()
        if tau is not None:
            heights = (formula.height(s) + 0.5 * s * w.squeeze(-1)).sum(1)
            grad_gamma = grad_gamma - (tau * heights).sum() / gamma**2
        grad_gamma = grad_gamma.to(gamma.dtype)
    return grad_a, grad_v, grad_Q, grad_gamma


# The operator. A formula goes by its name, which is all an operator, and a program that is saved, can hold.


def _name(formula: Formula) -> str:
    return f"{formula.__module__}:{formula.__qualname__}"


@functools.cache
def _named(name: str) -> Formula:
    formula: Formula = pkgutil.resolve_name(name)
    return formula


def _has_programs(formula: Formula, a: Tensor) -> bool:
    """Whether the card runs Triton, and Triton can express the formula."""
    if not runs_triton(a):
        return False
    from .radial_triton import programs

    return programs(formula) is not None


@torch.library.custom_op("kerneq::radial_step", mutates_args=())
def fused_step(
    formula: str, a: Tensor, v: Tensor | None, Q: Tensor, gamma: Tensor, split: int, patch: int, value: bool
) -> tuple[Tensor, Tensor]:
    """`plain_step` in one pass over memory; S is empty unless `value`. a and v are stored alike."""
    functions = _named(formula)
    if _has_programs(functions, a):
        from . import radial_triton

        return radial_triton.forward(functions, a, v, Q, gamma, split, patch, value)
    m, S = plain_step(functions, a, v, Q, gamma, split, patch, value)
    return m, gamma.new_empty(0) if S is None else S


@fused_step.register_fake
def _(
    formula: str, a: Tensor, v: Tensor | None, Q: Tensor, gamma: Tensor, split: int, patch: int, value: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(a), gamma.new_empty(a.shape[0] if value else 0)


@torch.library.custom_op("kerneq::radial_pullback", mutates_args=())
def fused_pullback(
    formula: str, u: Tensor, tau: Tensor | None, a: Tensor, v: Tensor | None, Q: Tensor, gamma: Tensor,
    split: int, patch: int, wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`plain_pullback` in one pass over memory; empty where not `wanted`."""
    functions = _named(formula)
    if _has_programs(functions, a):
        from . import radial_triton

        return radial_triton.backward(functions, u, tau, a, v, Q, gamma, split, patch, wanted)
    grads = plain_pullback(functions, u, tau, a, v, Q, gamma, split, patch, wanted)
    grad_a, grad_v, grad_Q, grad_gamma = (a.new_empty(0) if grad is None else grad for grad in grads)
    return grad_a, grad_v, grad_Q, grad_gamma


@fused_pullback.register_fake
def _(
    formula: str, u: Tensor, tau: Tensor | None, a: Tensor, v: Tensor | None, Q: Tensor, gamma: Tensor,
    split: int, patch: int, wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    inputs = (a, a if v is None else v, Q, gamma)
    grad_a, grad_v, grad_Q, grad_gamma = (
        torch.empty_like(x) if want else a.new_empty(0) for x, want in zip(inputs, wanted, strict=True)
    )
    return grad_a, grad_v, grad_Q, grad_gamma


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.formula, a, v, Q, gamma, ctx.split, ctx.patch, ctx.value = inputs
    ctx.save_for_backward(a, v, Q, gamma)


def _backward(ctx: Any, u: Tensor, tau: Tensor) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[1:5])
    rest = (u, tau if ctx.value else None, *ctx.saved_tensors, ctx.split, ctx.patch, wanted)
    grads: Sequence[Tensor | None]
    if torch.is_grad_enabled():  # a second derivative is coming: plain operations, which have one
        grads = plain_pullback(_named(ctx.formula), *rest)
    else:
        grads = fused_pullback(ctx.formula, *rest)
    return None, *(grad if want else None for grad, want in zip(grads, wanted, strict=True)), None, None, None


fused_step.register_autograd(_backward, setup_context=_save)
