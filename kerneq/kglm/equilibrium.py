"""The equilibrium model that is a kernel GLM: its equation, and its layer with readout and skip connection.

With W₁ = W₃ = −K/λ and W₂ = K/λ, z = σ(W₁z + W₂T + W₃ρ(z) + m) is the kernel GLM's optimality condition (Theorem 3).
It is solved for η = (A′)⁻¹(z), η = W₁σ(η) + W₂T + W₃Q′(η) + m: no inverse link is needed, and relaxed iteration
with a small enough step converges for every kernel (`Guarantee.relaxation`).
"""

import dataclasses
import math
import warnings
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from ..cells import AbstractCell
from ..equation import AbstractMap
from ..equilibrium import Equilibrium
from ..gradients import Implicit
from ..operators import BoundOperator, bound
from ..solution import EquilibriumError, Solution, Status
from ..solvers import AbstractSolver, Anderson, Picard
from .families import FLAT, AbstractFamily, Prior
from .guarantee import Guarantee


@final
@dataclasses.dataclass(frozen=True)
class GLMMap(AbstractMap):
    """η ↦ W₁σ(η) + W₃Q′(η) + constant, at one batch of targets; η is (batch, n) or (batch, c, h, w)."""

    W1: BoundOperator
    W3: BoundOperator | None
    constant: Tensor  # W₂T + m
    family: AbstractFamily
    prior: Prior

    def __call__(self, z: Tensor) -> Tensor:
        image = self.W1(self.family.mean(z)) + self.constant
        return image if self.W3 is None else image + self.W3(self.prior.slope(z))

    def rows(self, index: Tensor) -> Self:
        return dataclasses.replace(self, constant=self.constant.index_select(0, index))


@final
class GLMCell(AbstractCell):
    """The trainable equation; its input is T(Y), its state η.

    It starts with the closed-form weights W₁ = W₃ = −W and W₂ = W: for W = K/λ, (n, n) or filters (c, c, k, k), it is
    the kernel GLM's. The bias is the offset m, (n,) or (c, h, w). W₃ goes with a prior that is not flat.
    """

    def __init__(self, W: Tensor, bias: Tensor, family: AbstractFamily, prior: Prior = FLAT) -> None:
        super().__init__()
        self.W1, self.W2 = nn.Parameter(-W), nn.Parameter(W.clone())
        self.W3 = None if prior.flat else nn.Parameter(-W)
        self.bias = nn.Parameter(bias.clone())
        self.family, self.prior = family, prior

    def bind(self, x: Tensor) -> GLMMap:
        W3 = None if self.W3 is None else bound(self.W3)
        constant = bound(self.W2)(x) + self.bias
        return GLMMap(bound(self.W1), W3, constant, self.family, self.prior)

    def initial(self, f: AbstractMap) -> Tensor:
        """η = m + W₂T, the first step from z = 0."""
        assert isinstance(f, GLMMap)
        return f.constant.detach()


@final
class KernelEquilibrium(nn.Module):
    """Y ↦ f* = V₁(z* + ρ(z*)) + V₂T(Y) + c, z* the equilibrium of `cell`; all weights can be trained further.

    Y is (batch, n) or (batch, c, h, w). `forward` gives f* (canonical), `mean` the response A′(f*), `embed` z*. A
    solve that does not converge warns. `guarantee` says what is known of the closed-form weights and chooses solver
    and step limit; they are those of `layer`, the `Equilibrium` inside, and can be set there.
    """

    def __init__(self, cell: GLMCell, V: Tensor, bias: Tensor, guarantee: Guarantee) -> None:
        """The closed-form readout is V₁ = −V, V₂ = V for V = k(X2, X)/λ, (m, n) or filters; the bias c the offset."""
        super().__init__()
        wide = V.dtype == torch.float64
        tol = 1e-13 if wide else 1e-6
        solver, max_steps = _choose_solver(guarantee, tol)
        gradient = Implicit(tol=1e-10 if wide else 1e-6)
        self.layer = Equilibrium(cell, solver=solver, gradient=gradient, tol=tol, max_steps=max_steps)
        self.V1, self.V2 = nn.Parameter(-V), nn.Parameter(V.clone())
        self.bias = nn.Parameter(bias.clone())
        self.guarantee = guarantee

    @property
    def cell(self) -> GLMCell:
        """The equation inside the layer."""
        cell = self.layer.cell
        assert isinstance(cell, GLMCell)
        return cell

    def forward(self, Y: Tensor) -> Tensor:
        """f*(Y), the canonical prediction at the outer coordinates."""
        t = self.cell.family.statistic(Y)
        eta = self._solve(t)
        z = self.cell.family.mean(eta)
        if self.cell.W3 is not None:
            z = z + self.cell.prior.slope(eta)
        return bound(self.V1)(z) + bound(self.V2)(t) + self.bias

    def mean(self, Y: Tensor) -> Tensor:
        """A′(f*(Y)), the predicted response."""
        return self.cell.family.mean(self(Y))

    def embed(self, Y: Tensor) -> Tensor:
        """z*(Y), the mean response at the inner coordinates."""
        return self.cell.family.mean(self._solve(self.cell.family.statistic(Y)))

    def _solve(self, t: Tensor) -> Tensor:
        """η*, the equilibrium in canonical coordinates."""
        solution: Solution = self.layer(t)
        if solution.status not in (Status.CONVERGED, Status.PRECISION):
            warnings.warn(str(EquilibriumError(solution)), RuntimeWarning, stacklevel=3)
        return solution.value


def _choose_solver(guarantee: Guarantee, tol: float) -> tuple[AbstractSolver[Any], int]:
    """Plain iteration where it contracts, the relaxed one that always does where it does not, else Anderson.

    With as many steps as the certified rate needs to get from 1 to tol, twice over; 1000 at least, as weights may
    change.
    """
    solver: AbstractSolver[Any] = Anderson()
    rate = guarantee.lipschitz / (2 + guarantee.lipschitz)
    if guarantee.assumption2:
        solver, rate = Picard(), guarantee.contraction
    elif guarantee.semidefinite and math.isfinite(guarantee.lipschitz):
        solver = Picard(relaxation=guarantee.relaxation)
    if not 0 < rate < 1:
        return solver, 1000
    return solver, min(100_000, max(1000, math.ceil(2 * math.log(tol) / math.log(rate))))
