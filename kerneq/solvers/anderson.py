"""Anderson acceleration: the mixture of the last images whose gap is least, and the history it is made from."""

import dataclasses
from typing import Self, final

import torch
from torch import Tensor

from ..equation import Equation
from ..fused.device import runs_triton
from ..tensors import (
    check_nonnegative,
    check_share,
    check_whole,
    is_channels_last,
    working_dtype,
)
from .base import AbstractSolver, AbstractSpace, Evaluation, PartsSpace, StateSpace

SOON = 5  # so few Picard steps more are as good as any others, and cost less
MOST = 16  # entries the Triton programs hold in registers


def anderson_weights(gram: Tensor, newest: int, ridge: float) -> Tensor:
    """Return α minimising ‖Σ αⱼ gapⱼ‖² with Σ αⱼ = 1, (batch, m), given ⟨gapᵢ, gapⱼ⟩, (batch, m, m).

    It is solved on the Gram matrix of unit gaps, plus a ridge relative to it: entries of very different size do not
    spoil its condition, and a sample that is already exact (a zero gap) takes that entry alone. Where no finite α is
    found the entry `newest` has all the weight. On a GPU `fused.history_triton._weigh` does the same: change both.
    """
    size = gram.diagonal(dim1=1, dim2=2).clamp_min(torch.finfo(gram.dtype).tiny).sqrt()
    inverse = size.amin(1, keepdim=True) / size
    unit = (gram / (size.unsqueeze(1) * size.unsqueeze(2))).nan_to_num(0.0, 0.0, 0.0)
    unit.diagonal(dim1=1, dim2=2).fill_(1 + ridge)
    x = torch.linalg.solve_ex(unit, inverse)[0] if unit.is_cpu else eliminate(unit, inverse)
    y = inverse * x  # stored as `inverse` is: LAPACK's order of x would slow down the mixing
    alpha = y / y.sum(1, keepdim=True)
    if _all_known(alpha.isfinite()):
        return alpha
    alone = torch.zeros_like(alpha)
    alone[:, newest] = 1
    return torch.where(alpha.isfinite().all(1, keepdim=True), alpha, alone)


def eliminate(A: Tensor, b: Tensor) -> Tensor:
    """Return A⁻¹b for small positive definite A (batch, m, m), without pivoting.

    By plain operations, for a GPU: the libraries' batched solvers wait for it or cannot be in a CUDA graph.
    """
    A, x, size = A.clone(), b.clone(), A.shape[1]
    for k in range(size - 1):
        factor = A[:, k + 1 :, k] / A[:, k, k, None]
        A[:, k + 1 :, k + 1 :] -= factor.unsqueeze(2) * A[:, k, None, k + 1 :]
        x[:, k + 1 :] -= factor * x[:, k, None]
    for k in reversed(range(size)):
        x[:, k] = (x[:, k] - (A[:, k, k + 1 :] * x[:, k + 1 :]).sum(1)) / A[:, k, k]
    return x


def flatten_sample(z: Tensor, channels_last: bool) -> Tensor:
    """Return (batch, numbers), in the order of channels-last storage or not: a view where z is stored that way."""
    return (z.permute(0, 2, 3, 1) if channels_last else z).reshape(z.shape[0], -1)


def unflatten_sample(numbers: Tensor, like: Tensor, channels_last: bool) -> Tensor:
    """Undo `flatten_sample`: (batch, numbers) in the shape of `like`."""
    if channels_last:
        batch, channels, height, width = like.shape
        return numbers.view(batch, height, width, channels).permute(0, 3, 1, 2)
    return numbers.view(like.shape)


def inner_products(many: Tensor, one: Tensor) -> Tensor:
    """Return ⟨manyⱼ, one⟩ of each sample, (batch, m), for (batch, m, numbers) and (batch, numbers).

    Half precision is multiplied and summed in float32. On a CPU a row times a matrix is several times as fast as a
    matrix times a column.
    """
    if many.dtype in (torch.float32, torch.float64):
        return torch.bmm(one.unsqueeze(1), many.mT).squeeze(1)
    total = torch.zeros(many.shape[:2], dtype=torch.float32, device=many.device)
    size = 2**12 if many.is_cpu else 2**16  # on a CPU what a cache holds, on a GPU few launches
    for part, piece in zip(torch.split(many, size, 2), torch.split(one, size, 1), strict=True):
        total += torch.bmm(piece.float().unsqueeze(1), part.float().mT).squeeze(1)
    return total


@final
@dataclasses.dataclass(frozen=True)
class GapGuard:
    """Accepts an entry by its gap, for a map that does not expand.

    ‖gap‖² may be `rate` times that of the entry before, and anything after a refused one. From a refused entry a sample
    goes on by the averaged step z + β(image − z) from the entry before.
    """

    accepted: Tensor  # (batch,): whether the newest entry was
    average: Tensor  # β, a number
    rate: Tensor  # a number

    def decide(self, history: "History", at: Evaluation) -> tuple[Self, Tensor | None]:
        before = history.before
        accepted = ~self.accepted | (history.square <= self.rate * history.gram[:, before, before])
        guard = dataclasses.replace(self, accepted=accepted)
        if _all_known(accepted):
            return guard, None
        return guard, history.images[:, before] - (1 - self.average) * history.gaps[:, before]

    def program_inputs(self, at: Evaluation) -> tuple[object, ...]:
        return self.average, self.rate, 1.0, self.accepted, None, None, None, 0.0, None

    def after(self, accepted: Tensor, ceiling: Tensor | None) -> Self:
        return dataclasses.replace(self, accepted=accepted)


@final
@dataclasses.dataclass(frozen=True)
class EnergyGuard:
    """Accepts an entry by its energy E, which is no higher at the image than the evaluation says.

    E must lie below U, the `ceiling`, by `fraction` · `rate` · ‖gap‖², and is the next U. From a refused entry a sample
    goes back to the last image, where E ≤ U; from one that is refused after another, by averaged steps, which lower E,
    and therefore U, by `rate` · ‖gap‖².
    """

    accepted: Tensor  # (batch,): whether the newest entry was
    average: Tensor  # β, a number
    rate: Tensor  # a number
    fraction: float
    ceiling: Tensor  # (batch,): U

    def decide(self, history: "History", at: Evaluation) -> tuple[Self, Tensor | None]:
        """Entries hold z + β′(image − z), β′ the relaxation of the history."""
        assert at.energy is not None
        known, square, beta, energy = self.accepted, history.square, history.relaxation, at.energy.value
        accepted = energy + self.fraction * self.rate * square <= self.ceiling + at.energy.slack
        lower = torch.where(known, self.ceiling, self.ceiling - self.rate * square)
        ceiling = torch.where(accepted, torch.minimum(self.ceiling, energy), lower)
        guard = dataclasses.replace(self, accepted=accepted, ceiling=ceiling)
        if _all_known(accepted):
            return guard, None
        image, gap = history.images[:, history.before], history.gaps[:, history.before]
        whole = image if beta is None else image + (1 - beta) * gap
        ahead = (1 if beta is None else beta) - self.average  # what an entry is further on than the averaged step
        averaged = history.images[:, history.newest] - ahead * history.gaps[:, history.newest]
        return guard, torch.where(known.unsqueeze(1), whole, averaged)

    def program_inputs(self, at: Evaluation) -> tuple[object, ...]:
        E = at.energy
        assert E is not None
        parts = (E.similarity, E.length, E.penalty, E.rounding)
        return self.average, self.rate, self.fraction, self.accepted, *parts, self.ceiling

    def after(self, accepted: Tensor, ceiling: Tensor | None) -> Self:
        assert ceiling is not None
        return dataclasses.replace(self, accepted=accepted, ceiling=ceiling)


def _all_known(true: Tensor) -> bool:
    """Whether all entries are true, where that can be read without waiting for a device."""
    return true.is_cpu and not torch.compiler.is_compiling() and bool(true.all())


Guard = GapGuard | EnergyGuard  # decides whether a history accepts its newest entry, sample by sample


@final
@dataclasses.dataclass(frozen=True)
class History:
    """Ring buffers of m entries a sample. A new entry costs one row of the Gram matrix, not the whole of it.

    The buffers are written in place: a solve owns its history.
    """

    images: Tensor  # (batch, m, numbers)
    gaps: Tensor  # (batch, m, numbers)
    gram: Tensor  # (batch, m, m): ⟨gapᵢ, gapⱼ⟩, float32 at least
    relaxation: Tensor | None = None  # β, a number: what is mixed are z + β(image − z); None: the images, β = 1
    guard: Guard | None = None  # with one, two entries at least
    pushed: int = 0
    channels_last: bool = False  # the numbers stand in channels-last order, as the first image did

    @classmethod
    def empty(cls, z: Tensor, memory: int, relaxation: Tensor | None = None, guard: Guard | None = None) -> Self:
        """Allocate `memory` entries of states like z, (batch, ...)."""
        batch, numbers = z.shape[0], z[0].numel()
        return cls(
            z.new_empty(batch, memory, numbers),
            z.new_empty(batch, memory, numbers),
            z.new_zeros(batch, memory, memory, dtype=working_dtype(z.dtype)),
            relaxation,
            guard,
        )

    @property
    def newest(self) -> int:
        """The slot of the last entry."""
        return (self.pushed - 1) % self.gram.shape[1]

    @property
    def before(self) -> int:
        """The slot of the entry before it; its own where there is none."""
        return (self.pushed - 2) % self.gram.shape[1] if self.pushed > 1 else self.newest

    @property
    def filled(self) -> int:
        """How many slots have been written."""
        return min(self.pushed, self.gram.shape[1])

    @property
    def square(self) -> Tensor:
        """‖gap‖² of the last entry, (batch,)."""
        return self.gram[:, self.newest, self.newest]

    def extrapolate(self, at: Evaluation, ridge: float) -> tuple[Tensor, Self]:
        """Enter z + β(image − z) and its gap, image − z, in place of the oldest entry; then mix, as the guard allows.

        Refused entries stay: they tell as much of the map as the others.
        """
        last = self.channels_last if self.pushed else is_channels_last(at.image)
        entered = dataclasses.replace(self, pushed=self.pushed + 1, channels_last=last)
        ridge = max(ridge, 8 * self.gram.shape[1] * torch.finfo(self.gram.dtype).eps)
        if entered.on_triton:
            from ..fused.history_triton import extrapolate

            z, image = flatten_sample(at.z, last), flatten_sample(at.image, last)
            inputs = None if self.guard is None else self.guard.program_inputs(at)
            mixture, *decided = extrapolate(entered, z.contiguous(), image.contiguous(), ridge, inputs)
            guard = None if self.guard is None else self.guard.after(*decided)
        else:
            beta = self.relaxation
            image = at.image if beta is None else torch.lerp(at.z, at.image, beta.to(at.image.dtype))
            entered.enter(flatten_sample(image, last), flatten_sample(at.gap, last))
            mixture, guard = entered.propose(ridge, at)
        return unflatten_sample(mixture, at.image, last), dataclasses.replace(entered, guard=guard)

    @property
    def on_triton(self) -> bool:
        """Whether the Triton programs do it."""
        return self.images.is_cuda and self.images.shape[1] <= MOST and runs_triton(self.images)

    def enter(self, image: Tensor, gap: Tensor) -> None:
        """Write the newest entry, (batch, numbers) each: it is counted already."""
        slot, filled = self.newest, self.filled
        self.images[:, slot] = image
        self.gaps[:, slot] = gap
        row = inner_products(self.gaps[:, :filled], gap)  # slots never written need no product
        self.gram[:, slot, :filled] = row
        self.gram[:, :filled, slot] = row

    def propose(self, ridge: float, at: Evaluation) -> tuple[Tensor, Guard | None]:
        """Return the mixture, or where the guard sends those whose newest entry it refuses, (batch, numbers)."""
        guard, back = (None, None) if self.guard is None else self.guard.decide(self, at)
        filled = self.filled
        alpha = anderson_weights(self.gram[:, :filled, :filled], self.newest, ridge)
        mixture = torch.bmm(alpha[:, None].to(self.images.dtype), self.images[:, :filled]).squeeze(1)
        if guard is None or back is None:
            return mixture, guard
        return torch.where(guard.accepted.unsqueeze(1), mixture, back), guard


@final
@dataclasses.dataclass(frozen=True)
class Anderson(AbstractSolver[History]):
    """z ← Σ αⱼ ((1 − β) zⱼ + β f(zⱼ)), with α minimising ‖Σ αⱼ (f(zⱼ) − zⱼ)‖ and Σ αⱼ = 1 (Walker & Ni, 2011).

    The forward solver of GEQ's Algorithm 1. `anderson_weights` has the formula of α, `History` the mixture.

    Fast where f is smooth near its fixed point, contraction or not; no guarantee where it is not a contraction:
    `Proximal` is the safe form. Memory: 2m states a sample. In a function, samples take Picard steps as long as five
    more of them seem to be enough.
    """

    memory: int = 5  # m
    ridge: float = 1e-10  # relative to the Gram matrix of unit gaps; never below its rounding error
    relaxation: float = 1.0  # β

    def __post_init__(self) -> None:
        check_whole("memory", self.memory)
        check_nonnegative("ridge", self.ridge)
        check_share("relaxation", self.relaxation)

    def picard_steps(self, space: AbstractSpace) -> int | None:
        """For functions, and their gradients; for the equation of a cell it is the papers' algorithm, as written."""
        of_function = isinstance(space, PartsSpace) or (
            isinstance(space, StateSpace) and not isinstance(space.f, Equation)
        )
        return SOON if of_function and self.relaxation == 1 else None

    def init(self, space: AbstractSpace, z0: Tensor) -> History:
        beta = None if self.relaxation == 1 else z0.new_full((), self.relaxation, dtype=working_dtype(z0.dtype))
        return History.empty(z0, self.memory, beta)

    def step(self, space: AbstractSpace, at: Evaluation, memory: History) -> tuple[Tensor, History]:
        return memory.extrapolate(at, self.ridge)
