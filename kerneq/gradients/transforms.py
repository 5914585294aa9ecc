"""The transforms of `torch.func` (grad, vjp, jvp, jacrev, vmap, …), and forward mode without it, through a solve, which
they cannot trace."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..maps import AbstractMap, Point
from ..solution import Solution

CAPTURED = (
    "`torch.func`, or forward mode, follows what f is given: a tensor that the transform differentiates or maps over "
    "must be an input behind `z0`, or a parameter of f where f is a module, and not come from around f."
)
_inner = torch._C._functorch
TensorFunction = Callable[..., tuple[Tensor, ...]]


class _Opaque(torch.autograd.Function):
    """Computes run(*tensors) for a function that autograd can differentiate, on ordinary tensors.

    Its derivatives are such functions again, which repeat what they differentiate. `vmap` is a loop.
    """

    @staticmethod
    def forward(run: TensorFunction, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.clone() for t in run(*tensors))  # forward mode minds views, as the columns of a record may be

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.run, *tensors = inputs
        ctx.mark_non_differentiable(*[t for t in output if not t.is_floating_point()])
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[Tensor | None, ...]:
        pulled = opaque(partial(_pull, ctx.run, len(g)), *g, *ctx.saved_tensors)
        return None, *[p if t.is_floating_point() else None for p, t in zip(pulled, ctx.saved_tensors, strict=True)]

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        moved = [torch.zeros_like(t) if d is None else d for t, d in zip(ctx.saved_tensors, tangents, strict=True)]
        pushed = opaque(partial(_push, ctx.run), *moved, *ctx.saved_tensors)
        return tuple(p if p.is_floating_point() else None for p in pushed)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], run: TensorFunction, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        along = list(zip(tensors, in_dims[1:], strict=True))
        rows = [
            opaque(run, *[t if dim is None else t.select(dim, i) for t, dim in along]) for i in range(info.batch_size)
        ]
        stacked = tuple(torch.stack(column) for column in zip(*rows, strict=True))
        return stacked, (0,) * len(stacked)


def opaque(run: TensorFunction, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return run(*tensors), hidden from the transforms around it."""
    out: tuple[Tensor, ...] = _Opaque.apply(run, *tensors)  # type: ignore[no-untyped-call]
    return out


def solve_opaque(
    f: AbstractMap, z0: Tensor | None, solve: Callable[[AbstractMap, Tensor | None], Solution]
) -> tuple[Solution, Point]:
    """Return the solution under a transform, as a function of the tensors of f, with its value as a point."""
    if z0 is None:
        raise TypeError("Under a transform a solve needs a start `z0`.")
    tol = 0.0

    def run(z0: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        nonlocal tol
        s = solve(f.on(*tensors), z0)
        tol = s.tol
        return s.value, s.residual, s.steps, s.codes

    tensors = f.tensors()
    with torch.enable_grad():
        image = f.on(*map(_strip, tensors))(_strip(z0))
    if _is_followed(image):
        raise RuntimeError(CAPTURED)
    value, residual, steps, codes = opaque(run, z0.detach(), *tensors)
    return Solution(value, residual, steps, codes, tol), Point(value)


def _strip(t: Tensor) -> Tensor:
    """Return the numbers of t that no transform follows, of one sample where `vmap` has many."""
    while _inner.is_functorch_wrapped_tensor(t):
        along = _inner.maybe_get_bdim(t)
        t = _inner.get_unwrapped(t)
        t = t.select(along, 0) if along >= 0 else t
    return _unpack(t)[0].detach()


def _is_followed(t: Tensor) -> bool:
    """Whether a transform follows t: maps over it, or has recorded where it comes from."""
    while _inner.is_functorch_wrapped_tensor(t):
        if _inner.maybe_get_bdim(t) >= 0 or t.requires_grad:
            return True
        t = _inner.get_unwrapped(t)
    return t.requires_grad or _unpack(t)[1] is not None


def _unpack(t: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return t and its tangent in forward mode, if there is one."""
    if forward_ad._current_level < 0:
        return t, None
    dual = forward_ad.unpack_dual(t)  # type: ignore[no-untyped-call]
    return dual.primal, dual.tangent


def _graph(run: TensorFunction, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return inputs and outputs of run with a graph between them, which continues into that of the tensors."""
    inputs = [t.view_as(t) if t.requires_grad else t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
    return inputs, list(run(*inputs))


def _vjp(outputs: list[Tensor], inputs: list[Tensor], g: Sequence[Tensor], create_graph: bool) -> tuple[Tensor, ...]:
    """Return, for each input, the sum of Jᵀg over the outputs that have a graph."""
    known = [(out, each) for out, each in zip(outputs, g, strict=True) if out.requires_grad]
    wanted = [t for t in inputs if t.requires_grad]
    if not known or not wanted:
        return tuple(map(torch.zeros_like, inputs))
    ends, g = zip(*known, strict=True)
    found = iter(torch.autograd.grad(ends, wanted, g, create_graph=create_graph, materialize_grads=True))
    return tuple(next(found) if t.requires_grad else torch.zeros_like(t) for t in inputs)


def _pull(run: TensorFunction, count: int, *arguments: Tensor) -> tuple[Tensor, ...]:
    """(g, tensors) ↦ Jᵀg, J the derivative of run, and g for each of its `count` outputs."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs, outputs = _graph(run, arguments[count:])
        return _vjp(outputs, inputs, arguments[:count], again)


def _push(run: TensorFunction, *arguments: Tensor) -> tuple[Tensor, ...]:
    """(d, tensors) ↦ Jd, the derivative of g ↦ Jᵀg, which is linear, transposed."""
    count, again = len(arguments) // 2, torch.is_grad_enabled()
    with torch.enable_grad():
        inputs, outputs = _graph(run, arguments[count:])
        g = [torch.zeros_like(out, requires_grad=out.requires_grad) for out in outputs]
        pulled = _vjp(outputs, inputs, g, True)
        return _vjp(list(pulled), g, arguments[:count], again)
