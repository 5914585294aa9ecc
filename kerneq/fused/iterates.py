"""What solvers make of their iterates: the residual of z, and the mixture of the last images with the least gap."""

import dataclasses
from typing import Protocol, Self, final

import torch
from torch import Tensor

from ..tensors import is_channels_last, is_exported, per_sample_norm, working_dtype
from .device import runs_triton

_MOST = 16  # entries the kernels hold in registers


class PointAndImage(Protocol):
    """What one evaluation of f tells: z, f(z) and f(z) − z, (batch, ...) each; E and its parts, (batch,)."""

    @property
    def z(self) -> Tensor: ...
    @property
    def image(self) -> Tensor: ...
    @property
    def gap(self) -> Tensor: ...
    @property
    def similarity(self) -> Tensor | None: ...
    @property
    def length(self) -> Tensor | None: ...
    @property
    def penalty(self) -> Tensor | None: ...
    @property
    def energy(self) -> Tensor | None: ...
    @property
    def rounding(self) -> Tensor | None: ...


def relative_residual(at: PointAndImage) -> tuple[Tensor, Tensor]:
    """‖f(z) − z‖ / ‖f(z)‖ and ‖f(z) − z‖ of each sample, (batch,), in float32 at least.

    The one definition of the residual: how far a point is from an equilibrium. Infinite where ‖f(z)‖ is: what diverges
    is lost as soon as its square overflows, and not at rest.
    """
    z, image = at.z, at.image
    if (
        runs_triton(image)
        and (image.is_contiguous() or is_channels_last(image))  # a sample is one run of numbers
        and z.stride() == image.stride()
        and z.dtype == image.dtype
    ):
        from .iterates_triton import residual_and_gap

        return residual_and_gap(z, image)
    gap, size = per_sample_norm(at.gap), per_sample_norm(image)
    limits = torch.finfo(size.dtype)
    size = torch.maximum(size, limits.eps * gap)  # f(z) = 0 at z ≠ 0 is far away, but nothing infinite
    return torch.where(size.isinf(), size, gap / size.clamp_min(limits.tiny)), gap


def rounding_share(image: Tensor) -> float:
    """Of the terms of an energy: how far their sum may be off by rounding alone."""
    return 16 * torch.finfo(image.dtype).eps


def flat(z: Tensor, last: bool) -> Tensor:
    """(batch, numbers), in the order of channels-last storage or not: a view where z is stored that way."""
    return (z.permute(0, 2, 3, 1) if last else z).reshape(z.shape[0], -1)


def unflat(numbers: Tensor, like: Tensor, last: bool) -> Tensor:
    """The inverse of `flat`, in the shape of `like`."""
    if last:
        batch, channels, height, width = like.shape
        return numbers.view(batch, height, width, channels).permute(0, 3, 1, 2)
    return numbers.view(like.shape)


def inner(many: Tensor, one: Tensor) -> Tensor:
    """⟨manyⱼ, one⟩ per sample, (batch, m); half precision is multiplied and summed in float32."""
    if many.dtype in (torch.float32, torch.float64):
        return torch.bmm(many, one.unsqueeze(2)).squeeze(2)
    total = torch.zeros(many.shape[:2], dtype=torch.float32, device=many.device)
    size = 2**12 if many.is_cpu else 2**16  # on a CPU what a cache holds, on a GPU few launches
    for part, piece in zip(torch.split(many, size, 2), torch.split(one, size, 1), strict=True):
        total += torch.bmm(part.float(), piece.float().unsqueeze(2)).squeeze(2)
    return total


def eliminate(A: Tensor, b: Tensor) -> Tensor:
    """A⁻¹b for small positive definite A (batch, m, m), without pivoting.

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


@final
@dataclasses.dataclass(frozen=True)
class Guard:
    """Which new entries a history accepts, and how it goes on from one that it refuses, sample by sample.

    By the gap, for a map that does not expand: ‖gap‖² may be `rate` times that of the entry before, and anything after
    a refused one. From a refused entry it goes on by the averaged step z + β(image − z) from the entry before.

    By the energy E, which is no higher at the image than the evaluation says: E must lie below U, the `ceiling`, by
    `fraction` · `rate` · ‖gap‖², and is the next U. From a refused entry it goes back to the last image, where E ≤ U;
    from one that is refused after another, by averaged steps, which lower E, and therefore U, by `rate` · ‖gap‖².
    """

    accepted: Tensor  # (batch,): whether the newest entry was
    average: Tensor  # β, a number
    rate: Tensor  # a number
    fraction: float = 1.0
    ceiling: Tensor | None = None  # (batch,): U; None: by the gap

    def decide(self, history: "History", at: PointAndImage) -> tuple["Guard", Tensor | None]:
        """The guard after the newest entry, and where refused samples go on, (batch, numbers); None if there are none.

        Entries hold z + β′(image − z), β′ the relaxation of the history.
        """
        known, square, beta = self.accepted, history.square, history.relaxation
        if self.ceiling is None:
            ceiling = None
            accepted = ~known | (square <= self.rate * history.gram[:, history.before, history.before])
        else:
            assert at.energy is not None and at.rounding is not None
            accepted = at.energy + self.fraction * self.rate * square <= self.ceiling + at.rounding
            lower = torch.where(known, self.ceiling, self.ceiling - self.rate * square)
            ceiling = torch.where(accepted, torch.minimum(self.ceiling, at.energy), lower)
        guard = dataclasses.replace(self, accepted=accepted, ceiling=ceiling)
        if accepted.is_cpu and not is_exported() and bool(accepted.all()):
            return guard, None
        image, gap = history.images[:, history.before], history.gaps[:, history.before]
        if self.ceiling is None:
            return guard, image - (1 - self.average) * gap
        whole = image if beta is None else image + (1 - beta) * gap
        ahead = (1 if beta is None else beta) - self.average  # what an entry is further on than the averaged step
        averaged = history.images[:, history.newest] - ahead * history.gaps[:, history.newest]
        return guard, torch.where(known.unsqueeze(1), whole, averaged)


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
    last: bool = False  # the numbers stand in channels-last order, as the first image did

    @classmethod
    def empty(cls, z: Tensor, memory: int, relaxation: Tensor | None = None, guard: Guard | None = None) -> Self:
        """Room for `memory` entries of states like z, (batch, ...)."""
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
        """The slots ever written."""
        return min(self.pushed, self.gram.shape[1])

    @property
    def square(self) -> Tensor:
        """‖gap‖² of the last entry."""
        return self.gram[:, self.newest, self.newest]

    def extrapolate(self, at: PointAndImage, ridge: float) -> tuple[Tensor, Self]:
        """Enter z + β(image − z) and its gap, image − z, in place of the oldest entry; then mix, as the guard allows.

        Refused entries stay: they tell as much of the map as the others.
        """
        last = self.last if self.pushed else is_channels_last(at.image)
        entered = dataclasses.replace(self, pushed=self.pushed + 1, last=last)
        ridge = max(ridge, 8 * self.gram.shape[1] * torch.finfo(self.gram.dtype).eps)
        if entered.on_triton:
            from .iterates_triton import extrapolate

            z, image = flat(at.z, last), flat(at.image, last)
            mixture, guard = extrapolate(entered, z.contiguous(), image.contiguous(), ridge, at)
        else:
            beta = self.relaxation
            image = at.image if beta is None else torch.lerp(at.z, at.image, beta.to(at.image.dtype))
            entered.enter(flat(image, last), flat(at.gap, last))
            mixture, guard = entered.proposal(ridge, at)
        return unflat(mixture, at.image, last), dataclasses.replace(entered, guard=guard)

    @property
    def on_triton(self) -> bool:
        """Whether the Triton programs do it."""
        return self.images.shape[1] <= _MOST and runs_triton(self.images)

    def enter(self, image: Tensor, gap: Tensor) -> None:
        """Write the newest entry: it is counted already."""
        slot, filled = self.newest, self.filled
        self.images[:, slot] = image
        self.gaps[:, slot] = gap
        row = inner(self.gaps[:, :filled], gap)  # slots never written need no product
        self.gram[:, slot, :filled] = row
        self.gram[:, :filled, slot] = row

    def proposal(self, ridge: float, at: PointAndImage) -> tuple[Tensor, Guard | None]:
        """The mixture, or where the guard sends those whose newest entry it refuses, (batch, numbers)."""
        guard, back = (None, None) if self.guard is None else self.guard.decide(self, at)
        mixture = self.mix(self.weights(ridge))
        if guard is None or back is None:
            return mixture, guard
        return torch.where(guard.accepted.unsqueeze(1), mixture, back), guard

    def weights(self, ridge: float) -> Tensor:
        """α minimising ‖Σ αⱼ gapⱼ‖² with Σ αⱼ = 1, (batch, filled).

        Solved on the Gram matrix of unit gaps, plus a ridge relative to it: entries of very different size do not
        spoil its condition, and a sample that is already exact (a zero gap) takes that entry alone.
        """
        gram = self.gram[:, : self.filled, : self.filled]
        size = gram.diagonal(dim1=1, dim2=2).clamp_min(torch.finfo(gram.dtype).tiny).sqrt()
        inverse = size.amin(1, keepdim=True) / size
        unit = gram / (size.unsqueeze(1) * size.unsqueeze(2))
        eye = torch.eye(self.filled, dtype=unit.dtype, device=unit.device)
        unit = torch.where(unit.isfinite(), unit, 0.0) * (1 - eye) + eye * (1 + ridge)
        x = torch.linalg.solve_ex(unit, inverse)[0] if unit.is_cpu else eliminate(unit, inverse)
        y = inverse * x  # stored as `inverse` is: LAPACK's order of x would slow down the mixing
        alpha = y / y.sum(1, keepdim=True)
        newest = torch.zeros_like(alpha)
        newest[:, self.newest] = 1
        return torch.where(alpha.isfinite().all(1, keepdim=True), alpha, newest)

    def mix(self, alpha: Tensor) -> Tensor:
        """Σ αⱼ imageⱼ, (batch, numbers)."""
        return torch.bmm(alpha[:, None].to(self.images.dtype), self.images[:, : self.filled]).squeeze(1)
