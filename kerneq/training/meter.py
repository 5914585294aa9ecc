"""Running sums of what a run measures, kept on the device so that no step waits for it."""

import dataclasses
from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from kerneq.solution import Solution


@dataclasses.dataclass(frozen=True)
class Scores:
    """Means over the images seen; the solver's, over every sample of every solve (None: no equilibrium)."""

    images: int
    loss: float
    accuracy: float
    steps: float | None
    residual: float | None
    unconverged: float | None


@final
class Meter:
    """Sums of (images, loss, correct, solves, solver steps, residual, unconverged) in one device tensor."""

    def __init__(self, device: torch.device):
        self.sums = torch.zeros(7, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, loss: Tensor, logits: Tensor, target: Tensor, solutions: Mapping[str, Solution]) -> None:
        """Count a batch: its mean loss, its predictions, and how its solves went."""
        labels = target if target.dim() == 1 else target.argmax(1)
        images = labels.new_full((), len(labels))
        batch = [images, loss * len(labels), (logits.argmax(1) == labels).sum()]
        solves = list(solutions.values())
        if solves:
            steps = torch.stack([s.steps.sum() for s in solves]).sum()
            residual = torch.stack([s.residual.sum() for s in solves]).sum()
            missed = torch.stack([(~s.converged).sum() for s in solves]).sum()
            batch += [images * len(solves), steps, residual, missed]
        else:
            batch += [torch.zeros_like(images)] * 4
        self.sums += torch.stack([value.to(self.sums) for value in batch])

    def reset(self) -> None:
        self.sums.zero_()

    def read(self, sums: Tensor | None = None) -> Scores:
        """The means so far (or of `sums`, added up over processes); waits for the device."""
        images, loss, correct, solves, steps, residual, missed = (self.sums if sums is None else sums).tolist()
        counted = max(images, 1)
        return Scores(
            images=int(images),
            loss=loss / counted,
            accuracy=correct / counted,
            steps=steps / solves if solves else None,
            residual=residual / solves if solves else None,
            unconverged=missed / solves if solves else None,
        )
