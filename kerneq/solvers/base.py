"""What a solver is, and `solve`, which runs any of them, each sample on its own."""

import abc
import dataclasses
import sys
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..equation import Equation
from ..maps import AbstractMap, Map, Point, as_map
from ..solution import OnFailure, Solution, Status, check_limits, report_failure
from ..spaces import AbstractPoint, AbstractSpace, Evaluation, state_space
from ..tensors import check_kind, is_exported
from .loops import CUDA_STRIDE, run_adaptive, run_fixed

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
        return state_space(f)

    @abc.abstractmethod
    def init(self, space: AbstractSpace, z0: Tensor) -> Memory:
        """Return the memory before the first step: None, or a dataclass of tensors whose dimension 0 is the sample."""

    @abc.abstractmethod
    def step(self, space: AbstractSpace, at: Evaluation, memory: Memory) -> tuple[Tensor, Memory]:
        """Return the next iterate and the memory that goes with it; f has been evaluated, and is not called."""


def solve(
    f: Map,
    z0: Tensor | None,
    solver: AbstractSolver[Any],
    *,
    tol: float = 1e-3,
    max_steps: int = 50,
    check_every: int | None = None,
    on_failure: OnFailure = "return",
) -> Solution:
    """Look for z = f(z), each sample on its own, from z0 (batch, ...), with at most `max_steps` evaluations of f.

    A sample stops at the first residual check that finds at most `tol`; its value is the very point whose residual is
    reported. One that runs out of steps returns its best point, moved one step on where the solver is `steady`. The
    residual is checked every `check_every` steps: by default each step on a CPU and every fourth on a GPU, where a
    check waits for the device. With `check_every >= max_steps` nothing waits: a fixed number of steps, fit for
    `torch.export` and CUDA graphs, whose last iterate is the value. For the equation of a cell z0 may be None: z = 0,
    whose evaluation needs no Wz.
    """
    check_kind("solver", solver, AbstractSolver)
    check_limits(tol, max_steps, check_every, on_failure)
    solution, _ = run_untraced(find_point, as_map(f), z0, solver, tol, max_steps, check_every, on_failure)
    return solution


def run_untraced(run: Callable[..., Any], *arguments: Any) -> Any:
    """Return run(*arguments), which no compiler traces: the loop reads residuals, and what is worth compiling is the
    map inside it. (As a decorator, `disable` would import the compiler, seconds, for everybody.)"""
    if torch.compiler.is_compiling():
        run = torch.compiler.disable(run)  # type: ignore[no-untyped-call]
    return run(*arguments)


def find_point(
    f: AbstractMap,
    z0: Tensor | None,
    solver: AbstractSolver[Any],
    tol: float,
    max_steps: int,
    check_every: int | None,
    on_failure: OnFailure,
) -> tuple[Solution, Point]:
    """Solve z = f(z); return the solution, and its value as a `Point` with what the solve has computed there."""
    solution, gap, point = solve_space(solver.space(f), z0, solver, tol, max_steps, check_every)
    if isinstance(f, Equation):
        solution = dataclasses.replace(solution, error_bound=f.error_bound(gap))
    return report_failure(solution, on_failure), point if isinstance(point, Point) else Point(solution.value)


def solve_space(
    space: AbstractSpace,
    z0: Tensor | None,
    solver: AbstractSolver[Any],
    tol: float,
    max_steps: int,
    check_every: int | None,
) -> tuple[Solution, Tensor, AbstractPoint | None]:
    """Let the solver iterate in this space; return the solution, ‖f(z) − z‖ of each sample, and what is known of its
    value."""
    with torch.no_grad():
        at = space.start(z0)
        stride = check_stride(check_every, at.image)
        checks = stride < max_steps
        end = (
            run_adaptive(space, at, solver, tol, max_steps, stride)
            if checks
            else run_fixed(space, at, solver, tol, max_steps)
        )
        value, point = end.value, end.point
        if value is z0:  # converged where it started: the caller may write there again
            value, point = z0.detach().clone(), None
        # A value that is known as a whole was measured exactly; else a failed sample has the residual of another step.
        if checks and point is None and bool((missed := end.codes != Status.CONVERGED.code).any()):
            exact = space.remeasure(value)
            for column, found in () if exact is None else ((end.residual, exact.residual), (end.gap, exact.gap)):
                column[missed] = found.to(column)[missed]
    if torch.is_autocast_enabled(value.device.type):
        torch.clear_autocast_cache()  # PyTorch 2.6 would keep casts made without a graph for whatever runs next
    pairs = ((end.gap, end.residual), (end.steps, end.codes))
    if end.gap.device != value.device:  # two transfers, not four
        pairs = tuple(torch.stack(pair).to(value.device).unbind() for pair in pairs)  # type: ignore[assignment]
    (gap, residual), (steps, codes) = pairs
    return Solution(value, residual, steps, codes, tol), gap, point


def check_stride(check_every: int | None, z: Tensor) -> int:
    """Return the steps between two residual checks; unless given, each step, or every fourth where a check waits for
    the device. An export has nothing to check."""
    if is_exported():
        return sys.maxsize
    return check_every or (CUDA_STRIDE if z.is_cuda else 1)
