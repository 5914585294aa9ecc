"""Start an equilibrium layer as a kernel GLM: informed by a kernel, naive, or random for comparison."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..cells import ConvCell, DenseCell
from ..equilibrium import Equilibrium
from ..tensors import check_positive
from .equilibrium import GLMCell, KernelEquilibrium
from .guarantee import spectral_norm
from .kernels import SquaredExponential, Truncated, as_kernel, coordinates, random_lengthscales


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
    random = isinstance(kernel, str) and kernel == "random"

    def draw(weight: Tensor, rows: Tensor | None) -> Tensor:
        """A weight of the shape of `weight`: k(rows, X) or its filters with spectral norm `norm`, or random."""
        if random:
            return uniform(weight, generator)
        raw = _evaluate(kernel, weight, rows, X, generator)
        return norm / spectral_norm(raw, size) * raw

    cell = layer.cell if isinstance(layer, Equilibrium | KernelEquilibrium) else layer
    match cell:
        case GLMCell():  # W₁ = W₃ = −K/λ and W₂ = K/λ; for a random start each weight is drawn for itself
            K = draw(cell.W1, X)
            cell.W1.copy_(-K)
            cell.W2.copy_(draw(cell.W2, X) if random else K)
            if cell.W3 is not None:
                cell.W3.copy_(draw(cell.W3, X) if random else -K)
        case DenseCell() | ConvCell():
            cell.operator.weight.copy_(draw(cell.operator.weight, X2))
        case nn.Linear() | nn.Conv2d():
            cell.weight.copy_(draw(cell.weight, X2))
        case _:
            name = type(cell).__name__
            raise TypeError(f"`initialise` knows Equilibrium, kerneq's cells, nn.Linear and nn.Conv2d, got {name}.")
    if isinstance(layer, KernelEquilibrium) and isinstance(kernel, str):
        layer.V1.copy_(uniform(layer.V1, generator))
        layer.V2.copy_(uniform(layer.V2, generator))
    elif isinstance(layer, KernelEquilibrium):  # the readout has the hidden weight's λ, not a norm of its own
        scale = norm / spectral_norm(_evaluate(kernel, layer.cell.W1, X, X, generator), size)
        V = scale * _evaluate(kernel, layer.V1, X if X2 is None else X2, X, generator)
        layer.V1.copy_(-V)
        layer.V2.copy_(V)
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
    rows = _grid(weight.shape[0]) if X2 is None else coordinates(X2)
    columns = _grid(weight.shape[1]) if X is None else coordinates(X)
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
        return Truncated(random_lengthscales(channels, source), radius).filters()[:out, :inputs]
    covariance = as_kernel(kernel)
    if isinstance(covariance, Truncated):
        table = covariance.filters()
        if table.shape[-1] != height or len(table) < channels:
            raise ValueError(
                f"The kernel's filters are {tuple(table.shape)}; the layer needs {channels} channels and side {height}."
            )
        return table[:out, :inputs]
    # a kernel of positions: k(Δ, 0) over the filter's offsets, the same between every two channels
    side = torch.arange(-radius, radius + 1, dtype=torch.float64)
    values = covariance(torch.cartesian_prod(side, side), torch.zeros(1, 2, dtype=torch.float64))
    return values.view(height, width).expand(out, inputs, -1, -1)


def _grid(n: int) -> Tensor:
    """n coordinates spread evenly over [−2π, 2π], (n, 1)."""
    return torch.linspace(-2 * math.pi, 2 * math.pi, n, dtype=torch.float64)[:, None]
