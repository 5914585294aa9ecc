"""The operator `kerneq::patch_step`: Triton on CUDA cards, closed-form gradients, whole under torch.compile.

Being an operator, it goes through torch.compile without a break and into a CUDA graph. It saves only its
inputs, and recomputes r and q in backward; a second derivative goes through the plain operations of
`fused_reference`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..cards import runs_triton
from . import fused_reference as reference


@torch.library.custom_op("kerneq::patch_step", mutates_args=())
def step(
    a: Tensor,
    v: Tensor | None,
    Q: Tensor,
    gamma: Tensor,
    split: int,
    patch: int,
    negated: bool,
    similarity: bool,
) -> tuple[Tensor, Tensor]:
    if runs_triton(a):
        from . import fused_launch

        return fused_launch.forward(a, v, Q, gamma, split, patch, negated, similarity)
    m, S = reference.forward(a, v, Q, gamma, split, patch, negated)
    return m, S if similarity else S.new_empty(0)


@step.register_fake
def _(
    a: Tensor,
    v: Tensor | None,
    Q: Tensor,
    gamma: Tensor,
    split: int,
    patch: int,
    negated: bool,
    similarity: bool,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(a), a.new_empty(a.shape[0] if similarity else 0, dtype=reference.accumulator(a))


@torch.library.custom_op("kerneq::patch_step_backward", mutates_args=())
def step_backward(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if runs_triton(a):
        from . import fused_launch

        return fused_launch.backward(u, t, a, v, Q, gamma, split, patch, negated, wanted)
    grad_r, grad_Q, grad_gamma = reference.pullback(u, t, a, v, Q, gamma, split, patch, negated)
    grads = (
        grad_r,
        (grad_r.clone() if negated else -grad_r).to((a if v is None else v).dtype),
        grad_Q,
        grad_gamma,
    )
    grad_a, grad_v, grad_Q, grad_gamma = (x if want else x.new_empty(0) for x, want in zip(grads, wanted, strict=True))
    return grad_a, grad_v, grad_Q, grad_gamma


@step_backward.register_fake
def _(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs = (a, a if v is None else v, Q, gamma)
    grad_a, grad_v, grad_Q, grad_gamma = (
        torch.empty_like(x) if want else x.new_empty(0) for x, want in zip(inputs, wanted, strict=True)
    )
    return grad_a, grad_v, grad_Q, grad_gamma


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    a, v, Q, gamma, *settings = inputs
    ctx.save_for_backward(a, v, Q, gamma)
    ctx.settings = settings


def _backward(ctx: Any, u: Tensor, t: Tensor) -> tuple[Tensor | None, ...]:
    a, v, Q, gamma = ctx.saved_tensors
    split, patch, negated, similarity = ctx.settings
    cotangents = (u, t if similarity else None)
    wanted = list(ctx.needs_input_grad[:4])
    if torch.is_grad_enabled():  # a second derivative is coming: plain operations, which have one
        grad_r, grad_Q, grad_gamma = reference.pullback(*cotangents, a, v, Q, gamma, split, patch, negated)
        grad_v = None if v is None else (grad_r if negated else -grad_r).to(v.dtype)
        return grad_r, grad_v, grad_Q, grad_gamma, None, None, None, None
    shared = negated and v is not None and wanted[0] and wanted[1] and a.dtype == v.dtype
    wanted[1] = wanted[1] and not shared
    grads = list(step_backward(*cotangents, a, v, Q, gamma, split, patch, negated, wanted))
    if shared:
        grads[1], wanted[1] = grads[0], True
    return *(grad if want else None for grad, want in zip(grads, wanted, strict=True)), None, None, None, None


step.register_autograd(_backward, setup_context=_save)
