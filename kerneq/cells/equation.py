"""The equation of a cell at one batch of inputs: its drive, its energy, its backward system."""

import dataclasses
import functools
import types
from collections.abc import Hashable
from typing import Any, Self, final

import torch
from torch import Tensor

from ..equation import AbstractEquation, AbstractFeatures, Closing, Evaluation
from ..kernels.base import AbstractBoundSimilarity, Slope
from ..operators import BoundOperator
from ..prox import AbstractProx, ReLU
from ..solution import per_sample_norm


@final
@dataclasses.dataclass(frozen=True)
class Equation(AbstractEquation):
    """f(z) = σ(d(z)) with d(z) = ∂S/∂z + Wᵀ ∂S/∂v at v = Wz; E(z) = ½‖z‖² + 1ᵀφ(z) − S."""

    operator: BoundOperator
    similarity: AbstractBoundSimilarity
    prox: AbstractProx
    bound: Tensor  # L
    convexity: Tensor  # μ
    compiled: bool = False

    def evaluate(self, z: Tensor, drive: bool = True, energy: bool = True) -> Evaluation:
        if self.compiled and not torch.is_grad_enabled():
            bare = self.on(*[tensor.detach() for tensor in self.tensors()])  # dynamo warns of tensors with a graph
            for tensor in (z, bare.similarity.a):  # one program for every batch: samples leave as they finish
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
            kind = (self.operator.weight.shape, self.similarity.a.shape[2:], type(self.similarity))
            return Evaluation(z, *_compiled(kind)(bare, z, drive, energy))
        return Evaluation(z, *self.products(z, drive, energy))

    def evaluate_zero(self, drive: bool = True, energy: bool = True) -> Evaluation:
        slope = self.similarity.slope_at_zero(energy)
        image, d = self.image(slope, drive)
        zero = image.new_zeros(()).expand_as(image)
        return Evaluation(zero, image, d, *self.total(zero, slope.value))

    def in_features(self) -> "Features | None":
        return Features(self) if self.similarity.through_features else None

    def closing(self, z: Tensor) -> Closing | None:
        if not self.similarity.through_features:
            return None
        v = self.operator(z)
        bend = self.similarity.bend(v.detach())
        slope = self.similarity.slope(z, v, value=False)
        assert slope.dv is not None
        w, prox, sign = self.operator.detach(), self.prox, self.similarity.bend_sign

        def pull_adjoint(n: Tensor, g: Tensor | None, sign: int) -> Tensor:
            if isinstance(prox, ReLU):
                return w.adjoint_masked(n, z, g, sign)
            drive = sign * w.adjoint(n)
            return prox.pull(z, drive if g is None else g + drive)

        pull = functools.partial(prox.pull, z)
        weight = self.operator.weight
        return Closing(slope.dv, slope.dz, weight, w, w.added, w.weight_gradient, bend, sign, pull, pull_adjoint)

    def _drive(self, slope: Slope) -> Tensor:
        """∂S/∂z + Wᵀ ∂S/∂v."""
        if slope.dv is None:
            assert slope.dz is not None
            return slope.dz
        drive = self.operator.adjoint(slope.dv)
        return drive if slope.dz is None else drive + slope.dz

    def image(self, slope: Slope, drive: bool) -> tuple[Tensor, Tensor | None]:
        """f(z) and, where it is wanted, d(z)."""
        if not drive and slope.dv is not None and isinstance(self.prox, ReLU):
            return self.operator.adjoint_relu(slope.dv, slope.dz), None
        d = self._drive(slope)
        return self.prox(d), d

    def products(
        self, z: Tensor, drive: bool, energy: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """f(z) and, where they are wanted, d(z) and E(z) with its rounding error."""
        slope = self.similarity.slope(z, self.operator(z), value=energy)
        return *self.image(slope, drive), *self.total(z, slope.value)

    def total(self, z: Tensor, similarity: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """E = ½‖z‖² + 1ᵀφ(z) − S of each sample, and how far rounding may have put it off."""
        if similarity is None:
            return None, None
        half = 0.5 * per_sample_norm(z).square()
        rounding = 16 * torch.finfo(z.dtype).eps * (half + similarity.abs())
        return half + self.prox.penalty(z) - similarity, rounding

    def rows(self, index: Tensor) -> Self:
        return dataclasses.replace(self, similarity=self.similarity.rows(index))

    def tensors(self) -> tuple[Tensor, ...]:
        return self.operator.weight, *self.similarity.tensors()

    def on(self, *tensors: Tensor) -> Self:
        weight, *others = tensors
        operator = BoundOperator(weight, self.operator.size)
        return dataclasses.replace(self, operator=operator, similarity=self.similarity.on(*others))


@final
@dataclasses.dataclass(frozen=True)
class Features(AbstractFeatures):
    """The equation for v = Wz: v ↦ Wσ(Wᵀ∂S/∂v + ∂S/∂z)."""

    equation: Equation

    def __call__(self, v: Tensor) -> Tensor:
        return self.equation.operator(self.state(v))

    def state(self, v: Tensor) -> Tensor:
        slope = self.equation.similarity.slope(v, v, value=False)  # whatever stands for z is not looked at
        return self.equation.image(slope, drive=False)[0]

    def start(self, z0: Tensor | None) -> Tensor:
        if z0 is not None:
            return self.equation.operator(z0)
        a = self.equation.similarity.a
        zero = a.new_zeros(len(a), len(self.equation.operator.weight), *a.shape[2:])
        last = a.dim() == 4 and a.is_contiguous(memory_format=torch.channels_last)
        return zero.to(memory_format=torch.channels_last) if last else zero

    def rows(self, index: Tensor) -> Self:
        return dataclasses.replace(self, equation=self.equation.rows(index))


@functools.cache
def _compiled(kind: Hashable) -> Any:
    """A code object for every kind of equation: dynamo gives one up after eight variants, and a model has many."""
    own = types.FunctionType(Equation.products.__code__.replace(), globals(), "products")
    return torch.compile(own)
