"""What came back from a solve: `Solution`, its `Status`, and the error raised when it is not good enough."""

import dataclasses
import enum
import warnings
from typing import Literal

import torch
from torch import Tensor

OnFailure = Literal["raise", "warn", "return"]


class Status(enum.Enum):
    """How a solve ended, best first; the value is the sentence shown to people."""

    CONVERGED = "The residual fell below the tolerance."
    PRECISION = "The residual stopped falling at the rounding error of the dtype: the tolerance is out of its reach."
    MAX_STEPS = "The step limit was reached before the residual fell below the tolerance."
    BREAKDOWN = "The linear system met a direction of negative curvature: it is not positive definite."
    NONFINITE = "The map gave an infinite or NaN value."

    @property
    def code(self) -> int:
        """The place in the list above: how a per-sample tensor stores a status."""
        return list(Status).index(self)


_REMEDY = {
    Status.CONVERGED: "",
    Status.PRECISION: " Loosen `tol` or use a wider dtype.",
    Status.MAX_STEPS: " Raise `max_steps`, loosen `tol`, or use `Proximal`, which cannot diverge.",
    Status.BREAKDOWN: " Use `Implicit(solver=Anderson())`, or tighten the forward `tol`.",
    Status.NONFINITE: " Check the input and the weights; the last finite iterate is kept.",
}


@dataclasses.dataclass(frozen=True)
class Solution:
    """The outcome of a solve; every tensor has one entry, or one row, per sample.

    Reading `status` (or printing) waits for the device; the tensors do not.
    """

    value: Tensor  # z*, as well as it was found
    residual: Tensor  # ‖f(z) − z‖ / ‖f(z)‖
    steps: Tensor  # evaluations of f this sample took
    codes: Tensor  # `Status.code` of each sample
    tol: float
    error_bound: Tensor | None = None  # ‖value − z*‖ is at most this, where the problem is strongly convex

    @property
    def converged(self) -> Tensor:
        return self.codes == Status.CONVERGED.code

    @property
    def status(self) -> Status:
        """The worst status among the samples."""
        return list(Status)[int(self.codes.max())]

    def __str__(self) -> str:
        good, total = int(self.converged.sum()), self.codes.numel()
        return (
            f"{self.status.value} {good} of {total} samples reached tol={self.tol:g}; worst residual "
            f"{float(self.residual.max()):.1e}, {int(self.steps.max())} steps at most."
        )


class EquilibriumError(RuntimeError):
    """A solve that failed, forward or backward, and was asked to be loud about it."""

    def __init__(self, solution: Solution, where: str = "The equilibrium solve"):
        super().__init__(f"{where} failed. {solution}{_REMEDY[solution.status]}")
        self.solution = solution


def settle(solution: Solution, on_failure: OnFailure, where: str = "The equilibrium solve") -> Solution:
    """Return the solution, or warn or raise if a sample did not converge, as the caller chose."""
    if on_failure == "return" or bool(solution.converged.all()):
        return solution
    error = EquilibriumError(solution, where)
    if on_failure == "raise":
        raise error
    warnings.warn(str(error), RuntimeWarning, stacklevel=3)
    return solution


def check_on_failure(on_failure: str) -> None:
    if on_failure not in ("raise", "warn", "return"):
        raise ValueError(f"`on_failure` must be 'raise', 'warn' or 'return', got {on_failure!r}.")


def check_limits(tol: float, max_steps: int) -> None:
    """Refuse a tolerance or a step limit that means nothing."""
    check_positive("tol", tol)
    check_whole("max_steps", max_steps)


def check_positive(name: str, value: float) -> None:
    """Refuse what is not a positive, finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"`{name}` must be positive and finite, got {value!r}.")


def check_whole(name: str, value: int, least: int = 1) -> None:
    """Refuse what is not a whole number, or too small."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"`{name}` must be a whole number, at least {least}, got {value!r}.")


def per_sample_norm(t: Tensor) -> Tensor:
    """‖t‖₂ of each sample, accumulated in float32 at least."""
    dims = tuple(range(1, t.dim()))
    dtype = torch.promote_types(t.dtype, torch.float32)
    return torch.linalg.vector_norm(t, dim=dims, dtype=dtype) if dims else t.abs().to(dtype)


def per_sample(t: Tensor, like: Tensor) -> Tensor:
    """View a tensor of one number per sample so that it broadcasts against `like`."""
    return t.view(-1, *[1] * (like.dim() - 1))


def take_samples(t: Tensor, index: Tensor) -> Tensor:
    """The samples in `index`, stored as t is; `index_select` alone would forget channels-last."""
    if t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last):
        return t.permute(0, 2, 3, 1).index_select(0, index).permute(0, 3, 1, 2)
    return t.index_select(0, index)
