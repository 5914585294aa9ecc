"""Maps z ↦ f(z) of a batch of states: the contract, any function as a map, and the derivative of a map at a point."""

import abc
import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Self, final

import torch
from torch import Tensor

from .tensors import map_tensors, take_samples, widened


class AbstractMap(abc.ABC):
    """A map z ↦ f(z) of batches (batch, ...) whose fixed point is wanted.

    To write one, write `__call__`. The other methods are worth writing too: with `rows`, samples that have converged
    cost nothing; with `tensors` and `on`, gradients can be differentiated again.
    """

    @abc.abstractmethod
    def __call__(self, z: Tensor) -> Tensor: ...

    def rows(self, index: Tensor) -> Self | None:
        """Return the same map for the samples in `index` only; None where that is not possible."""
        return None

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor f is known to depend on that may need a gradient."""
        return ()

    def on(self, *tensors: Tensor) -> Self:
        """Return the same map on other tensors, given in the order of `tensors`."""
        return self


@final
@dataclasses.dataclass(frozen=True)
class Function(AbstractMap):
    """Any function f(z, *inputs) of a batch of states; with inputs (batch, ...) it can be restricted to samples."""

    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...] = ()

    def __call__(self, z: Tensor) -> Tensor:
        return self.function(z, *self.inputs)

    def rows(self, index: Tensor) -> Self | None:
        if not self.inputs:
            return None
        return dataclasses.replace(self, inputs=tuple(take_samples(x, index) for x in self.inputs))


Map = Callable[[Tensor], Tensor]  # what users may give; an `AbstractMap` is one


def as_map(f: Map) -> AbstractMap:
    """Return f itself if it is an `AbstractMap`, else a `Function` of it."""
    return f if isinstance(f, AbstractMap) else Function(f)


@final
@dataclasses.dataclass(frozen=True)
class Point:
    """A state z and what a solve has already computed there; None where it is not known.

    A gradient rule takes a point and returns one whose tensors lead to the parameters.
    """

    z: Tensor
    features: Tensor | None = None  # Wz, for the equation of a cell
    image: Tensor | None = None  # f(z)
    backward: list[Tensor] | None = None  # every backward solve appends which samples converged, (batch,) of bool


@final
@dataclasses.dataclass(frozen=True)
class Linearisation:
    """The map f at z through the graph of one evaluation, with J = ∂f/∂z."""

    z: Tensor  # a leaf
    image: Tensor  # f(z), with its graph

    def vjp(self, u: Tensor) -> Tensor:
        """Return Jᵀu."""
        if not self.image.requires_grad:  # f depends neither on z nor on anything else that has a gradient
            return torch.zeros_like(u)
        with torch.enable_grad():
            (pulled,) = torch.autograd.grad(
                self.image, self.z, u.to(self.image.dtype), retain_graph=True, allow_unused=True
            )
        return torch.zeros_like(u) if pulled is None else pulled.to(u.dtype)

    def jacobian(self) -> Tensor:
        """Return J, (batch, n, n) for states of n entries, by n products."""
        units = torch.eye(math.prod(self.z.shape[1:]), dtype=self.z.dtype, device=self.z.device)
        rows = [self.vjp(unit.view(self.z.shape[1:]).expand_as(self.z)) for unit in units]
        return torch.stack([row.reshape(len(row), -1) for row in rows], dim=1)

    def solve(self, g: Tensor, transposed: bool = False) -> Tensor:
        """Return (I − J)⁻¹g, or (I − Jᵀ)⁻¹g, by elimination, n³ operations a sample; not finite if singular."""
        J = widened(self.jacobian())
        matrix = torch.eye(J.shape[-1], dtype=J.dtype, device=J.device) - (J.mT if transposed else J)
        return torch.linalg.solve_ex(matrix, g.to(J.dtype).reshape(len(g), -1))[0].view_as(g)


def linearise(f: AbstractMap, z: Tensor) -> Linearisation:
    """Evaluate f at z (batch, ...) with a graph that can be differentiated any number of times."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return linearise(map_tensors(_recordable, f), _recordable(z))
    with torch.enable_grad():
        z = z.requires_grad_()
        if "torch._dynamo" not in sys.modules:  # nothing is compiled: do not wait for the import
            return Linearisation(z, f(z))
        # A function that torch.compile made frees its buffers after one backward pass, and a solve makes many.
        with torch.compiler.set_stance("force_eager"):
            return Linearisation(z, f(z))


def _recordable(t: Tensor) -> Tensor:
    """Return t, or a copy of a tensor made in inference mode, which autograd refuses to record."""
    return t.detach().clone() if t.is_inference() else t
