"""Start an equilibrium layer as a kernel GLM: informed by a kernel, naive, or random for comparison."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kerneq.cells.base import AbstractKernelCell
from kerneq.equilibrium import Equilibrium
from kerneq.kglm.adapter import as_kernel
from kerneq.kglm.cell import GLMCell
from kerneq.kglm.convolution import Truncated, filters, random_lengthscales
from kerneq.kglm.kernels import AbstractKernel, SquaredExponential, coordinates
from kerneq.kglm.layer import KernelEquilibrium
from kerneq.kglm.spectral import spectral_norm


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
    convolutions one of random lengths per pair of channels) or "random" (PyTorch's default, uniform).
    Kernel weights are scaled to spectral norm `norm` exactly, which is λ = ‖K‖/norm: below 1/sup A″ the
    layer contracts. X are the coordinates of the state, X2 of the features or outputs; `size` is the image
    a convolution's norm is measured on.

    Layers: `KernelEquilibrium` and `GLMCell` (Theorem 3; with "naive" the readout is random, as in the
    paper), `Equilibrium` and every kerneq cell (its operator W), `nn.Linear`, `nn.Conv2d`.
    """
    if not norm > 0:
        raise ValueError(f"`norm` must be positive, got {norm}.")

    def draw(weight: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
        return weight_for(weight, kernel, norm=norm, X=columns, X2=rows, size=size, generator=generator)

    if isinstance(layer, KernelEquilibrium):
        inner = layer.cell.W1
        initialise(layer.cell, kernel, norm=norm, X=X, size=size, generator=generator)
        if isinstance(kernel, str):
            for weight in (layer.V1, layer.V2):
                weight.copy_(uniform(weight, generator))
        else:  # the readout has the hidden weight's λ, not a norm of its own
            scale = norm / spectral_norm(_raw(inner, kernel, X, X, generator), size)
            V = scale * _raw(layer.V1, kernel, X if X2 is None else X2, X, generator)
            layer.V1.copy_(-V)
            layer.V2.copy_(V)
    elif isinstance(layer, GLMCell):
        _glm(layer, lambda: draw(layer.W1, X, X), tied=not (isinstance(kernel, str) and kernel == "random"))
    elif isinstance(layer, Equilibrium):
        initialise(layer.cell, kernel, norm=norm, X=X, X2=X2, size=size, generator=generator)
    elif isinstance(layer, AbstractKernelCell):
        layer.operator.weight.copy_(draw(layer.operator.weight, X2, X))
    elif isinstance(layer, nn.Linear | nn.Conv2d):
        layer.weight.copy_(draw(layer.weight, X2, X))
    else:
        raise TypeError(
            f"`initialise` knows Equilibrium, kerneq's cells, nn.Linear and nn.Conv2d, got {type(layer).__name__}."
        )
    return layer


def weight_for(
    weight: Tensor,
    kernel: Any,
    *,
    norm: float,
    X: Tensor | None = None,
    X2: Tensor | None = None,
    size: tuple[int, int] | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """A weight of the shape of `weight`: k(X2, X) or its filters with spectral norm `norm`, or random."""
    if isinstance(kernel, str) and kernel == "random":
        return uniform(weight, generator)
    raw = _raw(weight, kernel, X2, X, generator)
    return norm / spectral_norm(raw, size) * raw


def uniform(weight: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """PyTorch's default for linear and convolutional layers: U(−1/√fan-in, 1/√fan-in)."""
    reach = 1 / math.sqrt(weight[0].numel())
    return (torch.rand(weight.shape, generator=generator) * 2 * reach - reach).to(weight)


def _glm(cell: GLMCell, draw: Callable[[], Tensor], tied: bool) -> None:
    """W₁ = W₃ = −K/λ and W₂ = K/λ; for a random start each weight is drawn for itself."""
    K = draw()
    cell.W1.copy_(-K)
    cell.W2.copy_(K if tied else draw())
    if cell.W3 is not None:
        cell.W3.copy_(-K if tied else draw())


def _raw(weight: Tensor, kernel: Any, X2: Tensor | None, X: Tensor | None, generator: torch.Generator | None) -> Tensor:
    """The kernel's matrix or filters before scaling."""
    if isinstance(kernel, str) and kernel not in ("naive", "random"):
        raise ValueError(f"A scheme is a kernel, 'naive' or 'random', got {kernel!r}.")
    naive = isinstance(kernel, str)
    if weight.ndim == 2:
        covariance = SquaredExponential() if naive else as_kernel(kernel)
        rows = _grid(weight.shape[0]) if X2 is None else coordinates(X2)
        columns = _grid(weight.shape[1]) if X is None else coordinates(X)
        if (len(rows), len(columns)) != tuple(weight.shape):
            raise ValueError(
                f"A weight {tuple(weight.shape)} needs X2 and X of {weight.shape[0]} and {weight.shape[1]} "
                f"coordinates, got {len(rows)} and {len(columns)}."
            )
        return covariance(rows, columns).to(weight)
    return _convolution(weight, kernel, naive, generator).to(weight)


def _convolution(weight: Tensor, kernel: Any, naive: bool, generator: torch.Generator | None) -> Tensor:
    out, inputs, height, width = weight.shape
    if height != width or height % 2 == 0:
        raise ValueError(f"Kernel filters are square with an odd side, got {height} × {width}.")
    radius, channels = height // 2, max(out, inputs)
    if naive:
        source = torch.Generator().manual_seed(0) if generator is None else generator
        return filters(random_lengthscales(channels, source), radius, "box", "published")[:out, :inputs]
    covariance = as_kernel(kernel)
    if isinstance(covariance, Truncated):
        table = covariance.filters()
        if table.shape[-1] != height or len(table) < channels:
            raise ValueError(
                f"The kernel's filters are {tuple(table.shape)}; the layer needs {channels} channels and side {height}."
            )
        return table[:out, :inputs]
    return _stationary(covariance, radius).expand(out, inputs, -1, -1)


def _stationary(kernel: AbstractKernel, radius: int) -> Tensor:
    """k(Δ, 0) over the filter's offsets: the same filter between every two channels."""
    side = torch.arange(-radius, radius + 1, dtype=torch.float64)
    offsets = torch.cartesian_prod(side, side)
    return kernel(offsets, torch.zeros(1, 2, dtype=torch.float64)).view(2 * radius + 1, 2 * radius + 1)


def _grid(n: int) -> Tensor:
    return torch.linspace(-2 * math.pi, 2 * math.pi, n, dtype=torch.float64)[:, None]
