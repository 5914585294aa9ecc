"""The equilibrium model that is a kernel GLM: equilibrium layer, readout and skip connection."""

import math
import warnings
from typing import Any, final

import torch
from torch import Tensor, nn

from kerneq.equilibrium import Equilibrium
from kerneq.gradients import AbstractGradient, Implicit
from kerneq.kglm.cell import GLMCell, GLMMap, bound
from kerneq.kglm.family import AbstractFamily
from kerneq.kglm.guarantee import Guarantee
from kerneq.solution import EquilibriumError, Solution, Status
from kerneq.solvers import AbstractSolver, Anderson, Picard


@final
class KernelEquilibrium(nn.Module):
    """Y ↦ f* = V₁(z* + ρ(z*)) + V₂T(Y) + c, z* the equilibrium of `cell`; all weights can be trained further.

    `forward` gives f* (canonical), `mean` the response A′(f*), `embed` the `Solution` whose value is z*.
    """

    def __init__(
        self,
        cell: GLMCell,
        V1: Tensor,
        V2: Tensor,
        bias: Tensor,
        guarantee: Guarantee,
        *,
        solver: AbstractSolver[Any] | None = None,
        gradient: AbstractGradient | None = None,
        tol: float | None = None,
        max_steps: int | None = None,
    ) -> None:
        super().__init__()
        wide = V1.dtype == torch.float64
        tol = (1e-13 if wide else 1e-6) if tol is None else tol
        max_steps = enough_steps(guarantee, tol) if max_steps is None else max_steps
        gradient = Implicit(tol=1e-10 if wide else 1e-6) if gradient is None else gradient
        solver = default_solver(guarantee) if solver is None else solver
        self.layer = Equilibrium(cell, solver=solver, gradient=gradient, tol=tol, max_steps=max_steps)
        self.V1, self.V2 = nn.Parameter(V1.clone()), nn.Parameter(V2.clone())
        self.bias = nn.Parameter(bias.clone())
        self.guarantee = guarantee

    @property
    def cell(self) -> GLMCell:
        cell = self.layer.cell
        assert isinstance(cell, GLMCell)
        return cell

    @property
    def family(self) -> AbstractFamily:
        return self.cell.family

    def state(self, Y: Tensor) -> tuple[Solution, GLMMap, Tensor]:
        """The solution in the cell's coordinates, the map it belongs to, and T(Y)."""
        t = self.family.statistic(Y)
        solution: Solution = self.layer(t)
        if solution.status not in (Status.CONVERGED, Status.PRECISION):
            warnings.warn(str(EquilibriumError(solution)), RuntimeWarning, stacklevel=3)
        return solution, self.cell.bind(t), t

    def embed(self, Y: Tensor) -> Tensor:
        """z*."""
        solution, f, _ = self.state(Y)
        return f.activations(solution.value)[0]

    def forward(self, Y: Tensor) -> Tensor:
        """f*(Y), the canonical prediction at the outer coordinates."""
        solution, f, t = self.state(Y)
        return self.readout(f, solution.value, t)

    def mean(self, Y: Tensor) -> Tensor:
        """A′(f*(Y)), the predicted response."""
        return self.family.mean(self(Y))

    def readout(self, f: GLMMap, state: Tensor, t: Tensor) -> Tensor:
        z, rho = f.activations(state)
        z = z if rho is None else z + rho
        return bound(self.V1)(z) + bound(self.V2)(t) + self.bias


def default_solver(guarantee: Guarantee) -> AbstractSolver[Any]:
    """Plain iteration where it contracts, the relaxed one that always does where it does not, else
    Anderson.
    """
    if guarantee.assumption2:
        return Picard()
    if guarantee.semidefinite and math.isfinite(guarantee.canonical):
        return Picard(relaxation=guarantee.relaxation)
    return Anderson()


def enough_steps(guarantee: Guarantee, tol: float) -> int:
    """What the certified rate needs to get from 1 to tol, twice over; 1000 at least, as weights may change."""
    rate = guarantee.contraction if guarantee.assumption2 else guarantee.canonical / (2 + guarantee.canonical)
    if not 0 < rate < 1:
        return 1000
    return min(100_000, max(1000, math.ceil(2 * math.log(tol) / math.log(rate))))
