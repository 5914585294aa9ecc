"""Reflected resolvents: layers that lengthen no difference, whatever their weights, because they are equilibria."""

from typing import Any, Literal, final, overload

import torch
from torch import Tensor, nn

from .cells import AbstractCell, AbstractKernelCell
from .equation import Equation
from .equilibrium import Equilibrium, Steps
from .gradients import AbstractGradient, Implicit
from .linear_maps import bound_top_eigenvalue
from .maps import AbstractMap, Point
from .solution import OnFailure, Solution
from .solvers import AbstractSolver, Proximal
from .tensors import check_kind


@final
class Reflection(AbstractCell):
    """The equation of a cell whose layer gives R(a) = 2p(a) − a, p(a) = m(a − Wz*(a)) / max(1, ‖W_h‖²)."""

    def __init__(self, cell: AbstractKernelCell):
        super().__init__()
        check_kind("cell", cell, AbstractKernelCell)
        if not cell.kernel.convex_loss:
            raise ValueError(
                f"`Resolvent` needs a kernel with a convex loss, `Squared` or `Multiquadric`: {cell.kernel!r} has "
                "none, and its reflection may lengthen differences."
            )
        self.cell = cell

    def bind(self, x: Tensor) -> Equation:
        return self.cell.bind(x)

    def initial(self, f: AbstractMap) -> None:
        return None

    def output(self, f: AbstractMap, at: Point) -> Tensor:
        """Return R(a), with a graph."""
        assert isinstance(f, Equation)
        m = f.kernel.differentiate(f.binding, at.z, f.features(at), value=False).dv
        assert m is not None
        return m * (2 * self.shrink(f)) - f.binding.a

    def shrink(self, f: Equation) -> Tensor | float:
        """Return 1 / max(1, ‖W_h‖²), with the norm from above: m is as steep as ‖W_h‖²."""
        Q = f.binding.Q
        return 1.0 if Q is None else 1 / bound_top_eigenvalue(Q, squarings=16).clamp_min(1).to(f.binding.a.dtype)

    def output_error(self, f: AbstractMap, error: Tensor) -> Tensor:
        """Return 2‖W‖‖f(z) − z‖, of which the error is a multiple (docs/theory.md, fact 13)."""
        assert isinstance(f, Equation)
        known = f.amplification < torch.inf
        return torch.where(known, 2 * f.scaling.norm_bound * error / f.amplification, torch.inf)

    def observe(self, f: AbstractMap, z: Tensor) -> None:
        self.cell.observe(f, z)

    def compile_map(self) -> None:
        self.cell.compile_map()

    def diagnostics(self) -> dict[str, float]:
        return self.cell.diagnostics()

    def describe(self) -> dict[str, str]:
        return self.cell.describe() | {"value": "R(a) = 2p(a) − a: no difference of inputs is lengthened"}


@final
class Resolvent(nn.Module):
    """R(a) = 2p(a) − a, p(a) = m(a − Wz*(a)): ‖R(a) − R(a′)‖ ≤ ‖a − a′‖ for any weights W, W_h and b.

    z* is the equilibrium of the cell, min ½‖z‖² − ⟨b, z⟩ + φ(z) + ρ(a − Wz), m = ∇ρ and a what the cell's `inject`
    makes of x. Where ρ is convex p is the gradient of a convex function, so R is the reflected resolvent of a monotone
    operator (docs/theory.md, fact 13): no norm has to be bounded, and nothing is lost to a bound on it. That is so for
    kernels with a convex ρ, `Squared` and `Multiquadric`; the norm of W_h is held under 1.

        cell = kq.cells.ConvCell(kq.kernels.Squared(), inputs=8, state=8, features=8, norm=3.0, bias=True,
                                 inject=nn.Identity())
        layers = nn.Sequential(kq.Resolvent(cell), nn.PixelUnshuffle(2))  # 1-Lipschitz
        layers[0](x, solution=True)  # the `Solution` whose value this is

    The value is a tensor like a; with `solution` it comes in a `Solution`, whose `error_bound` is one on ‖R − R*‖: what
    an unfinished solve is off. With `Unrolled` the value is that of its steps, for which nothing is proved; but one
    step at norm √2 is the convex potential layer x − Wσ(Wᵀx + b) (Meunier et al., 2022).
    """

    def __init__(
        self,
        cell: AbstractKernelCell,
        *,
        solver: AbstractSolver[Any] = Proximal(),  # noqa: B008  (a frozen value)
        gradient: AbstractGradient = Implicit(),  # noqa: B008
        tol: float | tuple[float | None, float | None] | None = None,
        max_steps: Steps | tuple[Steps, Steps] = 50,
        check_every: int | None = None,
        on_failure: OnFailure | None = None,
    ):
        super().__init__()
        self.equilibrium = Equilibrium(
            Reflection(cell),
            solver=solver,
            gradient=gradient,
            tol=tol,
            max_steps=max_steps,
            check_every=check_every,
            on_failure=on_failure,
        )

    def _repr_html_(self) -> str:
        return self.equilibrium._repr_html_()

    @overload
    def forward(self, x: Tensor, solution: Literal[False] = False) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, solution: Literal[True]) -> Solution: ...

    def forward(self, x: Tensor, solution: bool = False) -> Tensor | Solution:
        found: Solution = self.equilibrium(x)
        return found if solution else found.value
