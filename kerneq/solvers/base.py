"""What a solver is: a rule for the next iterate, given one evaluation at this one."""

import abc
import dataclasses
import sys
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..equation import AbstractEquation, Evaluation
from ..solution import check_whole, take_samples

Memory = TypeVar("Memory")
CUDA_STRIDE = 4  # steps between two looks at the residual on a GPU: each look waits for the device
NEVER = sys.maxsize
Map = Callable[[Tensor], Tensor]  # any function of a batch of states; an `AbstractMap` can do more


class AbstractSolver(abc.ABC, Generic[Memory]):
    """A rule z, f(z) ↦ next z. The loop in `solve` calls f once a step, measures, and decides when to stop.

    `steady`: a step is never worse than the point it starts from, so a solve that runs out of steps returns the
    last step, not the last point measured. `needs_drive`: the rule looks at d(z).
    `needs_energy`: the rule looks at E, and E decides what is best.
    """

    @property
    @abc.abstractmethod
    def steady(self) -> bool: ...

    @property
    @abc.abstractmethod
    def needs_drive(self) -> bool: ...

    @property
    @abc.abstractmethod
    def needs_energy(self) -> bool: ...

    @abc.abstractmethod
    def init(self, f: Map, z0: Tensor) -> Memory:
        """The memory before the first step: None, or a dataclass of tensors whose dimension 0 is the sample."""

    @abc.abstractmethod
    def step(self, at: Evaluation, memory: Memory) -> tuple[Tensor, Memory]:
        """The next iterate and the memory that goes with it."""


def evaluate(f: Map, z: Tensor, solver: AbstractSolver[Any]) -> Evaluation:
    """One evaluation of f at z, with the drive and the energy where f has them and the solver wants them."""
    if isinstance(f, AbstractEquation):
        return f.evaluate(z, solver.needs_drive, solver.needs_energy)
    return Evaluation(z, f(z))


def looks(check_every: int | None, z: Tensor) -> int:
    """Steps between two looks at the residual; unless said, each step, or every fourth where a look waits.

    An export has nothing to look at.
    """
    if torch.compiler.is_exporting():
        return NEVER
    if check_every is None:
        return CUDA_STRIDE if z.is_cuda else 1
    check_whole("check_every", check_every)
    return check_every


def restrict(part: Any, index: Tensor) -> Any:
    """A solver's memory for the samples in `index` only: the rows of every per-sample tensor in it."""
    if isinstance(part, Tensor):
        return take_samples(part, index) if part.dim() > 0 else part
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        fields = {field.name: restrict(getattr(part, field.name), index) for field in dataclasses.fields(part)}
        return dataclasses.replace(part, **fields)
    return part


def check_start(z0: Tensor) -> None:
    """Refuse a start no solver can work from."""
    if not isinstance(z0, Tensor):
        raise TypeError(f"`z0` must be a tensor (batch, ...), got {type(z0).__name__}.")
    if z0.dim() == 0 or len(z0) == 0 or not z0.is_floating_point():
        raise ValueError(
            f"`z0` must be a floating-point tensor whose first dimension is the batch, of one sample at least, "
            f"got dtype {z0.dtype} and shape {tuple(z0.shape)}."
        )


def check_image(z: Tensor, image: Tensor) -> None:
    """Refuse a map that does not keep the shape of its argument."""
    if not isinstance(image, Tensor) or image.shape != z.shape:
        got = tuple(image.shape) if isinstance(image, Tensor) else type(image).__name__
        raise ValueError(f"f must keep the shape of z: it got {tuple(z.shape)} and gave {got}.")


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the small per-sample systems: float32, or float64 for a float64 state."""
    return torch.promote_types(dtype, torch.float32)
