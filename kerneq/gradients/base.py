"""How a gradient reaches the parameters behind f."""

import abc
from typing import Any

import torch
from torch import Tensor

from ..maps import AbstractMap, Map, Point
from ..solvers.base import AbstractSolver


class AbstractGradient(abc.ABC):
    """A rule that ties an equilibrium, found without a graph, to the parameters and inputs of its map; a value."""

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
