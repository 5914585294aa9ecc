"""What all models share: logits from pictures, and how their equilibrium layers are solved and differentiated."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..cells import AbstractCell
from ..equilibrium import Equilibrium, layers_of
from ..gradients import AbstractGradient, Implicit
from ..settings import setting
from ..solution import Solution
from ..solvers import AbstractSolver, Anderson, InFeatures, Proximal

# While training, a backward solve that stops at its step limit is a choice, not an accident.
_IMPLICIT = Implicit(InFeatures(Anderson(memory=3)), tol=1e-3, max_steps=20, on_failure="return")


@dataclasses.dataclass(frozen=True)
class AbstractSolveConfig:
    """How every equilibrium layer of a model is solved and differentiated."""

    solver: AbstractSolver[Any] = setting(Proximal(), "how z = f(z) is solved")
    gradient: AbstractGradient = setting(_IMPLICIT, "how the solution is differentiated")
    tol: float = setting(1e-3, "relative residual at which a sample has converged", above=0)
    max_steps: int = setting(30, "evaluations of f in a solve, at most", low=1)
    check_every: int = setting(0, "steps between two residual checks, 0: left to the solve", low=0)

    def make_layer(self, cell: AbstractCell) -> Equilibrium:
        """Return the cell as a layer; an implicit gradient without a `check_every` of its own gets this one."""
        check_every = self.check_every or None
        gradient = self.gradient
        if isinstance(gradient, Implicit) and gradient.check_every is None:
            gradient = dataclasses.replace(gradient, check_every=check_every)
        return Equilibrium(
            cell, solver=self.solver, gradient=gradient, tol=self.tol, max_steps=self.max_steps, check_every=check_every
        )


class AbstractModel(nn.Module, abc.ABC):
    """Pictures x (batch, channels, height, width) ↦ logits (batch, classes). To write one: `classify`.

    `model(x, solutions=True)` also gives the `Solution` of every equilibrium layer, by name. The sides of a picture are
    multiples of `multiple`, or exactly `side`.
    """

    def __init__(self, channels: int, multiple: int = 1, side: int | None = None):
        super().__init__()
        self.channels, self.multiple, self.side = channels, multiple, side

    @abc.abstractmethod
    def classify(self, x: Tensor) -> tuple[Tensor, dict[str, Solution]]:
        """Return the logits and the solutions by name, for pictures whose shape has been checked."""

    def forward(self, x: Tensor, solutions: bool = False) -> Tensor | tuple[Tensor, dict[str, Solution]]:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"The pictures must be a floating-point tensor, got {got}: scale the pixels first.")
        self.check_shape(x.shape)
        logits, found = self.classify(x)
        return (logits, found) if solutions else logits

    def layers(self) -> list[Equilibrium]:
        """Return the equilibrium layers."""
        return layers_of(self)

    def diagnostics(self) -> dict[str, float]:
        """Return the numbers worth following over a training run, from the cells of the layers."""
        return {name: value for layer in self.layers() for name, value in layer.cell.diagnostics().items()}

    def compile_map(self) -> None:
        """Use torch.compile for the map of every layer, where a solve spends its time."""
        for layer in self.layers():
            layer.cell.compile_map()

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise, in one sentence, unless the shape is (batch, channels, height, width) with sides that fit."""
        wanted = f" and sides that are multiples of {self.multiple}" if self.multiple > 1 else ""
        fit = all(side > 0 and side % self.multiple == 0 for side in shape[2:])
        if self.side is not None:
            wanted = f" and sides of {self.side}"
            fit = all(side == self.side for side in shape[2:])
        if len(shape) != 4 or shape[1] != self.channels or not fit:
            wanted = f"pictures (batch, channels, height, width) with {self.channels} channels{wanted}"
            raise ValueError(f"The input must be {wanted}, got {tuple(shape)}.")
