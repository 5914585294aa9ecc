"""Equilibrium layers that are kernel GLMs: the equation, the layer with its readout, and any layer's start as one.

With W₁ = W₃ = −K/λ and W₂ = K/λ, z = σ(W₁z + W₂T + W₃ρ(z) + m) is the kernel GLM's optimality condition (Theorem 3).
It is solved for η = (A′)⁻¹(z), η = W₁σ(η) + W₂T + W₃Q′(η) + m: no inverse link is needed, and relaxed iteration
with a small enough step converges for every kernel (`Guarantee.relaxation`); where no step is small enough for all
targets (Poisson), damped Newton does.
"""

import dataclasses
import math
import warnings
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from ..cells import AbstractCell, ConvCell, DenseCell
from ..equilibrium import Equilibrium
from ..gradients import Implicit
from ..linear_maps import AbstractLinearMap, as_linear_map
from ..maps import AbstractMap
from ..solution import EquilibriumError, Solution, Status
from ..solvers import AbstractSolver, Anderson, Newton, Picard
from ..tensors import check_positive, is_transformed
from .families import FLAT, AbstractFamily, Prior
from .guarantee import Guarantee, spectral_norm
from .kernels import SquaredExponential, Truncated, as_kernel, coordinates, random_lengthscales

MANY_STEPS = 10_000  # of relaxed iteration; beyond them n³ operations, a few times, are less
Signed = list[tuple[Tensor, int]]  # weights that are ±K/λ, each with its sign


@final
@dataclasses.dataclass(frozen=True)
class GLMMap(AbstractMap):
    """η ↦ W₁σ(η) + W₂T + W₃Q′(η) + m, at one batch of targets; η is (batch, n) or (batch, c, h, w).

    It is computed as W₁(σ(η) − T) + (W₁ + W₂)T + …: with the closed-form weights, W₁ + W₂ = 0, what cancels for a
    small λ then cancels before it is multiplied by K/λ.
    """

    W1: AbstractLinearMap
    W3: AbstractLinearMap | None
    t: Tensor  # T
    constant: Tensor  # (W₁ + W₂)T + m
    family: AbstractFamily
    prior: Prior

    def __call__(self, z: Tensor) -> Tensor:
        image = self.W1(self.family.mean(z) - self.t) + self.constant
        return image if self.W3 is None else image + self.W3(self.prior.slope(z))

    def rows(self, index: Tensor) -> Self:
        t, constant = self.t.index_select(0, index), self.constant.index_select(0, index)
        return dataclasses.replace(self, t=t, constant=constant)

    def tensors(self) -> tuple[Tensor, ...]:
        operators = (self.W1,) if self.W3 is None else (self.W1, self.W3)
        return self.t, self.constant, *(operator.weight for operator in operators)

    def on(self, *tensors: Tensor) -> Self:
        t, constant, W1, *W3 = tensors
        return dataclasses.replace(
            self, t=t, constant=constant, W1=as_linear_map(W1), W3=as_linear_map(W3[0]) if W3 else None
        )


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
        W1 = self.W1.to(x)  # the targets' dtype may be wider than that of the weights
        W3 = None if self.W3 is None else as_linear_map(self.W3.to(x))
        constant = as_linear_map(W1 + self.W2.to(x))(x) + self.bias.to(x)
        return GLMMap(as_linear_map(W1), W3, x, constant, self.family, self.prior)

    def initial(self, f: AbstractMap) -> Tensor:
        """η = m, the kernel GLM's f = 0: σ may overflow at W₂T + m."""
        assert isinstance(f, GLMMap)
        return self.bias.detach().to(f.t).expand_as(f.t)


@final
class KernelEquilibrium(nn.Module):
    """Y ↦ f* = V₁(z* + ρ(z*)) + V₂T(Y) + c, z* the equilibrium of `cell`; all weights can be trained further.

    Y is (batch, n) or (batch, c, h, w). `forward` gives f* (canonical), `mean` the response A′(f*), `embed` z*. A
    solve that does not converge warns. `guarantee` says what is known of the closed-form weights (not of those that
    training or `initialise` put in their place) and chooses solver and step limit; they are those of `layer`, the
    `Equilibrium` inside, and can be set there. Where plain iteration is not certified, and relaxed iteration or
    Newton's method is, the layer computes in float64: f* is a small difference of numbers that K/λ makes large.
    """

    def __init__(self, cell: GLMCell, V: Tensor, bias: Tensor, guarantee: Guarantee) -> None:
        """The closed-form readout is V₁ = −V, V₂ = V for V = k(X2, X)/λ, (m, n) or filters; the bias c the offset."""
        super().__init__()
        wide = V.dtype == torch.float64
        # K/λ stretches the rounding of T − σ(η): residuals were seen to end at up to 60εL.
        tol = min(max(1e-13, 100 * torch.finfo(V.dtype).eps * guarantee.lipschitz), 1e-6) if wide else 1e-6
        solver, max_steps = _choose_solver(guarantee, tol)
        gradient = Implicit(tol=1e-10 if wide else 1e-6)
        relaxed = isinstance(solver, Picard) and solver.relaxation < 1
        if isinstance(solver, Newton):
            tol, gradient = 1e-8, Implicit(Newton())  # Newton's error is about the square of its residual
        elif relaxed:
            # the adjoint map has the spectrum of the forward one: the step that is certain there is certain here
            gradient = dataclasses.replace(gradient, solver=solver, max_steps=max_steps)
        self.layer = Equilibrium(cell, solver=solver, gradient=gradient, tol=tol, max_steps=max_steps)
        self.V1, self.V2 = nn.Parameter(-V), nn.Parameter(V.clone())
        self.bias = nn.Parameter(bias.clone())
        self.guarantee, self.in_double = guarantee, relaxed or isinstance(solver, Newton)

    @property
    def cell(self) -> GLMCell:
        """The equation inside the layer."""
        cell = self.layer.cell
        assert isinstance(cell, GLMCell)
        return cell

    def forward(self, Y: Tensor) -> Tensor:
        """f*(Y), the canonical prediction at the outer coordinates."""
        t = self._statistic(Y)
        eta = self._solve(t)
        z = self.cell.family.mean(eta)
        if self.cell.W3 is not None:
            z = z + self.cell.prior.slope(eta)
        V1, V2 = self.V1.to(t), self.V2.to(t)
        canonical = as_linear_map(V1)(z - t) + as_linear_map(V1 + V2)(t) + self.bias.to(t)  # as in `GLMMap`
        return canonical.to(self.V1.dtype)

    def mean(self, Y: Tensor) -> Tensor:
        """The mean response at the outer coordinates, in the units of Y."""
        return self.cell.family.response(self(Y))

    def embed(self, Y: Tensor) -> Tensor:
        """z*(Y), the mean of T at the inner coordinates."""
        return self.cell.family.mean(self._solve(self._statistic(Y))).to(self.V1.dtype)

    def _statistic(self, Y: Tensor) -> Tensor:
        """T(Y), in the dtype of the computation: that of the weights, or of the targets where it is wider."""
        dtype = torch.float64 if self.in_double else torch.result_type(Y, self.V1)
        return self.cell.family.statistic(Y.to(dtype))

    def _solve(self, t: Tensor) -> Tensor:
        """η*, the equilibrium in canonical coordinates."""
        solution: Solution = self.layer(t)
        # A transform of `torch.func` has no numbers to look at.
        if not is_transformed() and solution.status not in (Status.CONVERGED, Status.PRECISION):
            warnings.warn(str(EquilibriumError(solution)), RuntimeWarning, stacklevel=3)
        return solution.value


def _choose_solver(guarantee: Guarantee, tol: float) -> tuple[AbstractSolver[Any], int]:
    """Plain iteration where it contracts, the relaxed one that always does where it does not, else Anderson.

    With as many steps as the certified rate needs to get from 1 to tol, twice over; 1000 at least, as weights may
    change. Damped Newton where those are too many (a small λ), or where A″ has no bound: what the guarantee knows then
    is of the targets it was made for alone.
    """
    if not guarantee.bounded:
        return Newton(), 200
    solver: AbstractSolver[Any] = Anderson()
    rate = guarantee.lipschitz / (2 + guarantee.lipschitz)
    if guarantee.assumption2 and not (guarantee.semidefinite and guarantee.contraction > 0.9):
        solver, rate = Picard(), guarantee.contraction
    elif guarantee.semidefinite and math.isfinite(guarantee.lipschitz):
        solver = Picard(relaxation=guarantee.relaxation)
    if not 0 < rate < 1:
        return solver, 1000
    steps = math.ceil(2 * math.log(tol) / math.log(rate))
    if steps > MANY_STEPS and guarantee.semidefinite and not guarantee.assumption2:
        return Newton(), 200
    return solver, max(1000, min(100_000, steps))


@torch.no_grad()
def initialise(
    layer: nn.Module,
    kernel: Any,
    *,
    norm: float = 1.0,
    X: Tensor | None = None,
    X2: Tensor | None = None,
    size: tuple[int, int] | None = None,
    generator: torch.Generator | None = None,
) -> nn.Module:
    """Set the weights of `layer` in place, and return it.

    `kernel` is a kernel (informed), "naive" (a squared exponential on a uniform grid over [−2π, 2π]; for
    convolutions one of random lengths per pair of channels) or "random" (PyTorch's default, uniform). Kernel weights
    are scaled to spectral norm `norm` exactly, which is λ = ‖K‖/norm: below 1/sup A″ the layer contracts. X are the
    coordinates of the state, X2 of the features or outputs; `size` is the image a convolution's norm is measured on.

    Layers: `KernelEquilibrium` and `GLMCell` (Theorem 3; with "naive" the readout is random, as in the paper),
    `Equilibrium` and every kerneq cell (its operator W), `nn.Linear`, `nn.Conv2d`.
    """
    check_positive("norm", norm)
    if isinstance(kernel, str) and kernel not in ("naive", "random"):
        raise ValueError(f"A scheme is a kernel, 'naive' or 'random', got {kernel!r}.")
    cell = layer.cell if isinstance(layer, Equilibrium | KernelEquilibrium) else layer
    weights: Signed
    match cell:
        case GLMCell():
            weights, rows = [(cell.W1, -1), (cell.W2, 1), *([] if cell.W3 is None else [(cell.W3, -1)])], X
        case DenseCell() | ConvCell():
            weights, rows = [(cell.operator.weight, 1)], X2
        case nn.Linear() | nn.Conv2d():
            weights, rows = [(cell.weight, 1)], X2
        case _:
            name = type(cell).__name__
            raise TypeError(f"`initialise` knows Equilibrium, kerneq's cells, nn.Linear and nn.Conv2d, got {name}.")
    readout: Signed = [(layer.V1, -1), (layer.V2, 1)] if isinstance(layer, KernelEquilibrium) else []
    scheme = kernel if isinstance(kernel, str) else "informed"
    if scheme != "random":
        K = _evaluate(kernel, weights[0][0], rows, X, generator)
        scale = norm / spectral_norm(K, size)  # 1/λ, the readout's too
    for weight, sign in weights:
        weight.copy_(sign * (uniform(weight, generator) if scheme == "random" else scale * K))
    if scheme == "informed" and readout:
        V = scale * _evaluate(kernel, readout[0][0], X if X2 is None else X2, X, generator)
    for weight, sign in readout:
        weight.copy_(sign * V if scheme == "informed" else uniform(weight, generator))
    return layer


def uniform(weight: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """PyTorch's default for linear and convolutional layers: U(−1/√fan-in, 1/√fan-in), of the shape of `weight`."""
    half = 1 / math.sqrt(weight[0].numel())
    return (torch.rand(weight.shape, generator=generator) * 2 * half - half).to(weight)


def _evaluate(
    kernel: Any, weight: Tensor, X2: Tensor | None, X: Tensor | None, generator: torch.Generator | None
) -> Tensor:
    """The kernel's matrix k(X2, X) or its filters, of the shape of `weight`, before scaling."""
    if weight.ndim == 4:
        return _filters(kernel, weight, generator).to(weight)
    covariance = SquaredExponential() if isinstance(kernel, str) else as_kernel(kernel)
    columns = _grid(weight.shape[1]) if X is None else coordinates(X)
    rows = _grid(weight.shape[0]) if X2 is None else coordinates(X2, like=columns)
    if (len(rows), len(columns)) != tuple(weight.shape):
        raise ValueError(
            f"A weight {tuple(weight.shape)} needs X2 and X of {weight.shape[0]} and {weight.shape[1]} "
            f"coordinates, got {len(rows)} and {len(columns)}."
        )
    return covariance(rows, columns).to(weight)


def _filters(kernel: Any, weight: Tensor, generator: torch.Generator | None) -> Tensor:
    """The kernel's filters, of the shape (out, in, k, k) of `weight`."""
    out, inputs, height, width = weight.shape
    if height != width or height % 2 == 0:
        raise ValueError(f"Kernel filters are square with an odd side, got {height} × {width}.")
    radius, channels = height // 2, max(out, inputs)
    if isinstance(kernel, str):
        source = torch.Generator().manual_seed(0) if generator is None else generator
        kernel = Truncated(random_lengthscales(channels, source), radius)
    covariance = as_kernel(kernel)
    if isinstance(covariance, Truncated):
        table = covariance.filters()
        if table.shape[-1] != height or len(table) < channels:
            needed = f"the layer needs {channels} channels and side {height}"
            raise ValueError(f"The kernel's filters are {tuple(table.shape)}; {needed}.")
        return table[:out, :inputs]
    # a kernel of positions: k(Δ, 0) over the filter's offsets, the same between every two channels
    side = torch.arange(-radius, radius + 1, dtype=torch.float64)
    values = covariance(torch.cartesian_prod(side, side), torch.zeros(1, 2, dtype=torch.float64))
    return values.view(height, width).expand(out, inputs, -1, -1)


def _grid(n: int) -> Tensor:
    """n coordinates spread evenly over [−2π, 2π], (n, 1)."""
    return torch.linspace(-2 * math.pi, 2 * math.pi, n, dtype=torch.float64)[:, None]
