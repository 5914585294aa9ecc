"""Training a bank: summed losses, one Adam, the test loss of every model after every epoch."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from kerneq.gradients import Implicit
from kerneq.kglm.bank import AbstractBank
from kerneq.solvers import Picard

Batches = Callable[[int], Iterable[tuple[Tensor, Tensor]]]  # epoch ↦ (input, target) pairs


def backward(relaxation: float, tol: float, max_steps: int) -> Implicit:
    """The implicit gradient, solved as the forward pass is; a model that fails must not stop the others."""
    return Implicit(Picard(relaxation), tol=tol, max_steps=max_steps, on_failure="return")


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
            squared_error(bank(y)[0], target).sum().backward()  # type: ignore[no-untyped-call]
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


def plain(values: Tensor) -> list:
    """Numbers for JSON, which has no NaN: a model that failed becomes null."""
    return [plain(row) for row in values] if values.ndim > 1 else [v if v == v else None for v in values.tolist()]
