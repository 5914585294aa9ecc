"""Relaxed Picard iteration."""

import dataclasses
from typing import final

import torch
from torch import Tensor

from ..equation import Evaluation
from .base import AbstractSolver, Map


@final
@dataclasses.dataclass(frozen=True)
class Picard(AbstractSolver[None]):
    """z ← (1 − α) z + α f(z).

    Converges when f is a contraction (α = 1), or nonexpansive with a fixed point (α < 1, Krasnoselskii–Mann). One
    evaluation a step and no memory. Where f is not nonexpansive it may oscillate or diverge: use `Proximal`.
    """

    relaxation: float = 1.0  # α

    def __post_init__(self) -> None:
        if not 0 < self.relaxation <= 1:
            raise ValueError(f"`relaxation` must lie in (0, 1], got {self.relaxation}.")

    @property
    def steady(self) -> bool:
        return True

    @property
    def needs_drive(self) -> bool:
        return False

    @property
    def needs_energy(self) -> bool:
        return False

    def init(self, f: Map, z0: Tensor) -> None:
        return None

    def step(self, at: Evaluation, memory: None) -> tuple[Tensor, None]:
        if self.relaxation == 1:
            return at.image, None
        return torch.lerp(at.z, at.image, self.relaxation), None
