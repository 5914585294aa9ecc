"""The equations that solvers and layers are measured on."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

import kerneq as kq

from .measure import store_channels_last

PRECISION = "float32 as PyTorch has it by default (on a GPU: TF32 in convolutions), for both libraries."


@dataclasses.dataclass(frozen=True)
class Problem:
    """A cell with an input: z = f(z), with a Lipschitz bound of L = norm²."""

    name: str
    norm: float
    cell: kq.cells.DenseCell | kq.cells.ConvCell
    x: Tensor

    def bind(self) -> tuple[kq.cells.Equation, Tensor]:
        """The equation f, without gradients, and where its solve starts."""
        with torch.no_grad():
            f = self.cell.bind(self.x)
            return f, torch.zeros_like(f.evaluate(None).image)

    @property
    def asked(self) -> dict[str, Any]:
        """Its settings, for `Result.asked`."""
        return {"map": self.name, "L": self.norm**2, "batch": len(self.x)}


def dense(device: torch.device, norm: float, batch: int) -> Problem:
    """A Gaussian equation on vectors: 1024 states, 512 features in pieces of 32."""
    torch.manual_seed(0)
    cell = kq.cells.DenseCell(kq.kernels.Gaussian(0.05, split=32), inputs=256, state=1024, features=512, norm=norm)
    _scale(cell)
    return Problem("dense", norm, cell.to(device).eval(), torch.randn(batch, 256, device=device))


def conv(device: torch.device, norm: float, batch: int, size: int = 32) -> Problem:
    """The map of GEQ's largest branch: 256 states, 64 features, patches of 8 × 2 × 2."""
    torch.manual_seed(0)
    cell = kq.cells.ConvCell(kq.kernels.Gaussian(0.05), inputs=64, state=256, features=64, norm=norm)
    _scale(cell)
    store_channels_last(cell.to(device).eval())
    x = torch.randn(batch, 64, size, size, device=device).to(memory_format=torch.channels_last)
    return Problem("conv", norm, cell, x)


def _scale(cell: kq.cells.DenseCell | kq.cells.ConvCell) -> None:
    """Make W exceed its bound, so that the bound is what counts, and an input of unit scale."""
    with torch.no_grad():
        cell.operator.weight.mul_(10)
        for weight in cell.inject.parameters():
            weight.mul_(3**0.5)  # PyTorch's default initialisation has variance 1/3 per input
