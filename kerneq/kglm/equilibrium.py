"""The equilibrium model that is a kernel GLM: its equation, its layer with readout and skip connection, its weights.

With W₁ = W₃ = −K/λ and W₂ = K/λ, z = σ(W₁z + W₂T + W₃ρ(z) + m) is the kernel GLM's optimality condition (Theorem 3).
It is solved for η = (A′)⁻¹(z), η = W₁σ(η) + W₂T + W₃Q′(η) + m: no inverse link is needed, and relaxed iteration
with a small enough step converges for every kernel (`Guarantee.relaxation`).
"""

import dataclasses
import functools
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
from .families import AbstractFamily
from .guarantee import Guarantee, certify, certify_convolution, spectral_norm
from .kernels import Truncated, pixels
from .problem import FLAT, Prior, Problem


@final
@dataclasses.dataclass(frozen=True)
class GLMMap(AbstractMap):
    """η ↦ W₁σ(η) + W₃Q′(η) + constant, at one batch of targets; η is (batch, n) or (batch, c, h, w)."""

    W1: BoundOperator
    W3: BoundOperator | None
    constant: Tensor  # W₂T + m
    family: AbstractFamily
    prior: Prior
    compiled: bool = False

    def __call__(self, z: Tensor) -> Tensor:
        image: Tensor = _compiled()(self, z) if self.compiled else self.image(z)
        return image

    def image(self, eta: Tensor) -> Tensor:
        """The map itself, as torch.compile sees it."""
        drive = self.W1(self.family.mean(eta)) + self.constant
        return drive if self.W3 is None else drive + self.W3(self.prior.slope(eta))

    def rows(self, index: Tensor) -> Self:
        return dataclasses.replace(self, constant=self.constant.index_select(0, index))


@functools.cache
def _compiled() -> Any:
    return torch.compile(GLMMap.image, dynamic=False)


@final
class GLMCell(AbstractCell):
    """The trainable equation; its input is T(Y), its state η. With the closed-form weights it is the kernel GLM's."""

    def __init__(
        self,
        W1: Tensor,
        W2: Tensor,
        W3: Tensor | None,
        bias: Tensor,
        family: AbstractFamily,
        prior: Prior = FLAT,
    ) -> None:
        super().__init__()
        if (W3 is None) != prior.flat:
            raise ValueError("`W3` goes with a prior that is not flat, and only with one.")
        self.W1, self.W2 = nn.Parameter(W1.clone()), nn.Parameter(W2.clone())
        self.W3 = None if W3 is None else nn.Parameter(W3.clone())
        self.bias = nn.Parameter(bias.clone())  # m; (n,), or (channels, height, width) for a convolution
        self.family, self.prior = family, prior
        self.compiled = False

    def bind(self, x: Tensor) -> GLMMap:
        W3 = None if self.W3 is None else bound(self.W3)
        constant = bound(self.W2)(x) + self.bias
        return GLMMap(bound(self.W1), W3, constant, self.family, self.prior, self.compiled)

    def initial(self, f: AbstractMap) -> Tensor:
        """η = m + W₂T, the first step from z = 0."""
        assert isinstance(f, GLMMap)
        return f.constant.detach()

    def compile_map(self) -> None:
        self.compiled = True

    def diagnostics(self) -> dict[str, float]:
        """The spectral norm of W₁; of a convolution, on a torus of 32 × 32."""
        return {"hidden norm": spectral_norm(self.W1.detach(), (32, 32)).item()}


@final
class KernelEquilibrium(nn.Module):
    """Y ↦ f* = V₁(z* + ρ(z*)) + V₂T(Y) + c, z* the equilibrium of `cell`; all weights can be trained further.

    Y is (batch, n) or (batch, c, h, w). `forward` gives f* (canonical), `mean` the response A′(f*), `embed` z*. A
    solve that does not converge warns. `guarantee` says what is known of the closed-form weights and chooses solver
    and step limit; they are those of `layer`, the `Equilibrium` inside, and can be set there.
    """

    def __init__(self, cell: GLMCell, V1: Tensor, V2: Tensor, bias: Tensor, guarantee: Guarantee) -> None:
        super().__init__()
        wide = V1.dtype == torch.float64
        tol = 1e-13 if wide else 1e-6
        self.layer = Equilibrium(
            cell,
            solver=_default_solver(guarantee),
            gradient=Implicit(tol=1e-10 if wide else 1e-6),
            tol=tol,
            max_steps=_enough_steps(guarantee, tol),
        )
        self.V1, self.V2 = nn.Parameter(V1.clone()), nn.Parameter(V2.clone())
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


def _default_solver(guarantee: Guarantee) -> AbstractSolver[Any]:
    """Plain iteration where it contracts, the relaxed one that always does where it does not, else Anderson."""
    if guarantee.assumption2:
        return Picard()
    if guarantee.semidefinite and math.isfinite(guarantee.lipschitz):
        return Picard(relaxation=guarantee.relaxation)
    return Anderson()


def _enough_steps(guarantee: Guarantee, tol: float) -> int:
    """What the certified rate needs to get from 1 to tol, twice over; 1000 at least, as weights may change."""
    rate = guarantee.contraction if guarantee.assumption2 else guarantee.lipschitz / (2 + guarantee.lipschitz)
    if not 0 < rate < 1:
        return 1000
    return min(100_000, max(1000, math.ceil(2 * math.log(tol) / math.log(rate))))


def dense_form(problem: Problem, cross: Tensor, bias: Tensor) -> KernelEquilibrium:
    """W₁ = W₃ = −K/λ, W₂ = K/λ, V₁ = −k(X2, X)/λ, V₂ = k(X2, X)/λ (Corollary 6).

    `cross` is k(X2, X), (m, n); `bias` the offset at X2, (m,).
    """
    guarantee = certify(problem.K, problem.lam, problem.family, problem.prior, t=problem.t, offset=problem.offset)
    offset = torch.zeros_like(problem.K[0]) if problem.offset is None else problem.offset
    V = cross / problem.lam
    return KernelEquilibrium(_closed_form(problem, problem.K / problem.lam, offset), -V, V, bias, guarantee)


def convolutional_form(problem: Problem, kernel: Truncated, X: Tensor) -> KernelEquilibrium:
    """The same with filters in place of matrices (Corollary 11), on images (batch, c, h, w) at their own pixels.

    X must be all pixels of an image, in order.
    """
    filters = kernel.filters().to(problem.K)
    channels = len(filters)
    height, width = (int(X[:, axis].max().item()) + 1 for axis in (0, 1))
    grid = pixels(height, width, channels, X.dtype).to(X.device) if height > 0 and width > 0 else X[:0]
    if not torch.equal(X, grid):
        raise ValueError(
            "The convolutional form needs every pixel of an image as coordinates, in the order of "
            "`kerneq.kglm.pixels(height, width, channels)`."
        )
    C = filters / problem.lam
    offset = C.new_zeros(len(X)) if problem.offset is None else problem.offset
    bias = offset.view(channels, height, width)
    guarantee = certify_convolution(filters, (height, width), problem)
    return KernelEquilibrium(_closed_form(problem, C, bias), -C, C, bias, guarantee)


def _closed_form(problem: Problem, W: Tensor, bias: Tensor) -> GLMCell:
    """The cell with W₁ = W₃ = −W, W₂ = W and the offset as its bias."""
    return GLMCell(-W, W, None if problem.prior.flat else -W, bias, problem.family, problem.prior)
