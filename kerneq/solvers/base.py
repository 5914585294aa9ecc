"""The contract of a solver, a rule for the next iterate, and of a space, which is what a solver iterates.

Mostly that is the state z of a map (`StateSpace`); it may be another variable whose fixed points give the same states.
Every space measures the residual of z in f.
"""

import abc
import dataclasses
from typing import Generic, Protocol, Self, TypeVar, final

import torch
from torch import Tensor

from ..equation import Energy, Equation
from ..fused.device import runs_triton
from ..kernels.base import Slope
from ..maps import AbstractMap, Function, Point, linearise
from ..structure import Packed
from ..tensors import cached, forget_casts, is_channels_last, per_sample_norm, version

Memory = TypeVar("Memory")
REWRITTEN = (  # f(z) − z would be 0 wherever z is
    "f must not change z in place, nor return memory that it returned before: write z * 0.5 and z + 1, not z.mul_(0.5) "
    "and z += 1, and return a copy of a buffer of f's own."
)


def relative_residual(z: Tensor, image: Tensor, gap: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return ‖f(z) − z‖ / ‖f(z)‖ and ‖f(z) − z‖ of each sample, (batch,), in float32 at least.

    This is the one definition of the residual: how far a point is from an equilibrium. `gap` is f(z) − z where it is
    known. The residual is infinite where ‖f(z)‖ is: an iterate that diverges must not look converged once its square
    overflows.
    """
    alike = z.stride() == image.stride() and z.dtype == image.dtype
    if image.is_cuda and alike and (image.is_contiguous() or is_channels_last(image)) and runs_triton(image):
        from ..fused.history_triton import residual_and_gap

        return residual_and_gap(z, image)
    distance, size = per_sample_norm(image - z if gap is None else gap), per_sample_norm(image)
    limits = torch.finfo(size.dtype)
    size = torch.maximum(size, limits.eps * distance)  # f(z) = 0 at z ≠ 0 is far away, but not infinitely far
    return torch.where(size.isinf(), size, distance / size.clamp_min(limits.tiny)), distance


class AbstractPoint(Protocol):
    """A state with what is known there: a `Point` of a map, or an `AdjointPoint` of an adjoint system."""

    @property
    def z(self) -> Tensor: ...


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One evaluation of the iterated map: what a solver sees at a step."""

    z: Tensor  # the iterate
    image: Tensor  # what the iterated map makes of it
    point: AbstractPoint  # the state that stands for it, with what is known there
    energy: Energy | None = None  # E, where the space was asked for it
    slope: Slope | None = None  # of S at that state, where it was needed

    @cached
    def gap(self) -> Tensor:
        """image − z, computed once for the residual and for the solver."""
        return self.image - self.z


@dataclasses.dataclass(frozen=True)
class Measurement:
    """How far samples are from their equilibrium, and what decides which of two points is the better one."""

    residual: Tensor  # ‖f(z) − z‖ / ‖f(z)‖
    gap: Tensor  # ‖f(z) − z‖
    point: AbstractPoint  # the state that was measured, with all that is now known of it
    merit: Tensor | None = None  # lower is better; None: the residual
    slack: Tensor | None = None  # a merit higher by no more than this counts as equal


class AbstractSpace(abc.ABC):
    """A variable to iterate, with the map that moves it and the residual of the state it stands for."""

    @property
    def doubtful(self) -> bool:
        """Whether samples may meet in the map: then those that converged apart are measured again as one batch."""
        return False

    @abc.abstractmethod
    def evaluate(self, z: Tensor) -> Evaluation:
        """Evaluate the iterated map at z (batch, ...)."""

    def evaluate_last(self, z: Tensor) -> Evaluation:
        """Evaluate at z, where the solve will probably end: what its gradient needs may be kept."""
        return self.evaluate(z)

    @abc.abstractmethod
    def start(self, z0: Tensor | None) -> Evaluation:
        """Evaluate at the iterate that stands for the state z0; None is z = 0 where the space can make use of it."""

    def measure(self, at: Evaluation, tol: float | None = None) -> Measurement:
        """Measure the residual of the state that was evaluated.

        With a `tol`, only whether it is reached matters, and a space may estimate a residual that is far above it.
        """
        return Measurement(*relative_residual(at.z, at.image, at.gap), at.point)

    def rows(self, index: Tensor) -> Self | None:
        """Return the same space for the samples in `index` only; None where that is not possible."""
        return None

    def remeasure(self, z: Tensor) -> Measurement | None:
        """Measure the state z in f itself; None where `measure` has done no less."""
        return None

    def answer(self, at: Evaluation, following: Tensor) -> Tensor:
        """Return the state that a solve which ends at `at` returns; `following` is where the solver would step to."""
        return following


class AbstractSolver(abc.ABC, Generic[Memory]):
    """A rule z, f(z) ↦ next z, a frozen value. The loop in `solve` calls f once a step, measures, and decides.

    To write one: `init` and `step`. `space` lets it iterate another variable than z; `steady` and `picard_steps` are
    promises that the loop makes use of.
    """

    @property
    def steady(self) -> bool:
        """Whether a step is never worse than where it starts: a solve out of steps then returns its last step."""
        return False

    def picard_steps(self, space: AbstractSpace) -> int | None:
        """If not None, samples take Picard steps first: up to the first residual check, three at most, and after it as
        long as so many more seem to be enough. Then the solver goes on; it sees the steps before, and has lost nothing.

        Where f contracts strongly a solve is over by then, and what the solver would have remembered costs nothing.
        """
        return None

    def space(self, f: AbstractMap) -> AbstractSpace:
        """Return what is iterated: by default the state of f."""
        return StateSpace(f)

    @abc.abstractmethod
    def init(self, space: AbstractSpace, z0: Tensor) -> Memory:
        """Return the memory before the first step: None, or a dataclass of tensors whose dimension 0 is the sample."""

    @abc.abstractmethod
    def step(self, space: AbstractSpace, at: Evaluation, memory: Memory) -> tuple[Tensor, Memory]:
        """Return the next iterate and the memory that goes with it; f has been evaluated, and is not called."""


def check_start(z0: Tensor, f: AbstractMap | None = None) -> None:
    """Refuse a start that no solver of z = f(z) can work from; without f its shape is free."""
    if not isinstance(z0, Tensor):
        raise TypeError(f"`z0` must be a tensor (batch, ...), got {type(z0).__name__}.")
    if z0.dim() == 0 or len(z0) == 0 or not z0.is_floating_point():
        raise ValueError(
            f"`z0` must be a floating-point tensor whose first dimension is the batch, of one sample at least, "
            f"got dtype {z0.dtype} and shape {tuple(z0.shape)}."
        )
    if isinstance(f, Equation) and z0.shape != f.state_shape:
        raise ValueError(f"`z0` must have the shape of the state, {f.state_shape}, got {tuple(z0.shape)}.")


def evaluate_start(space: AbstractSpace, z0: Tensor, f: AbstractMap | None = None) -> Evaluation:
    """Evaluate at z0, check that f leaves it alone and keeps its shape, and convert it to the dtype of f's values."""
    check_start(z0, f)
    before = version(z0)
    at = space.evaluate(z0)
    if version(z0) != before:
        raise ValueError(REWRITTEN)
    if not isinstance(at.image, Tensor) or at.image.shape != z0.shape:
        got = tuple(at.image.shape) if isinstance(at.image, Tensor) else type(at.image).__name__
        raise ValueError(f"f must keep the shape of z: it got {tuple(z0.shape)} and gave {got}.")
    if z0.dtype == at.image.dtype:
        return at
    return move(at, z0.to(at.image.dtype))  # autocast may choose another dtype for f


def move(at: Evaluation, z: Tensor) -> Evaluation:
    """Return the same evaluation with its iterate stored as z: in another dtype or memory layout."""
    point = dataclasses.replace(at.point, z=z) if at.point.z is at.z else at.point  # type: ignore[type-var]
    return dataclasses.replace(at, z=z, point=point)


@final
@dataclasses.dataclass(frozen=True)
class StateSpace(AbstractSpace):
    """Iterates the state of a map itself: z ↦ f(z)."""

    f: AbstractMap
    graph: bool = False  # whether the last evaluation of a function keeps its graph

    @property
    def doubtful(self) -> bool:
        return may_meet(self.f)

    def evaluate(self, z: Tensor) -> Evaluation:
        if isinstance(self.f, Equation):
            v, image = self.f.evaluate(z)[:2]
            return Evaluation(z, image, Point(z, v, image))
        before = version(z)
        image = self.f(z)
        _check_unwritten(z, image, before)
        return Evaluation(z, image, Point(z, None, image))

    def evaluate_last(self, z: Tensor) -> Evaluation:
        if not self.graph:
            return self.evaluate(z)
        forget_casts(z)  # that were made without a graph
        at, before = z.detach(), version(z)
        system = linearise(self.f, at)
        _check_unwritten(at, system.image, before)
        image = system.image.detach()
        return Evaluation(z, image, Point(z, None, image, system=system))

    def start(self, z0: Tensor | None) -> Evaluation:
        if z0 is not None:
            return evaluate_start(self, z0, self.f)
        if not isinstance(self.f, Equation):
            raise TypeError(f"`z0` may be None only for the equation of a cell, got {type(self.f).__name__}.")
        image = self.f.evaluate(None).image
        zero = image.new_zeros(()).expand_as(image)
        return Evaluation(zero, image, Point(zero, None, image))

    def rows(self, index: Tensor) -> Self | None:
        rest = self.f.rows(index)
        return None if rest is None else dataclasses.replace(self, f=rest)


@final
@dataclasses.dataclass(frozen=True)
class PartsSpace(AbstractSpace):
    """Another space, in which the residual of a state (batch, n) is that of its worst part."""

    space: AbstractSpace
    sizes: list[int]  # the numbers of a sample in each part: a tensor of a structured state, or a sample of a batch

    @property
    def doubtful(self) -> bool:
        return self.space.doubtful

    def evaluate(self, z: Tensor) -> Evaluation:
        return self.space.evaluate(z)

    def evaluate_last(self, z: Tensor) -> Evaluation:
        return self.space.evaluate_last(z)

    def start(self, z0: Tensor | None) -> Evaluation:
        return self.space.start(z0)

    def measure(self, at: Evaluation, tol: float | None = None) -> Measurement:
        batch = len(at.z)
        if min(self.sizes) == max(self.sizes):
            parts = [(at.z.reshape(-1, self.sizes[0]), at.image.reshape(-1, self.sizes[0]))]
        else:
            parts = list(
                zip(at.z.split_with_sizes(self.sizes, 1), at.image.split_with_sizes(self.sizes, 1), strict=True)
            )
        residuals = [relative_residual(z.contiguous(), image.contiguous())[0].view(batch, -1) for z, image in parts]
        worst = torch.cat(residuals, 1).amax(1)
        return dataclasses.replace(self.space.measure(at, tol), residual=worst, merit=None, slack=None)

    def rows(self, index: Tensor) -> Self | None:
        rest = self.space.rows(index)
        return None if rest is None else dataclasses.replace(self, space=rest)


def may_meet(f: AbstractMap) -> bool:
    """Whether samples may meet in f: in functions of users, unless there is one sample only."""
    if isinstance(f, Packed):
        return f.structure.batched and may_meet(f.f)
    return isinstance(f, Function) and not f.apart


def _check_unwritten(z: Tensor, image: Tensor, before: int) -> None:
    """Raise if f has written its value into z, which it returned at the step before; `before` is the version of z."""
    if torch.compiler.is_compiling() or not isinstance(image, Tensor) or image.data_ptr() != z.data_ptr():
        return
    if version(z) != before or (image is not z and not image._is_view()):
        raise ValueError(REWRITTEN)


def measure_state(f: AbstractMap, z: Tensor) -> Measurement:
    """Evaluate f at the state z and measure its residual."""
    space = StateSpace(f)
    return space.measure(space.evaluate(z))
