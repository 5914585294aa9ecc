"""The weights of Theorem 3, dense (Corollary 6) and convolutional (Corollary 11)."""

import math

import torch
from torch import Tensor

from kerneq.kglm.cell import Coordinates, GLMCell
from kerneq.kglm.convolution import Truncated, pixels
from kerneq.kglm.guarantee import Guarantee, certify, from_spectrum
from kerneq.kglm.layer import KernelEquilibrium
from kerneq.kglm.prior import Flat
from kerneq.kglm.problem import Problem
from kerneq.kglm.spectral import symbol


def dense(problem: Problem, cross: Tensor, outer_offset: Tensor) -> KernelEquilibrium:
    """W₁ = W₃ = −K/λ, W₂ = K/λ, V₁ = −k(X2, X)/λ, V₂ = k(X2, X)/λ; `cross` = k(X2, X)."""
    guarantee = certify(problem.K, problem.lam, problem.family, problem.prior, t=problem.t, offset=problem.offset)
    W, V = problem.K / problem.lam, cross / problem.lam
    bias = torch.zeros_like(problem.K[0]) if problem.offset is None else problem.offset
    cell = _cell(problem, W, bias, guarantee)
    return KernelEquilibrium(cell, -V, V, outer_offset, guarantee)


def convolutional(problem: Problem, kernel: Truncated, size: tuple[int, int]) -> KernelEquilibrium:
    """The same with filters C₁ = C₃ = −κ/λ, C₂ = κ/λ, on images (batch, c, h, w) predicted at their own
    pixels.
    """
    filters = kernel.filters().to(problem.K)
    C = filters / problem.lam
    channels, (height, width) = C.shape[0], size
    zero = C.new_zeros(channels, height, width)
    bias = zero if problem.offset is None else problem.offset.view(channels, height, width)
    guarantee = certify_convolution(filters, size, problem)
    return KernelEquilibrium(_cell(problem, C, bias, guarantee), -C, C, bias, guarantee)


def certify_convolution(filters: Tensor, size: tuple[int, int], problem: Problem) -> Guarantee:
    """From the symbol on a larger torus, of which the zero-padded convolution is a corner: rigorous, never
    exact.
    """
    radius = filters.shape[-1] // 2
    torus = size[0] + 2 * radius, size[1] + 2 * radius
    # moving the filter's centre to the origin makes a symmetric filter's symbol Hermitian
    spectrum = symbol(filters.double(), torus)
    row, column = (torch.arange(n, device=filters.device, dtype=torch.float64) / n for n in torus)
    phase = torch.exp(2j * math.pi * radius * (row[:, None] + column[None, :]))
    eigenvalues = torch.linalg.eigvalsh(spectrum * phase[:, :, None, None])
    smallest, largest = eigenvalues.min().item(), eigenvalues.abs().max().item()
    rounding = 1e3 * torch.finfo(filters.dtype).eps * largest
    return from_spectrum(smallest, largest, problem.lam, problem.family, problem.prior, rounding)


def grid_size(X: Tensor, channels: int) -> tuple[int, int]:
    """(h, w) if X are all pixels of an image with `channels` channels, in order; else an error."""
    height, width = (int(X[:, axis].max().item()) + 1 for axis in (0, 1))
    grid = pixels(height, width, channels, X.dtype).to(X.device) if height > 0 and width > 0 else X[:0]
    if not torch.equal(X, grid):
        raise ValueError(
            "The convolutional form needs every pixel of an image as coordinates, in the order of "
            "`kerneq.kglm.convolution.pixels(height, width, channels)`."
        )
    return height, width


def _cell(problem: Problem, W: Tensor, bias: Tensor, guarantee: Guarantee) -> GLMCell:
    flat = isinstance(problem.prior, Flat)
    # mean coordinates are the paper's; they need the contraction, and an inverse link if ρ ≠ 0
    plain = flat and guarantee.assumption2
    coordinates: Coordinates = "mean" if plain else "canonical"
    return GLMCell(-W, W, None if flat else -W, bias, problem.family, problem.prior, coordinates)
