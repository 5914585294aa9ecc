"""Maps z ↦ f(z) of a batch of states: the contract, any function as a map, and the derivative of a map at a point."""

import abc
import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from .solution import Solution
from .tensors import map_tensors, precision, take_samples, widened

__all__ = ["AbstractMap", "Function", "Linearisation", "Map", "Point", "as_map", "linearise", "linearise_at"]
__dir__ = __all__.copy  # `dir` lists the public names only


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
    """Any function f(z, *inputs, **named) of a batch of states; inputs that are no tensors are passed on as they are.

    It can be restricted to samples where every tensor among the inputs has the batch as its first dimension.
    """

    function: Callable[..., Tensor]
    inputs: tuple[Any, ...] = ()
    named: dict[str, Any] = dataclasses.field(default_factory=dict)
    parameters: dict[str, Tensor] | None = None  # of a module, in the place of its own
    restrictable: bool = True  # whether the inputs have the batch in dimension 0, if there are any
    apart: bool = False  # whether f is known to treat every sample on its own

    def __call__(self, z: Tensor) -> Tensor:
        arguments = (z, *self.inputs)
        if self.parameters is None:
            return self.function(*arguments, **self.named)
        assert isinstance(self.function, nn.Module)
        found: Tensor = torch.func.functional_call(self.function, self.parameters, arguments, self.named)
        return found

    @property
    def given(self) -> list[Tensor]:
        """The tensors among the inputs."""
        return [t for t in (*self.inputs, *self.named.values()) if isinstance(t, Tensor)]

    def of_batch(self, batch: int) -> Self:
        """Return the same map for states of so many samples: it can be restricted if all its tensors have as many."""
        fits = self.restrictable and all(t.dim() > 0 and len(t) == batch for t in self.given)
        return dataclasses.replace(self, restrictable=fits)

    def rows(self, index: Tensor) -> Self | None:
        if not self.restrictable or not self.given:
            return None
        return self._replace_given([take_samples(t, index) for t in self.given])

    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.given, *self._own_parameters().values())

    def on(self, *tensors: Tensor) -> Self:
        count, own = len(self.given), self._own_parameters()
        parameters = dict(zip(own, tensors[count:], strict=True)) or None
        return dataclasses.replace(self._replace_given(tensors[:count]), parameters=parameters)

    def _own_parameters(self) -> dict[str, Tensor]:
        if self.parameters is not None:
            return self.parameters
        return dict(self.function.named_parameters()) if isinstance(self.function, nn.Module) else {}

    def _replace_given(self, tensors: Sequence[Tensor]) -> Self:
        """Return the same map with these tensors in the places of those among the inputs."""
        left = iter(tensors)
        inputs = tuple(next(left) if isinstance(x, Tensor) else x for x in self.inputs)
        named = {name: next(left) if isinstance(x, Tensor) else x for name, x in self.named.items()}
        return dataclasses.replace(self, inputs=inputs, named=named)


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
    backward: list[Solution] | None = None  # every backward solve appends its outcome, without the value
    memory: object = None  # what the solver remembers at its end, of all samples; None where some had left
    system: "Linearisation | None" = None  # f(z) with its graph


@final
@dataclasses.dataclass(frozen=True)
class Linearisation:
    """The map f at z through the graph of one evaluation, with J = ∂f/∂z."""

    z: Tensor  # a leaf
    image: Tensor  # f(z), with its graph
    dtype: torch.dtype  # that f computes in
    apart: bool = False  # whether f is known to treat every sample on its own

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
        with run_eager():
            image = f(z)
        return Linearisation(z, image, precision(image))


def linearise_at(f: AbstractMap, at: Point) -> Linearisation:
    """Return the evaluation of f at a point with its graph, that of the solve where it has made one."""
    return at.system or linearise(f, at.z.detach())


def run_eager() -> contextlib.AbstractContextManager[None]:
    """Run what `torch.compile` made as it was written: it frees its graph after one backward pass, where a solve makes
    many, and has no second derivatives. Where nothing is compiled, the compiler is not imported."""
    compiled = "torch._dynamo" in sys.modules and not torch.compiler.is_compiling()
    return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()


def _recordable(t: Tensor) -> Tensor:
    """Return t, or a copy of a tensor made in inference mode, which autograd refuses to record."""
    return t.detach().clone() if t.is_inference() else t
