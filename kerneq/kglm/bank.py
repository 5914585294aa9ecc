"""Many small equilibrium models side by side: one batched product trains a whole grid of seeds and settings.

Every weight has a first dimension for the model. The models share nothing: their losses are summed, so each
gets its own gradient, and Adam is elementwise, so training them together is training them one by one.
"""

import abc
import math
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kerneq
from kerneq.gradients import AbstractGradient
from kerneq.solution import Solution
from kerneq.solvers import AbstractSolver

Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Activation] = {"tanh": torch.tanh, "sigmoid": torch.sigmoid, "relu": torch.relu}


class AbstractBank(nn.Module, abc.ABC):
    """z = σ(W₁z + W₂y + b), f = V₁z + V₂y + c, for `models` models at once; y and f are (models, batch, …)."""

    def __init__(
        self,
        W: tuple[Tensor, Tensor],
        V: tuple[Tensor, Tensor],
        activation: str,
        solver: AbstractSolver[Any],
        gradient: AbstractGradient,
        tol: float,
        max_steps: int,
    ) -> None:
        super().__init__()
        self.W1, self.W2 = (nn.Parameter(w.clone()) for w in W)
        self.V1, self.V2 = (nn.Parameter(v.clone()) for v in V)
        self.sigma = ACTIVATIONS[activation]
        self.solver, self.gradient, self.tol, self.max_steps = solver, gradient, tol, max_steps

    @property
    def models(self) -> int:
        return len(self.W1)

    @property
    def hidden(self) -> list[nn.Parameter]:
        """The weights inside the equilibrium."""
        readout = {"V1", "V2", "c"}
        return [p for name, p in self.named_parameters() if name not in readout]

    @abc.abstractmethod
    def drive(self, y: Tensor) -> Tensor:
        """W₂y + b, (models · batch, …)."""

    @abc.abstractmethod
    def recurrence(self, y: Tensor) -> Callable[[Tensor], Tensor]:
        """z ↦ W₁z for states stored as `solve` wants them, one sample a row; y tells the shape."""

    @abc.abstractmethod
    def readout(self, z: Tensor, y: Tensor) -> Tensor: ...

    def forward(self, y: Tensor) -> tuple[Tensor, Solution]:
        """Predictions and the solution, whose samples are (model, sample) pairs."""
        constant, recur = self.drive(y), self.recurrence(y)

        def f(z: Tensor) -> Tensor:
            return self.sigma(recur(z) + constant)

        with torch.no_grad():
            start = torch.zeros_like(constant)
            solution = kerneq.solve(f, start, self.solver, tol=self.tol, max_steps=self.max_steps)
        z = solution.value
        if torch.is_grad_enabled():
            z = self.gradient.attach(f, z)
        return self.readout(z, y), solution


@final
class DenseBank(AbstractBank):
    """Fully connected, with biases; y is (models, batch, n)."""

    def __init__(
        self,
        W: tuple[Tensor, Tensor],
        V: tuple[Tensor, Tensor],
        activation: str,
        solver: AbstractSolver[Any],
        gradient: AbstractGradient,
        tol: float,
        max_steps: int,
    ) -> None:
        super().__init__(W, V, activation, solver, gradient, tol, max_steps)
        self.b = nn.Parameter(torch.zeros_like(self.W1[:, :1, :]))
        self.c = nn.Parameter(self.V1.new_zeros(self.models, 1, self.V1.shape[1]))

    def drive(self, y: Tensor) -> Tensor:
        return torch.baddbmm(self.b, y, self.W2.mT).flatten(0, 1)

    def recurrence(self, y: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda z: torch.bmm(z.view(self.models, -1, z.shape[-1]), self.W1.mT).flatten(0, 1)

    def readout(self, z: Tensor, y: Tensor) -> Tensor:
        z = z.view(self.models, -1, z.shape[-1])
        return torch.baddbmm(self.c, z, self.V1.mT) + torch.bmm(y, self.V2.mT)


@final
class ConvBank(AbstractBank):
    """Convolutional without biases, filters (models, c, c, k, k); y is (batch, c, h, w), the same for all
    models.

    A grouped convolution with three channels a group wastes most of any machine. Here a row of the output
    is a matrix product of the k rows of the input around it with a banded matrix (k·c·w, c·w): more
    arithmetic, but one batched matrix product for all models and rows. States are (models · batch, h, c ·
    w).
    """

    def drive(self, y: Tensor) -> Tensor:
        rows = _windows(_rows(y)[None], self.W2.shape[-1])
        return (rows @ banded(self.W2, y.shape[-1])).view(-1, y.shape[2], y.shape[1] * y.shape[3])

    def recurrence(self, y: Tensor) -> Callable[[Tensor], Tensor]:
        matrix = banded(self.W1, y.shape[-1])
        return lambda z: self._convolve(z, matrix).view_as(z)

    def readout(self, z: Tensor, y: Tensor) -> Tensor:
        skip = _windows(_rows(y)[None], self.V2.shape[-1]) @ banded(self.V2, y.shape[-1])
        f = self._convolve(z, banded(self.V1, y.shape[-1])) + skip
        batch, channels, height, width = y.shape
        return f.view(self.models, batch, height, channels, width).transpose(2, 3)

    def _convolve(self, z: Tensor, matrix: Tensor) -> Tensor:
        return torch.bmm(_windows(z.view(self.models, -1, *z.shape[1:]), self.W1.shape[-1]), matrix)


def _rows(images: Tensor) -> Tensor:
    """(batch, c, h, w) → (batch, h, c · w)."""
    return images.transpose(1, 2).flatten(2)


def _windows(rows: Tensor, side: int) -> Tensor:
    """Rows (models, batch, h, c · w) → each with its neighbours, zero beyond the edge: (models, batch · h,
    k · c · w).
    """
    height = rows.shape[2]
    padded = F.pad(rows, (0, 0, side // 2, side // 2))
    return torch.cat([padded[:, :, d : d + height] for d in range(side)], -1).flatten(1, 2)


def banded(filters: Tensor, width: int) -> Tensor:
    """Filters (models, out, in, k, k) → (models, k · in · w, out · w): from k rows of the input to one of
    the output.
    """
    side = filters.shape[-1]
    x = torch.arange(width, device=filters.device)
    shift = x[:, None] - x[None, :] + side // 2  # of column x of the input, seen from column x′ of the output
    inside = (shift >= 0) & (shift < side)
    taps = filters[..., shift.clamp(0, side - 1)] * inside  # (models, out, in, k, w, w′)
    return taps.permute(0, 3, 2, 4, 1, 5).flatten(4, 5).flatten(1, 3)


def uniform(shape: tuple[int, ...], fan_in: int, generator: torch.Generator) -> Tensor:
    """PyTorch's default start, U(−1/√fan-in, 1/√fan-in), for a whole bank."""
    reach = 1 / math.sqrt(fan_in)
    return torch.rand(shape, generator=generator) * 2 * reach - reach
