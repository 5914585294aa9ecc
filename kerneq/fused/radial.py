"""The patch step of every radial kernel and its Hessian product: the formulas, and which form runs them.

A radial kernel is three functions of one variable, s = γt with t = ‖rW_h‖² = rQrᵀ: the height η, the weight ω = −2η′
and its slope ω′. With rᵢ the patches of r = a − v, qᵢ = rᵢQ, Q = W_hW_hᵀ symmetric, and u, τ the cotangents of m, S:

    S = Σᵢ η(sᵢ)/γ    mᵢ = ∂S/∂vᵢ = ω(sᵢ) qᵢ    −∂²S/∂vᵢ² = ω(sᵢ) Q + 2γω′(sᵢ) qᵢᵀqᵢ
    pᵢ = ⟨uᵢQ, rᵢ⟩    cᵢ = γω′(sᵢ) pᵢ − τω(sᵢ)/2
    ∂r: ω(sᵢ) uᵢQ + 2cᵢqᵢ    ∂Q: Σᵢ rᵢᵀ(ω(sᵢ) uᵢ + cᵢrᵢ)    ∂γ: Σᵢ tᵢω′(sᵢ) pᵢ − τ(η(sᵢ) + sᵢω(sᵢ)/2)/γ²

Two forms. Plain PyTorch takes every device and dtype, every formula and patch, and can be compiled, exported, vmapped
and differentiated as often as one likes. Triton's (`radial_triton`) is one pass over memory a direction, with the
gradients above; it saves only its inputs, and a second derivative goes through the plain form.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ..tensors import is_only_channels_last, widened, working_dtype
from .device import differentiable, runs_triton


class RadialFormula(Protocol):
    """A radial kernel as the patch step sees it: η, ω = −2η′ and ω′, three functions of s ≥ 0, entry by entry.

    The Triton form follows from them where they are arithmetic and functions that `triton.language` has under the same
    name as torch (`torch.exp`, `log`, `sqrt`, `rsqrt` …; no `**`); other formulas run as plain PyTorch.
    """

    @staticmethod
    def height(s: Tensor) -> Tensor: ...
    @staticmethod
    def weight(s: Tensor) -> Tensor: ...
    @staticmethod
    def slope(s: Tensor) -> Tensor: ...


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
    if v is not None and v.shape != a.shape:
        raise ValueError(f"`v` must have the shape of `a`, {tuple(a.shape)}, got {tuple(v.shape)}.")
    dims = a.dim()
    a, v = _picture(a), None if v is None else _picture(v)
    gamma = torch.as_tensor(gamma, dtype=working_dtype(a.dtype), device=a.device)
    step = _Step.apply if _is_fused(formula, a, split, patch) else plain_step
    m, S = step(formula, a, v, Q, gamma, split, patch, value)
    return _with_dims(m, dims), S


def radial_hvp(
    formula: Formula, a: Tensor, v: Tensor, Q: Tensor, gamma: Tensor, *, split: int, patch: int
) -> Callable[[Tensor], Tensor]:
    """y ↦ (ω Q + 2γω′ qᵀq) y, patch by patch, which is −∂²S/∂v² y; no gradients flow through it.

    ∂m/∂r is this (symmetric) matrix, so that the product is the pullback of the step to r. In plain PyTorch all that
    does not depend on y is computed once.
    """
    dims = a.dim()
    a, v, Q = _picture(a.detach()), _picture(v.detach()), Q.detach()
    gamma = gamma.detach().to(working_dtype(a.dtype))
    if _is_fused(formula, a, split, patch):
        from .radial_triton import backward

        def fused(y: Tensor) -> Tensor:
            only_a = (True, False, False, False)
            pulled, *_ = backward(formula, _picture(y).to(a.dtype), None, a, v, Q, gamma, split, patch, only_a)
            assert pulled is not None
            return _with_dims(pulled, dims)

        return fused
    last = is_only_channels_last(a)
    Q, q, s = _products(a, v, Q, gamma, split, patch, last)
    w, slope = formula.weight(s).unsqueeze(-1), 2 * gamma * formula.slope(s)

    def plain(y: Tensor) -> Tensor:
        y = cut(_picture(y), split, patch, last).to(Q.dtype)
        c = (slope * (y * q).sum(-1)).unsqueeze(-1)  # ⟨yQ, r⟩ = ⟨y, q⟩
        return _with_dims(join(torch.addcmul(w * (y @ Q), c, q), a, split, patch, last), dims)

    return plain


def patch_distances(r: Tensor, weight: Tensor, *, split: int, patch: int) -> Tensor:
    """t = ‖rᵢW_h‖² of every patch, (batch, patches); `weight` is W_hᵀ, hidden × n."""
    rows = cut(_picture(r).to(weight.dtype), split, patch, last=False)
    return (rows @ weight.mT).square().sum(-1)


def patch_weights(
    formula: Formula, a: Tensor, v: Tensor, Q: Tensor, gamma: Tensor, *, split: int, patch: int
) -> Tensor:
    """ω(sᵢ) of every patch of r = a − v, (batch, channels / split, height / patch, width / patch)."""
    _, _, s = _products(_picture(a.to(Q.dtype)), _picture(v), Q, gamma, split, patch, last=False)
    height, width = _picture(a).shape[2:]
    return formula.weight(s).view(len(a), -1, height // patch, width // patch)


def plain_step(
    formula: Formula, a: Tensor, v: Tensor | None, Q: Tensor, gamma: Tensor, split: int, patch: int, value: bool
) -> tuple[Tensor, Tensor | None]:
    """`radial_step` of pictures in plain PyTorch; m in the dtype and memory order of `a`."""
    last = is_only_channels_last(a)
    _, q, s = _products(a, v, Q, gamma, split, patch, last)
    m = formula.weight(s).unsqueeze(-1) * q
    return join(m, a, split, patch, last), formula.height(s).sum(1) / gamma if value else None


def _products(
    a: Tensor, v: Tensor | None, Q: Tensor, gamma: Tensor, split: int, patch: int, last: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Q in the order and dtype of the patches r of a − v, q = rQ, (batch, patches, n), and s = γ⟨q, r⟩.

    q is in float32 at least, as in Triton's form: in float16 the square of 256 is infinite, and ω of it 0.
    """
    r = cut(a if v is None else (a - v).to(a.dtype), split, patch, last)
    if last:  # from (channel, pixel), as Q's entries are counted, to (pixel, channel)
        pixels = patch * patch
        Q = Q.reshape(split, pixels, split, pixels).permute(1, 0, 3, 2).reshape(Q.shape)
    Q = Q.to(r.dtype)
    q = widened(r @ Q)
    return Q, q, gamma * (q * r).sum(-1)


class _Step(torch.autograd.Function):
    """`plain_step`, argument for argument, by the Triton programs."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        from .radial_triton import forward

        ctx.formula, a, v, Q, gamma, *ctx.sizes = inputs
        ctx.save_for_backward(a, v, Q, gamma)
        return forward(*inputs)

    @staticmethod
    def backward(ctx: Any, u: Tensor, tau: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # a second derivative is coming: plain operations, which have one

            def step(*inputs: Any) -> tuple[Tensor, Tensor | None]:
                return plain_step(ctx.formula, *inputs, *ctx.sizes)

            grads = differentiable(step, ctx.saved_tensors, (u, tau))
        else:
            from .radial_triton import backward

            (a, v, Q, gamma), (split, patch, _) = ctx.saved_tensors, ctx.sizes
            grads = backward(ctx.formula, u, tau, a, v, Q, gamma, split, patch, ctx.needs_input_grad[1:5])
        return None, *grads, None, None, None


def _is_fused(formula: Formula, a: Tensor, split: int, patch: int) -> bool:
    """Whether Triton's form takes it: patches of a size it has programs for, of a formula it can express."""
    powers = split & (split - 1) == 0 and patch & (patch - 1) == 0
    most = 64 if a.dtype == torch.float32 else 128  # numbers of a patch that fit in registers; a matrix unit takes 16
    if not (powers and 16 <= split * patch * patch <= most and a.numel() > 0 and runs_triton(a)):
        return False
    from .radial_triton import programs

    return programs(formula) is not None


def _picture(features: Tensor) -> Tensor:
    """Vectors as pictures of one pixel, so that dense and convolutional cells share one formula."""
    return features[:, :, None, None] if features.dim() == 2 else features


def _with_dims(picture: Tensor, dims: int) -> Tensor:
    """The inverse of `_picture`: vectors again where vectors were given."""
    return picture.flatten(1) if dims == 2 else picture


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
