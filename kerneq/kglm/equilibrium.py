"""The equilibrium layer that is a kernel GLM (kGLM Theorem 3): its equation (7), and its readout (8).

(7)  z = σ(W₁z + W₂T + W₃ρ(z) + m)          with W₁ = W₃ = −W₂ = −k(X, X)/λ
(8)  f* = V₁(z + ρ(z)) + V₂T + c            with V₂ = −V₁ = k(X2, X)/λ

(7) is solved for η = (A′)⁻¹(z), η = W₁σ(η) + W₂T + W₃Q′(η) + m: no inverse link is needed, and relaxed iteration with
a small enough step converges for every kernel (`Guarantee.relaxation`). Where no step is small enough for all targets
(Poisson), damped Newton does. For vectors (`Categorical`) σ = ∇A acts on the last dimension of (batch, n, classes) and
the weights on the one before.
"""

import dataclasses
import math
import warnings
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from ..cells import AbstractCell
from ..equilibrium import Equilibrium
from ..gradients import Implicit
from ..linear_maps import LinearMap
from ..maps import AbstractMap
from ..solution import EquilibriumError, Status
from ..solvers import AbstractSolver, Anderson, Newton, Picard
from ..tensors import is_transformed, per_sample_norm
from .families import FLAT, AbstractFamily, Prior
from .guarantee import Guarantee

MANY_STEPS = 10_000  # of relaxed iteration, beyond which a few of Newton's, n³ operations each, are less


def _multiply(family: AbstractFamily, weight: Tensor, v: Tensor) -> Tensor:
    """Return Wv, of each class where v is a vector per sample, (batch, n, classes)."""
    return weight @ v if family.vector else LinearMap(weight)(v)


@final
@dataclasses.dataclass(frozen=True)
class GLMMap(AbstractMap):
    """kGLM Theorem 3, (7), in η: η ↦ W₁σ(η) + W₂T + W₃Q′(η) + m, at one batch of targets.

    η is (batch, n), (batch, c, h, w) or (batch, n, classes).

    It is computed as W₁(σ(η) − T) + (W₁ + W₂)T + …: with the closed-form weights, W₁ + W₂ = 0, what cancels for a
    small λ then cancels before it is multiplied by K/λ.
    """

    t: Tensor  # T
    constant: Tensor  # (W₁ + W₂)T + m
    W1: Tensor
    W3: Tensor | None
    family: AbstractFamily
    prior: Prior

    def __call__(self, z: Tensor) -> Tensor:
        image = _multiply(self.family, self.W1, self.family.mean(z) - self.t) + self.constant
        return image if self.W3 is None else image + _multiply(self.family, self.W3, self.prior.slope(z))

    def rows(self, index: Tensor) -> Self:
        t, constant = self.t.index_select(0, index), self.constant.index_select(0, index)
        return dataclasses.replace(self, t=t, constant=constant)

    def tensors(self) -> tuple[Tensor, ...]:
        every = self.t, self.constant, self.W1, self.W3
        return tuple(tensor for tensor in every if tensor is not None)

    def on(self, *tensors: Tensor) -> Self:
        t, constant, W1, *W3 = tensors
        return dataclasses.replace(self, t=t, constant=constant, W1=W1, W3=W3[0] if W3 else None)


@final
class GLMCell(AbstractCell):
    """Equation (7) with trainable weights; its input is T(Y), its state η.

    It starts with the closed-form weights W₁ = W₃ = −W and W₂ = W: for W = K/λ, (n, n) or filters (c, c, k, k), it is
    the kernel GLM's. The bias is the offset m, (n,) or (c, h, w). A flat prior has no W₃.
    """

    def __init__(self, W: Tensor, bias: Tensor, family: AbstractFamily, prior: Prior = FLAT) -> None:
        super().__init__()
        self.W1, self.W2 = nn.Parameter(-W), nn.Parameter(W.clone())
        self.W3 = None if prior.flat else nn.Parameter(-W)
        self.bias = nn.Parameter(bias.clone())
        self.family, self.prior = family, prior

    def bind(self, x: Tensor) -> GLMMap:
        W1 = self.W1.to(x)  # the targets' dtype may be wider than that of the weights
        constant = _multiply(self.family, W1 + self.W2.to(x), x) + self.bias.to(x)
        return GLMMap(x, constant, W1, None if self.W3 is None else self.W3.to(x), self.family, self.prior)

    def initial(self, f: AbstractMap) -> Tensor:
        """Return η = m, the kernel GLM's f = 0: σ may overflow at W₂T + m."""
        assert isinstance(f, GLMMap)
        return self.bias.detach().to(f.t).expand_as(f.t)


@final
class KernelEquilibrium(nn.Module):
    """Y ↦ f*, a skip connection around an equilibrium (2): z* solves (7), the `cell`, and (8) reads f* out of it.

    Y is (batch, n) or (batch, c, h, w). `forward` gives f* (canonical), `mean` the response A′(f*), `embed` z*. All
    weights can be trained further. A solve that does not converge warns. `guarantee` says what is known of the
    closed-form weights (not of those that training or `initialise` put in their place) and chooses solver and step
    limit of the `Equilibrium` inside, `layer`, where they can be set. Where plain iteration is not certified, and
    relaxed iteration or Newton's method is, the layer computes in float64: f* is a small difference of numbers that
    K/λ makes large.
    """

    def __init__(self, cell: GLMCell, V: Tensor, bias: Tensor, guarantee: Guarantee) -> None:
        """The closed-form readout is V₁ = −V, V₂ = V for V = k(X2, X)/λ, (m, n) or filters; the bias c the offset."""
        super().__init__()
        self.layer = _make_layer(cell, guarantee, V.dtype)
        self.V1, self.V2, self.bias = nn.Parameter(-V), nn.Parameter(V.clone()), nn.Parameter(bias.clone())
        self.guarantee = guarantee
        self.in_double = _wants_double(self.layer)

    @property
    def cell(self) -> GLMCell:
        """The equation inside the layer."""
        cell = self.layer.cell
        assert isinstance(cell, GLMCell)
        return cell

    def forward(self, Y: Tensor) -> Tensor:
        """Return f*(Y), the canonical prediction at the outer coordinates."""
        t, eta = self._solve(Y)
        family = self.cell.family
        z = family.mean(eta)
        if self.cell.W3 is not None:
            z = z + self.cell.prior.slope(eta)
        V1, V2 = self.V1.to(t), self.V2.to(t)
        canonical = _multiply(family, V1, z - t) + _multiply(family, V1 + V2, t) + self.bias.to(t)  # as in `GLMMap`
        return canonical.to(self.V1.dtype)

    def mean(self, Y: Tensor) -> Tensor:
        """Return the mean response at the outer coordinates, in the units of Y."""
        return self.cell.family.response(self(Y))

    def embed(self, Y: Tensor) -> Tensor:
        """Return z*(Y), the mean of T at the inner coordinates."""
        return self.cell.family.mean(self._solve(Y)[1]).to(self.V1.dtype)

    def _solve(self, Y: Tensor) -> tuple[Tensor, Tensor]:
        """Return T(Y) and η*, in the wider dtype of weights and targets, or in float64 where the layer asks for it."""
        dtype = torch.float64 if self.in_double else torch.result_type(Y, self.V1)
        t = self.cell.family.statistic(Y.to(dtype))
        return t, _solve_loudly(self.layer, t)


@final
@dataclasses.dataclass(frozen=True)
class FeatureGLMMap(AbstractMap):
    """w ↦ Φᵀ(T − σ(η) − Q′(η))/λ, η = Φw + m: (7) for K = ΦΦᵀ in the r numbers w = Φᵀ(T − z − ρ(z))/λ."""

    t: Tensor  # T, (batch, n) or (batch, n, classes)
    Phi: Tensor  # (n, r)
    bias: Tensor  # m
    family: AbstractFamily
    lam: float
    prior: Prior

    def __call__(self, z: Tensor) -> Tensor:
        eta = _multiply(self.family, self.Phi, z) + self.bias
        gap = self.t - self.family.mean(eta)
        if not self.prior.flat:
            gap = gap - self.prior.slope(eta)
        return _multiply(self.family, self.Phi.mT, gap) / self.lam

    def rows(self, index: Tensor) -> Self:
        return dataclasses.replace(self, t=self.t.index_select(0, index))

    def tensors(self) -> tuple[Tensor, ...]:
        return self.t, self.Phi, self.bias

    def on(self, *tensors: Tensor) -> Self:
        return dataclasses.replace(self, t=tensors[0], Phi=tensors[1], bias=tensors[2])


@final
class FeatureCell(AbstractCell):
    """The equation of `FeatureGLMMap` with trainable Φ and m; its input is T(Y), its state w.

    One Φ serves both ways, so trained weights are a kernel GLM too, of a kernel that was learnt.
    """

    def __init__(self, Phi: Tensor, bias: Tensor, family: AbstractFamily, lam: float, prior: Prior = FLAT) -> None:
        super().__init__()
        self.Phi, self.bias = nn.Parameter(Phi), nn.Parameter(bias.clone())
        self.family, self.lam, self.prior = family, lam, prior

    def bind(self, x: Tensor) -> FeatureGLMMap:
        return FeatureGLMMap(x, self.Phi.to(x), self.bias.to(x), self.family, self.lam, self.prior)

    def initial(self, f: AbstractMap) -> Tensor:
        """Return w = 0."""
        assert isinstance(f, FeatureGLMMap)
        return f.t.new_zeros(len(f.t), f.Phi.shape[1], *f.t.shape[2:])


@final
class FeatureEquilibrium(nn.Module):
    """Y ↦ f* = Φ₂w* + c, the equilibrium model of a kernel of low rank (Corollary 6): w* solves r equations, not n.

    J is λ-strongly convex in w, and its gradient is λ(w − F(w)): so ‖w − w*‖ ≤ ‖w − F(w)‖ for all w and all weights.
    """

    def __init__(self, cell: FeatureCell, Phi2: Tensor, bias: Tensor, guarantee: Guarantee) -> None:
        super().__init__()
        self.layer = _make_layer(cell, guarantee, Phi2.dtype)
        self.Phi2, self.bias = nn.Parameter(Phi2), nn.Parameter(bias.clone())
        self.guarantee, self.in_double = guarantee, _wants_double(self.layer)

    @property
    def cell(self) -> FeatureCell:
        """The equation inside the layer."""
        cell = self.layer.cell
        assert isinstance(cell, FeatureCell)
        return cell

    def forward(self, Y: Tensor) -> Tensor:
        """Return f*(Y), (batch, m) or (batch, m, classes), the canonical prediction at the outer coordinates."""
        w = self.embed(Y)
        canonical = _multiply(self.cell.family, self.Phi2.to(w), w) + self.bias.to(w)
        return canonical.to(self.Phi2.dtype)

    def mean(self, Y: Tensor) -> Tensor:
        """Return the mean response at the outer coordinates, in the units of Y."""
        return self.cell.family.response(self(Y))

    def embed(self, Y: Tensor) -> Tensor:
        """Return w*(Y), (batch, r) or (batch, r, classes)."""
        dtype = torch.float64 if self.in_double else torch.result_type(Y, self.Phi2)
        return _solve_loudly(self.layer, self.cell.family.statistic(Y.to(dtype)))

    def error_bound(self, Y: Tensor, w: Tensor) -> Tensor:
        """Return ‖w − F(w)‖ ≥ ‖w − w*‖ per sample, (batch,), in exact arithmetic."""
        f = self.cell.bind(self.cell.family.statistic(Y.to(w)))
        return per_sample_norm(f(w) - w)


def _solve_loudly(layer: Equilibrium, t: Tensor) -> Tensor:
    """Return the equilibrium for the statistics T; warn the caller of the model where it was not found."""
    solution = layer(t)
    # the status of a solve inside a transform of `torch.func` cannot be read
    if not is_transformed() and solution.status not in (Status.CONVERGED, Status.PRECISION):
        warnings.warn(str(EquilibriumError(solution)), RuntimeWarning, stacklevel=4)
    return solution.value


def _wants_double(layer: Equilibrium) -> bool:
    """Whether the solver is one of those that f* needs float64 for."""
    solver = layer.solver
    return isinstance(solver, Newton) or (isinstance(solver, Picard) and solver.relaxation < 1)


def _make_layer(cell: AbstractCell, guarantee: Guarantee, dtype: torch.dtype) -> Equilibrium:
    """Choose plain iteration where it contracts, else relaxed iteration, which always does, else Anderson.

    It gets as many steps as the certified rate needs to get from 1 to tol, twice over; 1000 at least, as weights may
    change. Damped Newton takes their place where those are too many (a small λ), or where A″ has no bound: the
    guarantee then holds for the targets it was made for alone.
    """
    L, wide = guarantee.lipschitz, dtype == torch.float64
    # K/λ stretches the rounding of T − σ(η): residuals were seen to end at up to 60εL.
    tol = min(max(1e-13, 100 * torch.finfo(dtype).eps * L), 1e-6) if wide else 1e-6
    plain = guarantee.assumption2 and not (guarantee.semidefinite and guarantee.contraction > 0.9)
    rate = guarantee.contraction if plain else L / (2 + L)
    steps = math.ceil(2 * math.log(tol) / math.log(rate)) if 0 < rate < 1 else 1000
    slow = guarantee.semidefinite and not guarantee.assumption2 and steps > MANY_STEPS
    if slow or not guarantee.bounded:  # Newton's error is about the square of its residual
        return Equilibrium(cell, solver=Newton(), gradient=Implicit(Newton()), tol=1e-8, max_steps=200)
    max_steps = max(1000, min(100_000, steps))
    solver: AbstractSolver[Any] = Picard() if plain else Anderson()
    gradient = Implicit(tol=1e-10 if wide else 1e-6)
    if guarantee.semidefinite and not plain:
        # the adjoint map has the spectrum of the forward one: the step that is certain there is certain here
        solver = Picard(relaxation=guarantee.relaxation)
        gradient = dataclasses.replace(gradient, solver=solver, max_steps=max_steps)
    return Equilibrium(cell, solver=solver, gradient=gradient, tol=tol, max_steps=max_steps)
