"""The equation of a cell, z = σ(d(z)), at one batch of inputs."""

import dataclasses
import functools
import types
from collections.abc import Hashable
from typing import Any, NamedTuple, Self, final

import torch
from torch import Tensor

from .kernels.base import AbstractKernel, Binding, Slope
from .linear_maps import LinearMap
from .maps import AbstractMap, Point
from .operators import Scaling
from .prox import AbstractProx, ReLU
from .tensors import cached, per_sample_norm, take_samples


@final
@dataclasses.dataclass(frozen=True)
class Energy:
    """E(z) = ½‖z‖² + 1ᵀφ(z) − S(z) in its parts, each (batch,); they are added up when they are needed."""

    similarity: Tensor  # S(z)
    length: Tensor  # ‖z‖
    penalty: Tensor | None  # 1ᵀφ(z); None: 0
    rounding: float  # of the terms: by what share of them their sum may be off

    @cached
    def value(self) -> Tensor:
        """E(z), (batch,)."""
        half = 0.5 * self.length.square()
        return (half if self.penalty is None else half + self.penalty) - self.similarity

    @cached
    def slack(self) -> Tensor:
        """How far E(z) may be off by rounding alone, (batch,)."""
        return self.rounding * (0.5 * self.length.square() + self.similarity.abs())


class Products(NamedTuple):
    """What one evaluation of an equation at z gives."""

    features: Tensor | None  # Wz; None at z = 0
    image: Tensor  # σ(d(z))
    drive: Tensor | None  # d(z), where it was asked for
    energy: Energy | None  # where it was asked for


def averaged_step(L: Tensor) -> Tensor:
    """α = 2/(2 + L), the step length that lowers E for every slope of d up to L, whatever the weights (fact 3)."""
    return 2 / (2 + L)


@final
@dataclasses.dataclass(frozen=True)
class Equation(AbstractMap):
    """f(z) = σ(d(z)), GEQ (6), the optimality condition of GEQ (5), min E(z) = ½‖z‖² + 1ᵀφ(z) − S(z), at one batch.

    d(z) = ∇S = ∂S/∂z + Wᵀ ∂S/∂v at v = Wz. `bound` is L, the Lipschitz constant of d; `convexity` is μ, the strong
    convexity of E (it may be negative). σ is `prox`. For another σ write an `AbstractProx`, whose `vjp` is its
    derivative, and give it to the cell: gradients and GPU programs know σ by it.
    """

    kernel: AbstractKernel
    binding: Binding
    operator: LinearMap  # W, scaled
    prox: AbstractProx
    scaling: Scaling
    bound: Tensor  # L, a number
    convexity: Tensor  # μ, a number
    norm: float  # of the cell, which holds L under its square
    compiled: bool = False

    @property
    def contraction(self) -> Tensor | None:
        """L where `norm` holds it under 1 everywhere, else None: a curved inner kernel promises less."""
        return self.bound if self.kernel.through_features and self.norm <= 1 else None

    @property
    def stretch(self) -> Tensor:
        """‖W‖², a number."""
        return self.scaling.norm.square()

    def __call__(self, z: Tensor) -> Tensor:
        return self.evaluate(z).image

    def drive(self, z: Tensor) -> Tensor:
        """Return d(z)."""
        drive = self.evaluate(z, drive=True).drive
        assert drive is not None
        return drive

    def energy(self, z: Tensor) -> Tensor:
        """Return E(z) of each sample, (batch,), φ included."""
        energy = self.evaluate(z, energy=True).energy
        assert energy is not None
        return energy.value

    def weights(self, z: Tensor) -> Tensor | None:
        """Return ω(sᵢ) of every patch of r = a − Wz, (batch, groups, rows, columns): 1 where W explains it best.

        None for a kernel that has no patches.
        """
        return self.kernel.weights(self.binding, self.operator(z))

    def features(self, at: Point) -> Tensor:
        """Return Wz, computed again only where it is unknown, or known without a graph that W needs."""
        v = at.features
        graph = torch.is_grad_enabled() and self.operator.weight.requires_grad
        return self.operator(at.z) if v is None or (graph and not v.requires_grad) else v

    def evaluate(self, z: Tensor | None, drive: bool = False, energy: bool = False) -> Products:
        """Evaluate f at z; None stands for z = 0, where there is no Wz to compute.

        With `energy`, E(z) comes out of the same products. Without `drive`, σ may be fused with the product before it.
        """
        if self.compiled and z is not None and not torch.is_grad_enabled():
            bare = self.on(*[tensor.detach() for tensor in self.tensors()])  # dynamo warns of tensors with a graph
            for tensor in (z, bare.binding.a):  # one program for every batch: samples leave as they finish
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
            kind = (self.operator.weight.shape, self.binding.a.shape[2:], self.kernel)
            v, image, d, slope = _compiled(kind)(bare, z, drive, energy)
        else:
            v, image, d, slope = self.products(z, drive, energy)
        z = image.new_zeros(()).expand_as(image) if z is None else z
        return Products(v, image, d, self.energy_of(z, slope))

    def products(
        self, z: Tensor | None, drive: bool, energy: bool
    ) -> tuple[Tensor | None, Tensor, Tensor | None, Slope]:
        """Return Wz, f(z), d(z) where it is wanted, and the derivatives of S: the part that is worth compiling."""
        v = None if z is None else self.operator(z)
        slope = self.kernel.differentiate(self.binding, z, v, value=energy)
        return v, *self.image(slope, drive), slope

    def image(self, slope: Slope, drive: bool) -> tuple[Tensor, Tensor | None]:
        """Return σ(∂S/∂z + Wᵀ ∂S/∂v) and, where it is wanted, its argument d."""
        if slope.dv is None:
            assert slope.dz is not None
            dz = slope.dz.detach()  # at z = 0, the start of a solve; it may be a itself, and with σ = 1 the value
            return self.prox(dz), dz
        if not drive and slope.dv.is_cuda and isinstance(self.prox, ReLU):  # perhaps one program for Wᵀ and σ
            fused = self.operator.adjoint_relu(slope.dv, slope.dz)
            if fused is not None:
                return fused, None
        d = self.operator.adjoint(slope.dv)
        d = d if slope.dz is None else d + slope.dz
        return self.prox(d), d

    def state_at(self, v: Tensor | None) -> Tensor:
        """Return z = σ(Wᵀ∂S/∂v + ∂S/∂z) at the features v (None: 0), for a kernel through which z acts by v alone."""
        slope = self.kernel.differentiate(self.binding, v, v, value=False)  # what stands for z is not used
        return self.image(slope, drive=False)[0]

    def energy_of(self, z: Tensor, slope: Slope, feasible: bool = False) -> Energy | None:
        """Return E at z, where S is known; `feasible` says that φ(z) is finite."""
        if slope.value is None:
            return None
        penalty = None if feasible and self.prox.indicator else self.prox.penalty(z)
        return Energy(slope.value, per_sample_norm(z), penalty, 16 * torch.finfo(z.dtype).eps)

    def descend(self, z: Tensor, drive: Tensor) -> Tensor:
        """Return T(z) = prox_{αφ}((1 − α) z + α d(z)), α = 2/(2 + L): the relaxation is inside the prox.

        Its fixed points are those of f, and E falls by at least ½‖T(z) − z‖², whatever the weights (fact 3).
        """
        alpha = averaged_step(self.bound).to(z.dtype)
        return self.prox(torch.lerp(z, drive, alpha), alpha)

    def error_bound(self, gap: Tensor) -> Tensor:
        """Return the bound ‖z − z*‖ ≤ (1 + L/μ)‖f(z) − z‖ where E is μ-strongly convex (fact 4), else ∞."""
        return torch.where(self.amplification < torch.inf, self.amplification * gap, torch.inf)

    @property
    def amplification(self) -> Tensor:
        """1 + L/μ, a number, with the L and μ that hold for ‖W‖ and ‖W_h‖ from above; ∞ where μ may not be positive.

        In training, where the norms are only followed, no bound on them is known.
        """
        square = self.scaling.excess**2
        L, mu = self.bound * square, 1 - (1 - self.convexity) * square
        return torch.where((mu > 0) & (L < torch.inf), 1 + L / mu, torch.inf)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The shape of z, (batch, ...)."""
        a = self.binding.a
        return (len(a), self.operator.weight.shape[1], *a.shape[2:])

    def rows(self, index: Tensor) -> Self:
        return dataclasses.replace(
            self, binding=dataclasses.replace(self.binding, a=take_samples(self.binding.a, index))
        )

    @property
    def _optional(self) -> list[str]:
        """The tensors of the binding that not every kernel or cell has."""
        return [name for name in ("Q", "gamma", "bias") if getattr(self.binding, name) is not None]

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.operator.weight, self.binding.a, *(getattr(self.binding, name) for name in self._optional))

    def on(self, *tensors: Tensor) -> Self:
        weight, a, *rest = tensors
        binding = dataclasses.replace(self.binding, a=a, **dict(zip(self._optional, rest, strict=True)))  # type: ignore[arg-type]
        return dataclasses.replace(self, operator=dataclasses.replace(self.operator, weight=weight), binding=binding)


@functools.cache
def _compiled(kind: Hashable) -> Any:
    """Return `Equation.products` compiled, with a code object for every kind of equation: dynamo gives one up after
    eight variants, and a model has many."""
    own = types.FunctionType(Equation.products.__code__.replace(), globals(), "products")
    return torch.compile(own)
