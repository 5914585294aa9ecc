"""The derivative of an equation in closed form: the adjoint system of its equilibrium, in two variables."""

import dataclasses
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from .equation import Equation
from .linear_maps import AbstractLinearMap
from .maps import Point
from .prox import AbstractProx, ReLU
from .spaces import AbstractSpace, Evaluation, evaluate_start
from .tensors import magnitude


@final
@dataclasses.dataclass(frozen=True)
class AdjointPoint:
    """A point of an adjoint system and the products that were computed there."""

    z: Tensor  # the variable that is solved for
    y: Tensor | None = None  # Ww, in the state system
    n: Tensor | None = None  # Ny
    masked: Tensor | None = None  # DWᵀNy, in the feature system


@final
@dataclasses.dataclass(frozen=True)
class Adjoint:
    """The loop z = σ(Wᵀm + ∂S/∂z), m = ∂S/∂v at v = Wz, opened at its last link, for the backward pass.

    With g = ∂L/∂z, the adjoint system is w = D(g + Hw), H = P ± WᵀNW: N = ±∂²S/∂v² and P = ∂²S/∂z² are known in closed
    form; the sign of N is apart, which saves a pass. Where there is no P it becomes y = WDg ± WDWᵀNy in the space of
    y = Ww, and w = D(g ± WᵀNy) follows.
    """

    z: Tensor  # the equilibrium
    v: Tensor  # Wz
    image: Tensor  # f(z), whose entries say what D is; those of z do not: a mixture of iterates has no zeros
    m: Tensor  # with its graph, but for that of v
    dz: Tensor | None  # ∂S/∂z, with its graph
    weight: Tensor  # of W, with its graph
    operator: AbstractLinearMap  # W, without
    prox: AbstractProx
    hvp: Callable[[Tensor], Tensor]  # N
    sign: int
    state_hvp: Callable[[Tensor], Tensor] | None  # P; None: 0

    def in_features(self, g: Tensor) -> "FeatureAdjoint":
        """Return the system y = WDg ± WDWᵀNy, in a unit of its own."""
        source = self.operator(self.masked(g))
        unit = magnitude(source)
        return FeatureAdjoint(self, g, source / unit, unit)

    def in_state(self, g: Tensor) -> "StateAdjoint":
        """Return the system w = Dg + DHw, in a unit of its own."""
        source = self.masked(g)
        unit = magnitude(source)
        return StateAdjoint(self, source / unit, unit)

    def masked(self, g: Tensor) -> Tensor:
        """Return Dg."""
        return self.prox.vjp(self.image.to(g.dtype), g)

    def symmetric(self, w: Tensor) -> Tensor:
        """Return (I − DHD) w for w = Dw."""
        u = w.to(self.z.dtype)
        curved = None if self.state_hvp is None else self.state_hvp(u)
        return w - self.masked_adjoint(self.hvp(self.operator(u)), curved, self.sign).to(w.dtype)

    def masked_adjoint(self, n: Tensor, g: Tensor | None, sign: int) -> Tensor:
        """Return D(g ± Wᵀn), or ±DWᵀn without g."""
        if isinstance(self.prox, ReLU):
            return self.operator.adjoint_masked(n, self.image, g, sign)
        drive = sign * self.operator.adjoint(n)
        return self.prox.vjp(self.image, drive if g is None else g + drive)


def open_adjoint(f: Equation, at: Point) -> Adjoint:
    """Return the adjoint of f at its equilibrium; what the solve has computed there is not computed again."""
    operator = dataclasses.replace(f.operator, weight=f.operator.weight.detach())
    z = at.z.detach()
    v = operator(z) if at.features is None else at.features.detach()
    slope = f.kernel.differentiate(f.binding, z, v, value=False)
    assert slope.dv is not None
    image = at.image
    if image is None:
        with torch.no_grad():
            image = f.image(slope, drive=False)[0]
    hvp, state_hvp = f.kernel.hvp(f.binding, v), f.kernel.state_hvp(f.binding, z)
    sign = f.kernel.hvp_sign
    return Adjoint(z, v, image, slope.dv, slope.dz, f.operator.weight, operator, f.prox, hvp, sign, state_hvp)


@final
@dataclasses.dataclass(frozen=True)
class FeatureAdjoint(AbstractSpace):
    """Iterates y ↦ WDg ± WDWᵀNy, whose value at y = 0 is known.

    It is linear in g, which may be too small or too large to be squared: so WDg and y are in units of WDg's own size.
    """

    adjoint: Adjoint
    g: Tensor
    source: Tensor  # WDg
    unit: Tensor  # of source and y; a power of two a sample

    def evaluate(self, z: Tensor) -> Evaluation:
        adjoint = self.adjoint
        n = adjoint.hvp(z)
        masked = adjoint.masked_adjoint(n, None, 1)
        image = adjoint.operator.added(self.source, masked, adjoint.sign)
        return Evaluation(z, image, AdjointPoint(z, None, n, masked))

    def start(self, z0: Tensor | None) -> Evaluation:
        if z0 is not None:
            return evaluate_start(self, z0)
        y = 0 * self.source  # where g is no number y is none: a 0 would go unnoticed
        return Evaluation(y, self.source, AdjointPoint(y))

    def recover(self, at: AdjointPoint) -> tuple[Tensor, Tensor, Tensor]:
        """Return w = D(g ± WᵀNy), y and Ny, in the unit of g."""
        adjoint = self.adjoint
        scaled = at.z * self.unit
        if at.n is None or at.masked is None:
            n = adjoint.hvp(scaled)
            return adjoint.masked_adjoint(n, self.g, adjoint.sign), scaled, n
        w = torch.addcmul(adjoint.masked(self.g), at.masked, self.unit, value=adjoint.sign)
        return w, scaled, scaled if at.n is at.z else at.n * self.unit  # N = 1 for the linear kernel


@final
@dataclasses.dataclass(frozen=True)
class StateAdjoint(AbstractSpace):
    """Iterates w ↦ Dg + DHw, linear in g too: Dg and w are in units of Dg's own size."""

    adjoint: Adjoint
    source: Tensor  # Dg
    unit: Tensor  # of source and w; a power of two a sample

    def evaluate(self, z: Tensor) -> Evaluation:
        adjoint = self.adjoint
        y = adjoint.operator(z)
        n = adjoint.hvp(y)
        g = self.source if adjoint.state_hvp is None else self.source + adjoint.state_hvp(z)
        return Evaluation(z, adjoint.masked_adjoint(n, g, adjoint.sign), AdjointPoint(z, y, n))

    def start(self, z0: Tensor | None) -> Evaluation:
        return evaluate_start(self, self.source if z0 is None else z0)

    def recover(self, at: AdjointPoint) -> tuple[Tensor, Tensor, Tensor]:
        """Return w, y = Ww and Ny, in the unit that g had."""
        w, y, n = at.z.to(self.source.dtype), at.y, at.n
        if y is None or n is None:
            y = self.adjoint.operator(w)
            n = self.adjoint.hvp(y)
        return w * self.unit, y * self.unit, n * self.unit
