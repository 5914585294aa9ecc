"""Many small equilibrium models side by side: one batched product trains a whole grid of seeds and settings.

Every weight has a first dimension for the model. The models share nothing: their losses are summed, so each gets its
own gradient, and Adam is elementwise, so training them together is training them one by one.
"""

import abc
from collections.abc import Callable, Iterable
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kerneq
from kerneq.gradients import Implicit
from kerneq.solution import Solution
from kerneq.solvers import Picard

Activation = Callable[[Tensor], Tensor]
Weights = tuple[Tensor, Tensor]
Batches = Callable[[int], Iterable[tuple[Tensor, Tensor]]]  # epoch ↦ (input, target) pairs


class AbstractBank(nn.Module, abc.ABC):
    """z = σ(W₁z + W₂y + b), f = V₁z + V₂y + c, for `models` models at once; y and f are (models, batch, …).

    Solved forward and backward by the same relaxed Picard iteration; a model that fails does not stop the others.
    """

    def __init__(
        self, W: Weights, V: Weights, activation: Activation, *, relaxation: float = 1.0, tol: float, max_steps: int
    ) -> None:
        super().__init__()
        self.W1, self.W2 = (nn.Parameter(w.clone()) for w in W)
        self.V1, self.V2 = (nn.Parameter(v.clone()) for v in V)
        self.sigma, self.tol, self.max_steps = activation, tol, max_steps
        self.solver = Picard(relaxation)
        self.gradient = Implicit(self.solver, tol=tol, max_steps=max_steps, on_failure="return")

    @property
    def models(self) -> int:
        """How many models there are."""
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
    def readout(self, z: Tensor, y: Tensor) -> Tensor:
        """V₁z + V₂y + c, (models, batch, …)."""

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
        self, W: Weights, V: Weights, activation: Activation, *, relaxation: float = 1.0, tol: float, max_steps: int
    ) -> None:
        super().__init__(W, V, activation, relaxation=relaxation, tol=tol, max_steps=max_steps)
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
    """Convolutional without biases, filters (models, c, c, k, k); y is (batch, c, h, w), the same for all models.

    A grouped convolution with three channels a group wastes most of any machine. Here a row of the output is a matrix
    product of the k rows of the input around it with a banded matrix (k·c·w, c·w): more arithmetic, but one batched
    matrix product for all models and rows. States are (models · batch, h, c · w).
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
    """Rows (models, batch, h, c · w) → each with its neighbours, 0 beyond the edge: (models, batch · h, k · c · w)."""
    height = rows.shape[2]
    padded = F.pad(rows, (0, 0, side // 2, side // 2))
    return torch.cat([padded[:, :, d : d + height] for d in range(side)], -1).flatten(1, 2)


def banded(filters: Tensor, width: int) -> Tensor:
    """Filters (models, out, in, k, k) → (models, k · in · w, out · w): from k rows of input to one of output."""
    side = filters.shape[-1]
    x = torch.arange(width, device=filters.device)
    shift = x[:, None] - x[None, :] + side // 2  # of column x of the input, seen from column x′ of the output
    inside = (shift >= 0) & (shift < side)
    taps = filters[..., shift.clamp(0, side - 1)] * inside  # (models, out, in, k, w, w′)
    return taps.permute(0, 3, 2, 4, 1, 5).flatten(4, 5).flatten(1, 3)


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """Mean squared error of each model, (models,)."""
    return (prediction - target).square().flatten(1).mean(1)


@torch.no_grad()
def test_error(bank: AbstractBank, batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Mean squared error of each model over all batches."""
    total, count = torch.zeros(bank.models, device=bank.W1.device), 0
    for y, target in batches:
        total = total + squared_error(bank(y)[0], target)
        count += 1
    return total / count


def train(
    bank: AbstractBank,
    training: Batches,
    testing: Callable[[], Iterable[tuple[Tensor, Tensor]]],
    *,
    epochs: int,
    lr: float,
    anneal_steps: int = 0,
    frozen: Tensor | None = None,
    freeze: int = 0,
    report: Callable[[int, Tensor], None] = lambda epoch, errors: None,
) -> Tensor:
    """Test errors (epochs + 1, models), before training first.

    `anneal_steps` > 0: the rate falls as a cosine to lr/1000 over so many steps. Models marked in `frozen`
    keep their hidden weights for the first `freeze` epochs.
    """
    optimizer = torch.optim.Adam(bank.parameters(), lr=lr)
    schedule = None
    if anneal_steps:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, anneal_steps, eta_min=lr / 1000)
    history = [test_error(bank, testing())]
    report(0, history[-1])
    for epoch in range(epochs):
        for y, target in training(epoch):
            optimizer.zero_grad(set_to_none=True)
            squared_error(bank(y)[0], target).sum().backward()
            if frozen is not None and epoch < freeze:
                for weight in bank.hidden:
                    if weight.grad is not None:
                        weight.grad[frozen] = 0.0
            optimizer.step()
            if schedule is not None:
                schedule.step()
        history.append(test_error(bank, testing()))
        report(epoch + 1, history[-1])
    return torch.stack(history).cpu()
