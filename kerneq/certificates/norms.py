"""Upper bounds on operator norms of matrices and zero-padded convolutions.

`linear_maps.py` estimates ‖W‖ during training by Lanczos, which approaches it from below; a certificate needs the
other side. Everything is in float64, and no random number is drawn.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..linear_maps import bound_top_eigenvalue

DENSE = 1024  # a convolution with at most so many inputs or outputs is written out as a matrix
CHUNK = 2**24  # numbers of the frequency responses that are held at once
SLACK = 1e-9  # what rounding in float64 can take from a norm, and far more


def matrix_norm(matrix: Tensor) -> float:
    """Return an upper bound on the largest singular value of a matrix."""
    return float(torch.linalg.matrix_norm(matrix.detach().double(), 2)) * (1 + SLACK)


def conv_norm(weight: Tensor, size: tuple[int, int], stride: int = 1, padding: int | None = None) -> float:
    """Return an upper bound on the norm of a zero-padded convolution of pictures of `size`, (height, width).

    weight (outputs, inputs, k, k); `padding` is k // 2 by default. For small ones the matrix is written out and its
    norm computed. Large ones are bounded by the same convolution on a torus that is wide enough not to wrap around: the
    pictures are some of its pixels and the outputs some of its outputs, so its norm is no smaller; and in the Fourier
    basis it is one matrix for each frequency. Its norm is larger by about 1/height².
    """
    weight = weight.detach().double()
    largest = float(weight.abs().amax().clamp_min(torch.finfo(weight.dtype).tiny))
    if not math.isfinite(largest):
        return math.inf
    weight = weight / largest  # so that no square overflows, or vanishes
    padding = weight.shape[-1] // 2 if padding is None else padding
    outputs = [(side + 2 * padding - weight.shape[-1]) // stride + 1 for side in size]
    columns, rows = weight.shape[1] * size[0] * size[1], weight.shape[0] * outputs[0] * outputs[1]
    if min(columns, rows) <= DENSE:
        return largest * _dense_norm(weight, size, outputs, stride, padding)
    margin = max(weight.shape[-1] - 1 - padding, padding)
    torus = [-(-(side + margin) // stride) * stride for side in size]
    return largest * _torus_norm(weight, torus, stride) * (1 + SLACK)


def _dense_norm(weight: Tensor, size: tuple[int, int], outputs: list[int], stride: int, padding: int) -> float:
    """Return the bound from the whole matrix, made by convolving the basis of its smaller side."""
    (after, before), (height, width) = weight.shape[:2], size
    if before * height * width <= after * outputs[0] * outputs[1]:
        basis = torch.eye(before * height * width, dtype=weight.dtype, device=weight.device)
        images = F.conv2d(basis.view(-1, before, height, width), weight, stride=stride, padding=padding)
    else:
        basis = torch.eye(after * outputs[0] * outputs[1], dtype=weight.dtype, device=weight.device)
        covered = [(n - 1) * stride - 2 * padding + weight.shape[-1] for n in outputs]
        output_padding = (height - covered[0], width - covered[1])
        images = F.conv_transpose2d(basis.view(-1, after, *outputs), weight, None, stride, padding, output_padding)
    rows = images.flatten(1)
    return float(torch.linalg.eigvalsh(rows @ rows.mT)[-1].clamp_min(0)) ** 0.5 * (1 + SLACK)


def _torus_norm(weight: Tensor, torus: list[int], stride: int) -> float:
    """Return the largest norm of a frequency response Ŵ(ω); with a stride s, of s² of them side by side, over s."""
    if stride == 1 and weight.shape[0] > weight.shape[1]:  # the adjoint has the same norm and smaller Gram matrices
        weight = weight.transpose(0, 1)
    after, before, k, _ = weight.shape
    height, width = torus
    taps = torch.arange(k, dtype=weight.dtype, device=weight.device)
    across = torch.outer(torch.arange(width, device=weight.device), taps) * (2 * torch.pi / width)
    across = torch.polar(torch.ones_like(across), -across)  # (width, k)
    largest = 0.0
    coarse = height // stride
    for u in range(coarse // 2 + 1):  # Ŵ(−ω) is the conjugate of Ŵ(ω)
        rows = torch.arange(stride, device=weight.device) * coarse + u  # the frequencies that a stride folds into one
        down = torch.outer(rows, taps) * (2 * torch.pi / height)
        down = torch.polar(torch.ones_like(down), -down)  # (stride, k)
        half = torch.einsum("oiyx,sy->soix", weight.to(down.dtype), down)
        step = max(1, CHUNK // (stride * stride * after * before))
        for columns in torch.split(torch.arange(width // stride, device=weight.device), step):
            folded = columns[:, None] + torch.arange(stride, device=weight.device) * (width // stride)  # (n, stride)
            response = torch.einsum("soix,ntx->nosti", half, across[folded])
            response = response.reshape(len(columns), after, -1) / stride
            largest = max(largest, float(bound_top_eigenvalue(response @ response.mH).max()) ** 0.5)
    return largest
