"""How a gradient reaches the parameters behind f."""

import abc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..maps import AbstractMap, Linearisation, Map, Point
from ..solvers.base import AbstractSolver


class AbstractGradient(abc.ABC):
    """A rule that ties an equilibrium, found without a graph, to the parameters and inputs of its map; a value."""

    linearises: ClassVar[bool] = False  # whether `attach` begins with `linearise_at`

    @abc.abstractmethod
    def attach(self, f: Map, at: Point) -> Point:
        """Return the equilibrium `at` of f with a gradient path into everything f depends on.

        `Point(z)` is enough for an equilibrium z (batch, ...) from elsewhere; a solve adds what it has computed there.
        """


class AbstractSteps(AbstractGradient):
    """A rule that differentiates `steps` steps of its own from z = 0.

    They are the value of a layer with and without gradients, in the place of its solver.
    """

    steps: int

    @abc.abstractmethod
    def choose_solver(self, f: AbstractMap) -> AbstractSolver[Any]:
        """Return the solver whose steps are taken."""


def attach_through_graph(
    system: Linearisation,
    z: Tensor,
    solve: Callable[[Tensor], Tensor],
    reason: str,
    tensors: tuple[Tensor, ...] = (),
    again: Callable[[Tensor, Tensor], Sequence[Tensor | None]] | None = None,
) -> Tensor:
    """Return z as it was found, with the graph of f(z) behind it, which a gradient g enters as u = solve(g).

    Differentiated twice, that graph will not do: its z is a constant. Then again(u, g) gives the gradients of `tensors`
    as a function of them and of g. Without it, or where f depends on others, that raises an error: `reason`.
    """
    found: Tensor = _ThroughGraph.apply(system.image, z, system, solve, reason, again, *tensors)  # type: ignore[no-untyped-call]
    return found


class _ThroughGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, image: Tensor, z: Tensor, *rest: Any) -> Tensor:
        ctx.system, ctx.solve, ctx.reason, ctx.again, *ctx.tensors = rest
        return z.view_as(z).to(image.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        system: Linearisation = ctx.system
        with torch.no_grad():
            u = ctx.solve(g.detach()).to(g.dtype)
        if torch.is_grad_enabled():
            if ctx.again is not None and not reaches_others(system.image, (system.z, *ctx.tensors)):
                return *[None] * 6, *ctx.again(u, g)
            u = once(u, g, system.image, ctx.reason)
        return u, *[None] * (5 + len(ctx.tensors))


def once(u: Tensor, g: Tensor, image: Tensor, reason: str) -> Tensor:
    """Return u such that differentiating it with respect to g, or what is behind `image`, raises an error: `reason`."""
    kept: Tensor = _Once.apply(u, g, image, reason)  # type: ignore[no-untyped-call]
    return kept


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor, g: Tensor, image: Tensor, reason: str) -> Tensor:
        ctx.reason = reason
        return u.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, None, None, None]:
        raise RuntimeError(ctx.reason)


def find_leaves(image: Tensor, known: Sequence[Tensor] = ()) -> Iterator[Tensor]:
    """Yield the leaf tensors behind `image` that have gradients, but for those reached through the `known` ones."""
    seen = {t.grad_fn for t in known if t.grad_fn is not None}
    stack = [image.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # only the node of a leaf has it
        if leaf is not None:
            yield leaf
        stack += [following for following, _ in node.next_functions]


def reaches_others(image: Tensor, known: Sequence[Tensor]) -> bool:
    """Whether `image` depends on a tensor with a gradient that is not behind the `known` ones."""
    return any(all(leaf is not t for t in known) for leaf in find_leaves(image, known))
