"""The truncated kernel of Appendix E, whose matrix on a pixel grid is a convolution, with Appendix F's
channel pairs.

κ(x, x′) = w(Δ₁) w(Δ₂) g(x₃, x′₃),    g(a, b) = exp(−‖Δ‖² / 2ℓ²_ab),    Δ = pixel offset, x₃ = channel
"""

import dataclasses
from typing import Literal, final

import torch
from torch import Tensor

from kerneq.kglm.kernels import AbstractKernel

Window = Literal["box", "triangle"]
Pairs = Literal["published", "definite"]


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Truncated(AbstractKernel):
    """Squared exponentials of their own length per pair of channels, cut off beyond `radius` pixels.

    As published (`box`, `published`) it is not a kernel: the indicator of |Δ| ≤ r is not positive
    semi-definite (its Fourier transform is a Dirichlet kernel, negative in places), nor is a matrix of ones
    of different lengths per pair. `triangle` with `definite` is: w = 1 − |Δ|/(r + 1), and each pair of
    channels a ≠ b enters as a 2 × 2 block of ones.
    """

    squared_lengthscales: Tensor  # ℓ², (c, c), symmetric
    radius: int = 2  # r; filters are (2r + 1) × (2r + 1)
    window: Window = "box"
    pairs: Pairs = "published"
    off_diagonal: float = 1.0  # weight of a ≠ b; the released scripts have ½

    def __post_init__(self) -> None:
        lengths = self.squared_lengthscales
        if lengths.ndim != 2 or not torch.equal(lengths, lengths.mT) or not bool((lengths > 0).all()):
            raise ValueError("`squared_lengthscales` must be a symmetric matrix (c, c) of positive numbers.")
        if self.radius < 0:
            raise ValueError(f"`radius` must not be negative, got {self.radius}.")

    def __call__(self, X: Tensor, X2: Tensor) -> Tensor:
        offset = (X[:, None, :2] - X2[None, :, :2]).abs()
        table = self.filters().to(X)
        inside = (offset <= self.radius).all(-1)
        i, j = (offset.clamp(max=self.radius).long() + self.radius).unbind(-1)
        first, second = X[:, None, 2].long(), X2[None, :, 2].long()
        return table[first, second, i, j] * inside

    def filters(self) -> Tensor:
        """(c, c, 2r + 1, 2r + 1): C ∗ image equals κ(X, X) @ image for X = `pixels(h, w, c)`."""
        return filters(self.squared_lengthscales, self.radius, self.window, self.pairs, self.off_diagonal)


def filters(
    squared_lengthscales: Tensor, radius: int, window: Window, pairs: Pairs, off_diagonal: float = 1.0
) -> Tensor:
    """Filters (…, c, c, k, k) from squared lengthscales (…, c, c): many random kernels at once."""
    offset = torch.arange(-radius, radius + 1, dtype=squared_lengthscales.dtype, device=squared_lengthscales.device)
    distance = offset[:, None].square() + offset[None, :].square()
    table = torch.exp(-0.5 * distance / squared_lengthscales[..., None, None])
    if window == "triangle":
        taper = 1 - offset.abs() / (radius + 1)
        table = table * (taper[:, None] * taper[None, :])
    same = torch.eye(table.shape[-3], dtype=torch.bool, device=table.device)[:, :, None, None]
    table = torch.where(same, table, off_diagonal * table)
    if pairs == "definite":  # the diagonal collects a block from every pair its channel is in
        table = torch.where(same, table.sum(-3, keepdim=True), table)
    return table


def random_lengthscales(
    channels: int,
    generator: torch.Generator,
    *,
    batch: tuple[int, ...] = (),
    high: float = 4.0,
    squared: bool = True,
) -> Tensor:
    """ℓ² ~ U(0, high) for each unordered pair of channels; `squared=False` draws ℓ instead, as the scripts
    do.
    """
    draw = torch.rand(*batch, channels, channels, generator=generator) * high
    draw = draw.clamp(min=1e-3)
    lower = draw.tril()
    symmetric = lower + draw.tril(-1).mT
    return symmetric if squared else symmetric.square()


def pixels(height: int, width: int, channels: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Coordinates (row, column, channel) in the order of `image.flatten()` for an image (c, h, w)."""
    grid = torch.cartesian_prod(torch.arange(channels), torch.arange(height), torch.arange(width))
    return grid[:, [1, 2, 0]].to(dtype)
