"""What solvers make of their iterates: the residual of z, and the mixture of the last images with the least gap."""

import dataclasses
from typing import Protocol, Self, final

import torch
from torch import Tensor

from ..tensors import is_channels_last, per_sample_norm, working_dtype
from .device import runs_triton

_MOST = 16  # entries the kernels hold in registers


class PointAndImage(Protocol):
    """What one evaluation of f tells: z, f(z) and f(z) − z, (batch, ...) each."""

    @property
    def z(self) -> Tensor: ...
    @property
    def image(self) -> Tensor: ...
    @property
    def gap(self) -> Tensor: ...


def relative_residual(at: PointAndImage) -> tuple[Tensor, Tensor]:
    """‖f(z) − z‖ / ‖f(z)‖ and ‖f(z) − z‖ of each sample, (batch,), in float32 at least.

    The one definition of the residual: how far a point is from an equilibrium.
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
    return gap / size.clamp_min(limits.tiny), gap


def flat(z: Tensor, last: bool) -> Tensor:
    """(batch, numbers), in the order of channels-last storage or not: a view where z is stored that way."""
    return (z.permute(0, 2, 3, 1) if last else z).reshape(len(z), -1)


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
class History:
    """Ring buffers of m entries a sample. A new entry costs one row of the Gram matrix, not the whole of it.

    The buffers are written in place: a solve owns its history.
    """

    images: Tensor  # (batch, m, numbers)
    gaps: Tensor  # (batch, m, numbers)
    gram: Tensor  # (batch, m, m): ⟨gapᵢ, gapⱼ⟩, float32 at least
    valid: Tensor  # (batch, m): the entries that count
    relaxation: Tensor | None = None  # β, a number: what is mixed are z + β(image − z); None: the images, β = 1
    pushed: int = 0
    last: bool = False  # the numbers stand in channels-last order, as the first image did

    @classmethod
    def empty(cls, z: Tensor, memory: int, relaxation: Tensor | None = None) -> Self:
        """Room for `memory` entries of states like z, (batch, ...)."""
        batch, numbers = len(z), z[0].numel()
        return cls(
            z.new_empty(batch, memory, numbers),
            z.new_empty(batch, memory, numbers),
            z.new_zeros(batch, memory, memory, dtype=working_dtype(z.dtype)),
            torch.zeros(batch, memory, dtype=torch.bool, device=z.device),
            relaxation,
        )

    @property
    def newest(self) -> int:
        """The slot of the last entry."""
        return (self.pushed - 1) % self.valid.shape[1]

    @property
    def before(self) -> int:
        """The slot of the entry before it; its own where there is none."""
        return (self.pushed - 2) % self.valid.shape[1] if self.pushed > 1 else self.newest

    @property
    def filled(self) -> int:
        """The slots ever written."""
        return min(self.pushed, self.valid.shape[1])

    @property
    def square(self) -> Tensor:
        """‖gap‖² of the last entry."""
        return self.gram[:, self.newest, self.newest]

    def extrapolate(
        self, at: PointAndImage, ridge: float, accepted: Tensor | None = None, average: Tensor | None = None
    ) -> tuple[Tensor, Self]:
        """Enter z + β(image − z) with its gap, image − z, in place of the oldest entry; then mix.

        A sample that is not `accepted` forgets all of its entries, this one too, and goes on from the one before: to
        its image or, with an `average` β′, to z + β′(image − z). That takes a memory of two entries at least.
        """
        last = self.last if self.pushed else is_channels_last(at.image)
        entered = dataclasses.replace(self, pushed=self.pushed + 1, last=last)
        ridge = max(ridge, 8 * self.valid.shape[1] * torch.finfo(self.gram.dtype).eps)
        if entered.on_triton:
            from .iterates_triton import extrapolate

            z, image = flat(at.z, last), flat(at.image, last)
            mixture = extrapolate(entered, z.contiguous(), image.contiguous(), ridge, accepted, average)
        else:
            beta = self.relaxation
            image = at.image if beta is None else torch.lerp(at.z, at.image, beta.to(at.image.dtype))
            entered.enter(flat(image, last), flat(at.gap, last), accepted)
            mixture = entered.proposal(ridge, accepted, average)
        return unflat(mixture, at.image, last), entered

    @property
    def on_triton(self) -> bool:
        """Whether the Triton programs do it."""
        return self.images.shape[1] <= _MOST and runs_triton(self.images)

    def enter(self, image: Tensor, gap: Tensor, accepted: Tensor | None) -> None:
        """Write the newest entry: it is counted already."""
        slot, filled = self.newest, self.filled
        self.images[:, slot] = image
        self.gaps[:, slot] = gap
        row = inner(self.gaps[:, :filled], gap)  # slots never written need no product
        self.gram[:, slot, :filled] = row
        self.gram[:, :filled, slot] = row
        self.valid[:, slot] = True
        if accepted is not None:
            self.valid.logical_and_(accepted.unsqueeze(1))

    def weights(self, ridge: float) -> Tensor:
        """α minimising ‖Σ αⱼ gapⱼ‖² with Σ αⱼ = 1, (batch, m).

        Solved on the Gram matrix of unit gaps, plus a ridge relative to it: entries of very different size do not
        spoil its condition, and a sample that is already exact (a zero gap) takes that entry alone.
        """
        size = self.gram.diagonal(dim1=1, dim2=2).clamp_min(torch.finfo(self.gram.dtype).tiny).sqrt()
        size = torch.where(self.valid, size, torch.inf)
        inverse = torch.where(self.valid, size.amin(1, keepdim=True) / size, 0.0)
        unit = self.gram / (size.unsqueeze(1) * size.unsqueeze(2))
        eye = torch.eye(self.valid.shape[1], dtype=unit.dtype, device=unit.device)
        both = self.valid.unsqueeze(1) & self.valid.unsqueeze(2)
        unit = torch.where(both & unit.isfinite(), unit, 0.0) * (1 - eye) + eye * (1 + ridge)
        x = torch.linalg.solve_ex(unit, inverse)[0] if unit.is_cpu else eliminate(unit, inverse)
        y = inverse * x  # stored as `inverse` is: LAPACK's order of x would slow down the mixing
        alpha = y / y.sum(1, keepdim=True)
        newest = torch.zeros_like(alpha)
        newest[:, self.newest] = 1
        return torch.where(alpha.isfinite().all(1, keepdim=True), alpha, newest)

    def proposal(self, ridge: float, accepted: Tensor | None, average: Tensor | None) -> Tensor:
        """The mixture, or the step from the entry before where the newest is not accepted; (batch, numbers)."""
        mixture = self.mix(self.weights(ridge))
        if accepted is None or (accepted.is_cpu and not torch.compiler.is_exporting() and bool(accepted.all())):
            return mixture
        back = self.images[:, self.before]
        if average is not None:
            back = back - (1 - average) * self.gaps[:, self.before]
        return torch.where(accepted.unsqueeze(1), mixture, back)

    def mix(self, alpha: Tensor) -> Tensor:
        """Σ αⱼ imageⱼ, (batch, numbers)."""
        alpha = alpha[:, None, : self.filled].to(self.images.dtype)
        return torch.bmm(alpha, self.images[:, : self.filled]).squeeze(1)
