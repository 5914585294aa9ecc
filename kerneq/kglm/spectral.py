"""Exact spectral norms: of matrices, and of convolutions by the FFT (Sedghi et al., 2018)."""

import torch
from torch import Tensor


def symbol(weight: Tensor, size: tuple[int, int]) -> Tensor:
    """The convolution's action per frequency: (…, out, in, kh, kw) → (…, h, w, out, in), complex.

    Their singular values, all frequencies together, are those of the circular convolution.
    """
    if weight.shape[-2] > size[0] or weight.shape[-1] > size[1]:
        raise ValueError(f"A filter {tuple(weight.shape[-2:])} does not fit an image {size}.")
    return torch.fft.fft2(weight, s=size).movedim((-2, -1), (-4, -3))


def convolution_norm(weight: Tensor, size: tuple[int, int]) -> Tensor:
    """‖W‖ of the circular convolution on images of `size`; weights (…, out, in, kh, kw) give norms (…)."""
    singular = torch.linalg.matrix_norm(symbol(weight, size), ord=2)
    return singular.amax((-2, -1))


def padded_norm_bound(weight: Tensor, size: tuple[int, int]) -> Tensor:
    """An upper bound of ‖W‖ for the zero-padded convolution on images of `size`.

    It is a corner of the circular one on images larger by the filter's reach, so its norm is no larger.
    """
    height, width = size[0] + weight.shape[-2] - 1, size[1] + weight.shape[-1] - 1
    return convolution_norm(weight, (height, width))


def matrix_norm(weight: Tensor) -> Tensor:
    """‖W‖ of matrices (…, m, n)."""
    return torch.linalg.matrix_norm(weight, ord=2)


def spectral_norm(weight: Tensor, size: tuple[int, int] | None = None) -> Tensor:
    """‖W‖ of one dense weight (m, n) or one convolution (out, in, kh, kw) on images of `size`."""
    if weight.ndim == 2:
        return matrix_norm(weight)
    if weight.ndim != 4:
        raise ValueError(f"Expected a weight (m, n) or (out, in, kh, kw), got shape {tuple(weight.shape)}.")
    if size is None:
        raise ValueError("The norm of a convolution depends on the image: pass `size=(height, width)`.")
    return convolution_norm(weight, size)
