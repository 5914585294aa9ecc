"""The implicit gradient of a kernel equation, solved in the space of the features."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..equation import Closing
from ..solvers.base import AbstractSolver, Map
from ..solvers.features import InFeatures

Solve = Callable[[Map, Tensor, AbstractSolver[Any]], Tensor]


def attach(closing: Closing, z: Tensor, solve: Solve, how: InFeatures) -> Tensor:
    """z, which closes the loop z = σ(Wᵀm + ∂S/∂z), as a function of m = ∂S/∂v, ∂S/∂z and W.

    Backward y = WDg ± WDWᵀNy is solved, and w = D(g ± WᵀNy) follows. N = ±∂²S/∂v² is known in closed form, no graph is
    walked, and neither the last Wᵀm of the forward pass nor Ww of the backward pass (it is y) is computed: the
    cheapest way on a GPU.
    """
    inputs = (closing.m, closing.weight, closing.dz)
    out: Tensor = _Close.apply(*inputs, z, closing, solve, how.solver)  # type: ignore[no-untyped-call]
    return out


class _Close(torch.autograd.Function):
    """Forward: z as it was found. Backward: with w and y = Ww, the gradients of ⟨w, Wᵀm + ∂S/∂z⟩."""

    @staticmethod
    def forward(
        ctx: Any,
        m: Tensor,
        weight: Tensor,
        dz: Tensor | None,
        z: Tensor,
        closing: Closing,
        solve: Solve,
        solver: AbstractSolver[Any],
    ) -> Tensor:
        ctx.save_for_backward(m)
        ctx.closing, ctx.solve, ctx.solver = closing, solve, solver
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "`InFeatures` cannot be differentiated twice; use `Implicit()` or `Phantom()` for second derivatives."
            )
        (m,) = ctx.saved_tensors
        closing: Closing = ctx.closing
        g = g.to(m.dtype)
        source = closing.source(g)
        y = ctx.solve(functools.partial(closing.step, source), source, ctx.solver)
        w = closing.recover(g, y)
        grad_weight = closing.weight_gradient(w, m) if ctx.needs_input_grad[1] else None
        return y, grad_weight, w if ctx.needs_input_grad[2] else None, None, None, None, None
