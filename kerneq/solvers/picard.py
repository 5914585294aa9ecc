"""Relaxed Picard iteration."""

import dataclasses
from typing import final

import torch
from torch import Tensor

from ..tensors import check_share
from .base import AbstractSolver, AbstractSpace, Evaluation


@final
@dataclasses.dataclass(frozen=True)
class Picard(AbstractSolver[None]):
    """z ← (1 − α) z + α f(z).

    Converges when f is a contraction (α = 1), or nonexpansive with a fixed point (α < 1, Krasnoselskii–Mann). One
    evaluation a step and no memory. Where f is not nonexpansive it may oscillate or diverge: use `Proximal`.
    """

    relaxation: float = 1.0  # α

    def __post_init__(self) -> None:
        check_share("relaxation", self.relaxation)

    @property
    def steady(self) -> bool:
        return True

    def init(self, space: AbstractSpace, z0: Tensor) -> None:
        return None

    def step(self, space: AbstractSpace, at: Evaluation, memory: None) -> tuple[Tensor, None]:
        if self.relaxation == 1:
            return at.image, None
        return torch.lerp(at.z, at.image, self.relaxation), None
