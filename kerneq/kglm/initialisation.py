"""Any equilibrium, linear or convolutional layer started as a kernel GLM: its weights are ±K/λ, with λ = ‖K‖/norm."""

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
    informed = not isinstance(kernel, str)
    if not informed and kernel not in ("naive", "random"):
        raise ValueError(f"A scheme is a kernel, 'naive' or 'random', got {kernel!r}.")
    cell = layer.cell if isinstance(layer, Equilibrium | KernelEquilibrium) else layer
    weights = _weights(cell)
    if not informed and kernel == "random":
        for weight, sign in weights:
            weight.copy_(sign * uniform(weight, generator))
    else:
        K = _evaluate(kernel, weights[0][0], X if isinstance(cell, GLMCell) else X2, X, generator)
        scale = norm / spectral_norm(K, size)  # 1/λ, the readout's too
        for weight, sign in weights:
            weight.copy_(sign * scale * K)
    if isinstance(layer, KernelEquilibrium) and informed:
        V = scale * _evaluate(kernel, layer.V1, X if X2 is None else X2, X, generator)
        layer.V1.copy_(-V)
        layer.V2.copy_(V)
    elif isinstance(layer, KernelEquilibrium):
        for weight in (layer.V1, layer.V2):
            weight.copy_(uniform(weight, generator))
    return layer


def _weights(cell: nn.Module) -> list[tuple[Tensor, int]]:
    """Return the weights of a cell or a layer that become ±K/λ, each with its sign."""
    match cell:
        case GLMCell():
            return [(cell.W1, -1), (cell.W2, 1), *([] if cell.W3 is None else [(cell.W3, -1)])]
        case DenseCell() | ConvCell():
            return [(cell.operator.weight, 1)]
        case nn.Linear() | nn.Conv2d():
            return [(cell.weight, 1)]
    name = type(cell).__name__
    raise TypeError(f"`initialise` knows Equilibrium, kerneq's cells, nn.Linear and nn.Conv2d, got {name}.")


def uniform(weight: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw PyTorch's default for linear and convolutional layers, U(−1/√fan-in, 1/√fan-in), of the shape of `weight`.

    Unlike `nn.init.kaiming_uniform_` it draws in float32 on the CPU: a seed means the same weights everywhere.
    """
    half = 1 / math.sqrt(weight[0].numel())
    return (torch.rand(weight.shape, generator=generator) * 2 * half - half).to(weight)


def _evaluate(
    kernel: Any, weight: Tensor, X2: Tensor | None, X: Tensor | None, generator: torch.Generator | None
) -> Tensor:
    """Return the kernel's matrix k(X2, X) or its filters, of the shape of `weight`, before scaling."""
    if weight.ndim == 4:
        return _filters(kernel, weight, generator).to(weight)
    covariance = SquaredExponential() if isinstance(kernel, str) else as_kernel(kernel)
    # without coordinates, as many as are needed, spread evenly over [−2π, 2π]
    row_grid, column_grid = (torch.linspace(-2 * math.pi, 2 * math.pi, n, dtype=torch.float64) for n in weight.shape)
    columns = coordinates(column_grid if X is None else X)
    rows = coordinates(row_grid if X2 is None else X2, like=columns)
    if (len(rows), len(columns)) != tuple(weight.shape):
        raise ValueError(
            f"A weight {tuple(weight.shape)} needs X2 and X of {weight.shape[0]} and {weight.shape[1]} "
            f"coordinates, got {len(rows)} and {len(columns)}."
        )
    return covariance(rows, columns).to(weight)


def _filters(kernel: Any, weight: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return the kernel's filters, of the shape (out, in, k, k) of `weight`."""
    out, inputs, height, width = weight.shape
    if height != width or height % 2 == 0:
        raise ValueError(f"Kernel filters are square with an odd side, got {height} × {width}.")
    radius, channels = height // 2, max(out, inputs)
    if isinstance(kernel, str):
        source = torch.Generator().manual_seed(0) if generator is None else generator
        kernel = Truncated(random_lengthscales(channels, source), radius)
    if not isinstance(kernel, Truncated):
        # a kernel of positions: k(Δ, 0) over the filter's offsets, the same between every two channels
        side = torch.arange(-radius, radius + 1, dtype=torch.float64)
        values = as_kernel(kernel)(torch.cartesian_prod(side, side), torch.zeros(1, 2, dtype=torch.float64))
        return values.view(height, width).expand(out, inputs, -1, -1)
    table = kernel.filters()
    if table.shape[-1] != height or len(table) < channels:
        needed = f"the layer needs {channels} channels and side {height}"
        raise ValueError(f"The kernel's filters are {tuple(table.shape)}; {needed}.")
    return table[:out, :inputs]
