"""How a gradient reaches the parameters behind f."""

import abc
from typing import Any

import torch
from torch import Tensor

from ..equation import Map


class AbstractGradient(abc.ABC):
    """A rule that ties an equilibrium, found without a graph, to the parameters and inputs of its map; a value."""

    @abc.abstractmethod
    def attach(self, f: Map, z: Tensor) -> Tensor:
        """The equilibrium z (batch, ...) of f, with a gradient path into everything f depends on."""


def once(u: Tensor, g: Tensor, image: Tensor, reason: str) -> Tensor:
    """u, which must not be differentiated with respect to g nor to what is behind `image`: the error says `reason`."""
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
