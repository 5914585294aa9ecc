"""What a solver is: a rule for the next iterate, and the space it iterates in."""

import abc
from typing import Generic, TypeVar

from torch import Tensor

from ..maps import AbstractMap
from ..spaces import AbstractSpace, Evaluation, StateSpace

Memory = TypeVar("Memory")


class AbstractSolver(abc.ABC, Generic[Memory]):
    """A rule z, f(z) ↦ next z, a frozen value. The loop in `solve` calls f once a step, measures, and decides.

    To write one: `init` and `step`. `space` lets it iterate another variable than z; the other two say what may be
    relied on.
    """

    @property
    def steady(self) -> bool:
        """Whether a step is never worse than where it starts: a solve out of steps then returns its last step."""
        return False

    def delays(self, space: AbstractSpace) -> bool:
        """If true, take Picard steps until the first residual check, then replay them to the solver.

        Where f contracts most solves are over by then, and what the solver would have remembered costs nothing.
        """
        return False

    def space(self, f: AbstractMap) -> AbstractSpace:
        """Return what is iterated: by default the state of f."""
        return StateSpace(f)

    @abc.abstractmethod
    def init(self, space: AbstractSpace, z0: Tensor) -> Memory:
        """Return the memory before the first step: None, or a dataclass of tensors whose dimension 0 is the sample."""

    @abc.abstractmethod
    def step(self, space: AbstractSpace, at: Evaluation, memory: Memory) -> tuple[Tensor, Memory]:
        """Return the next iterate and the memory that goes with it; f has been evaluated, and is not called."""
