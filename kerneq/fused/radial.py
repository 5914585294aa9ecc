"""The patch step of radial kernels by Triton programs: which cases they take, and their gradients.

The formulas stand in `kernels.radial`, which runs them in plain PyTorch everywhere else.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .device import pull_back, runs_triton

Step = Callable[..., tuple[Tensor, Tensor | None]]


def has_programs(formula: type, a: Tensor, split: int, patch: int) -> bool:
    """Whether there are programs for this radial kernel, for patches of this size."""
    powers = split & (split - 1) == 0 and patch & (patch - 1) == 0
    most = 64 if a.dtype == torch.float32 else 128  # numbers of a patch that fit in registers; a matrix unit takes 16
    if not (powers and 16 <= split * patch * patch <= most and a.numel() > 0 and runs_triton(a)):
        return False
    from .radial_triton import programs

    return programs(formula) is not None


def fused_step(
    formula: type, plain: Step, a: Tensor, v: Tensor | None, Q: Tensor, gamma: Tensor,
    split: int, patch: int, value: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`kernels.radial.plain_step`, given as `plain` for second derivatives, by the programs."""
    m, S = _Step.apply(formula, plain, _picture(a), None if v is None else _picture(v), Q, gamma, split, patch, value)  # type: ignore[no-untyped-call]
    return m.view(a.shape), S


def fused_hvp(
    formula: type, a: Tensor, v: Tensor, Q: Tensor, gamma: Tensor, split: int, patch: int
) -> Callable[[Tensor], Tensor]:
    """`kernels.radial.radial_hvp` by the programs: the product is the pullback of the step to v."""
    from .radial_triton import backward

    def product(y: Tensor) -> Tensor:
        inputs = (_picture(y).to(a.dtype), None, _picture(a), _picture(v), Q, gamma, split, patch)
        _, pulled, *_ = backward(formula, *inputs, (False, True, False, False))
        assert pulled is not None
        return pulled.view(a.shape)

    return product


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, formula: type, plain: Step, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        from .radial_triton import forward

        ctx.formula, ctx.plain, (a, v, Q, gamma, *ctx.sizes) = formula, plain, inputs
        ctx.save_for_backward(a, v, Q, gamma)
        return forward(formula, *inputs)

    @staticmethod
    def backward(ctx: Any, u: Tensor, tau: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # a second derivative is wanted, which only plain operations have

            def step(*inputs: Any) -> tuple[Tensor, Tensor | None]:
                return ctx.plain(ctx.formula, *inputs, *ctx.sizes)

            grads = pull_back(step, ctx.saved_tensors, (u, tau))
        else:
            from .radial_triton import backward

            (a, v, Q, gamma), (split, patch, _) = ctx.saved_tensors, ctx.sizes
            grads = backward(ctx.formula, u, tau, a, v, Q, gamma, split, patch, ctx.needs_input_grad[2:6])
        return None, None, *grads, None, None, None


def _picture(features: Tensor) -> Tensor:
    """Return vectors as pictures of one pixel, so that dense and convolutional cells share the programs."""
    return features[:, :, None, None] if features.dim() == 2 else features
