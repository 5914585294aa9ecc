"""The equations that are measured."""

import torch

from kerneq.bench.timing import in_layout
from kerneq.cells import ConvCell, DenseCell
from kerneq.cells.base import AbstractKernelCell
from kerneq.kernels import Gaussian

PRECISION = "float32 as PyTorch has it by default (on a GPU: TF32 in convolutions), for both libraries."


def dense(device: torch.device, norm: float, batch: int) -> tuple[AbstractKernelCell, torch.Tensor]:
    """A Gaussian equation on vectors: 1024 states, 512 features in pieces of 32."""
    torch.manual_seed(0)
    cell = DenseCell(Gaussian(0.05, split=32), inputs=256, state=1024, features=512, norm=norm)
    return _stretched(cell).to(device).eval(), torch.randn(batch, 256, device=device)


def conv(device: torch.device, norm: float, batch: int, size: int = 32) -> tuple[AbstractKernelCell, torch.Tensor]:
    """The map of GEQ's largest branch: 256 states, 64 features, patches of 8 × 2 × 2."""
    torch.manual_seed(0)
    cell = ConvCell(Gaussian(0.05), inputs=64, state=256, features=64, norm=norm)
    x = torch.randn(batch, 64, size, size, device=device).to(memory_format=torch.channels_last)
    in_layout(_stretched(cell).to(device).eval(), channels_last=True)
    return cell, x


def _stretched(cell: AbstractKernelCell) -> AbstractKernelCell:
    """W beyond its bound, so that the bound is what counts, and an input of unit scale."""
    with torch.no_grad():
        cell.operator.weight.mul_(10)
        for weight in cell.inject.parameters():
            weight.mul_(3**0.5)  # PyTorch's default initialisation has variance 1/3 per input
    return cell
