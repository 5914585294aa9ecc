"""Many small equilibrium models side by side: one batched product trains a whole grid of seeds and settings.

Every weight has a first dimension for the model. The models share nothing: their losses are summed, so each gets its
own gradient, and Adam is elementwise, so training them together is training them one by one.
"""

import abc
import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import final

import torch
from common import UNSAVED, Checkpoints
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler

import kerneq
from kerneq.fused.device import runs_triton
from kerneq.gradients import Implicit, Point
from kerneq.solution import Solution
from kerneq.solvers import Picard

Activation = Callable[[Tensor], Tensor]
Batches = Callable[[int], Iterable[tuple[Tensor, Tensor]]]  # epoch ↦ (input, target) pairs


@final
@dataclasses.dataclass(frozen=True)
class Iteration:
    """The relaxed Picard iteration that solves a bank, forward and backward.

    With `rescue` what diverges keeps its best iterate; without, every solve takes its `max_steps` steps, and what
    overflows fails, as in the released code. Either way a model that fails does not stop the others.
    """

    tol: float
    max_steps: int
    relaxation: float = 1.0
    rescue: bool = True


class AbstractBank(nn.Module, abc.ABC):
    """z = σ(W₁z + W₂y + b), f = V₁z + V₂y + c, for `models` models at once; y and f are (models, batch, …).

    `weights` are W₁, W₂, V₁, V₂. `rectified`: the output is ReLU(f). With `warm` each training step starts from the
    equilibrium of the last: for training on one batch.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        activation: Activation,
        iteration: Iteration,
        *,
        rectified: bool = False,
        warm: bool = False,
    ) -> None:
        super().__init__()
        self.W1, self.W2, self.V1, self.V2 = (nn.Parameter(weight.clone()) for weight in weights)
        self.sigma, self.iteration, self.rectified, self.warm = activation, iteration, rectified, warm
        self.last: Tensor | None = None
        self.gradient = Implicit(
            Picard(iteration.relaxation),
            tol=iteration.tol,
            max_steps=iteration.max_steps,
            check_every=None if iteration.rescue else iteration.max_steps,
            on_failure="return",
        )

    @property
    def models(self) -> int:
        """How many models there are."""
        return len(self.W1)

    @abc.abstractmethod
    def drive(self, y: Tensor) -> Tensor:
        """W₂y + b, one sample of the solve a row."""

    @abc.abstractmethod
    def recurrence(self, y: Tensor) -> Callable[[Tensor], Tensor]:
        """z ↦ W₁z for states stored as `drive` stores them; y tells the shape."""

    @abc.abstractmethod
    def readout(self, z: Tensor, y: Tensor) -> Tensor:
        """V₁z + V₂y + c, (models, batch, …)."""

    def forward(self, y: Tensor) -> tuple[Tensor, Solution]:
        """Predictions (models, batch, …) and the solution."""
        constant, recur = self.drive(y), self.recurrence(y)

        def f(z: Tensor) -> Tensor:
            return self.sigma(recur(z) + constant)

        training = torch.is_grad_enabled()
        with torch.no_grad():
            start = self.last if training and self.last is not None else torch.zeros_like(constant)
            way = self.gradient  # forward as backward
            solution = kerneq.solve(
                f, start, way.solver, tol=way.tol, max_steps=way.max_steps, check_every=way.check_every
            )
        z = solution.value
        if training:
            self.last = z if self.warm else None
            z = self.gradient.attach(f, Point(z)).z
        prediction = self.readout(z, y)
        return torch.relu(prediction) if self.rectified else prediction, solution

    def error(self, y: Tensor, target: Tensor) -> Tensor:
        """Mean squared error of each model, (models,)."""
        return squared_error(self(y)[0], target)


@final
class DenseBank(AbstractBank):
    """Fully connected, with biases; y is (models, batch, n). A solve's samples are the models: one residual a batch.

    On a GPU `error` is one Triton program a model and 64 rows (`dense_triton.py`), for tanh and a width of 128 at most.
    """

    def __init__(
        self, weights: Sequence[Tensor], activation: Activation, iteration: Iteration, *, warm: bool = False
    ) -> None:
        super().__init__(weights, activation, iteration, warm=warm)
        self.b = nn.Parameter(torch.zeros_like(self.W1[:, :1, :]))
        self.c = nn.Parameter(self.V1.new_zeros(self.models, 1, self.V1.shape[1]))

    def drive(self, y: Tensor) -> Tensor:
        return torch.baddbmm(self.b, y, self.W2.mT)

    def recurrence(self, y: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda z: torch.bmm(z, self.W1.mT)

    def readout(self, z: Tensor, y: Tensor) -> Tensor:
        return torch.baddbmm(self.c, z, self.V1.mT) + torch.bmm(y, self.V2.mT)

    def error(self, y: Tensor, target: Tensor) -> Tensor:
        if not runs_triton(y, (torch.float32,)) or self.sigma is not torch.tanh or y.shape[-1] > 128:
            return super().error(y, target)
        from dense_triton import errors

        training = torch.is_grad_enabled()
        weights = (self.W1, self.W2, self.V1, self.V2, self.b, self.c)
        found, z = errors(weights, y, target, self.last if training else None, self.iteration)
        if training:
            self.last = z if self.warm else None
        return found


@final
class ConvBank(AbstractBank):
    """Convolutional without biases, filters (models, c, c, k, k); y is (batch, c, h, w), the same for all models.

    A grouped convolution with three channels a group wastes most of any machine. Here a row of the output is a matrix
    product of the k rows of the input around it with a banded matrix (k·c·w, c·w): more arithmetic, but one batched
    matrix product for all models and rows. States are (models · batch, h, c · w). On a GPU `error` is one Triton
    program a model and picture (`conv_triton.py`), for three channels and pictures of 8, 16 or 32 pixels.
    """

    def error(self, y: Tensor, target: Tensor) -> Tensor:
        if runs_triton(y, (torch.float32,)):
            from conv_triton import errors, fits

            if fits(y, self.W1) and self.sigma is torch.relu:
                weights, same = (self.W1, self.W2, self.V1, self.V2), target[0]  # for every model
                return errors(weights, y, same, self.iteration, self.rectified)
        return super().error(y, target)

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
    """Mean squared error of each model over all batches, which are of one size but for the last."""
    total, count = torch.zeros(bank.models, device=bank.W1.device), 0
    for y, target in batches:
        total = total + bank.error(y, target) * target.shape[1]
        count += target.shape[1]
    return total / count


@contextlib.contextmanager
def tensor_cores(device: torch.device) -> Iterator[None]:
    """Matrix products of float32 in TF32 on a GPU: a thousandth of their gradients' size is less than Adam's noise."""
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@final
@dataclasses.dataclass(frozen=True)
class Held:
    """Weights that some models keep as they are for some epochs."""

    models: Tensor  # (models,), bool
    weights: tuple[str, ...]  # by their names in the bank
    epochs: float = math.inf


def train(
    bank: AbstractBank,
    training: Batches,
    testing: Callable[[], Iterable[tuple[Tensor, Tensor]]],
    *,
    looks: Collection[int],
    lr: float,
    anneal_steps: int = 0,
    held: Sequence[Held] = (),
    report: Callable[[int, Tensor | None], None] = lambda epoch, errors: None,
    saved: Checkpoints = UNSAVED,
    name: str = "bank",
) -> Tensor:
    """Train the models and measure their test errors after each number of epochs in `looks`; the largest ends it.

    Returns (looks, models). With `anneal_steps` > 0 the rate falls as a cosine to lr/1000 over so many steps. A killed
    training resumes from the state that was `saved` under its `name`.
    """
    optimizer = torch.optim.Adam(bank.parameters(), lr=lr, fused=bank.W1.is_cuda)
    schedule: LRScheduler
    if anneal_steps:
        schedule = CosineAnnealingLR(optimizer, anneal_steps, eta_min=lr / 1000)
    else:
        schedule = LambdaLR(optimizer, lambda step: 1.0)
    learning = {"bank": bank, "optimizer": optimizer, "schedule": schedule}
    first, history = 0, []
    state = saved.load(name)
    if state is not None:
        for part, learner in learning.items():
            learner.load_state_dict(state[part])
        first, history = state["epoch"], [errors.to(bank.W1.device) for errors in state["history"]]
    for epoch in range(first, max(looks) + 1):
        if epoch in looks:
            history.append(test_error(bank, testing()))
        report(epoch, history[-1] if epoch in looks else None)
        if epoch == max(looks):
            break
        for y, target in training(epoch):
            optimizer.zero_grad(set_to_none=True)
            with tensor_cores(y.device):
                bank.error(y, target).sum().backward()
            for hold in held:
                for weight in map(bank.get_parameter, hold.weights if epoch < hold.epochs else ()):
                    assert weight.grad is not None
                    weight.grad[hold.models] = 0.0
            optimizer.step()
            schedule.step()
        if saved.due():
            states = {part: learner.state_dict() for part, learner in learning.items()}
            saved.save(name, {"epoch": epoch + 1, "history": history, **states})
    return torch.stack(history).cpu()


def in_parts(
    seeds: int, per: int, saved: Checkpoints, measure: Callable[[range, str], dict[str, Tensor]]
) -> list[dict[str, Tensor]]:
    """Measure `per` seeds at a time; a finished part is read from `saved` instead.

    `measure` takes the seeds and the name under which it may save unfinished work.
    """
    parts = []
    for first in range(0, seeds, per):
        part = range(first, min(first + per, seeds))
        name = f"seeds-{part.start}-{part.stop}"
        found = saved.load(name)
        if found is None:
            found = measure(part, f"bank-{name}")
            saved.save(name, found)
            saved.drop(f"bank-{name}")
        parts.append(found)
    return parts


def plain(values: Tensor) -> list:
    """Numbers of five digits for JSON, which has no NaN: a model that failed becomes null."""
    if values.ndim > 1:
        return [plain(row) for row in values]
    return [float(f"{v:.5g}") if math.isfinite(v) else None for v in values.tolist()]
