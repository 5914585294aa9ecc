"""The result of a solve: `Solution`, its `Status`, and the error raised when it is not good enough."""

import dataclasses
import enum
import warnings
from typing import Any, Literal, NoReturn, Self

import torch
from torch import Tensor

from .tensors import check_positive, check_whole, map_tensors

OnFailure = Literal["raise", "warn", "return"]


@dataclasses.dataclass(frozen=True)
class Limits:
    """When a solve ends, and what happens if a sample has not converged by then."""

    tol: float | None  # None: see `tolerance`
    max_steps: int
    check_every: int | None = None  # steps between two residual checks; None: see `kerneq.solve`
    on_failure: OnFailure = "return"

    def tolerance(self, dtype: torch.dtype) -> float:
        """Return `tol`; unless given, 1e-3, or what values of this dtype can reach (fact 7)."""
        return max(1e-3, torch.finfo(dtype).eps) if self.tol is None else self.tol

    def check(self) -> Self:
        """Raise if one of them has no meaning, else return self."""
        if self.tol is not None:
            check_positive("tol", self.tol)
        check_whole("max_steps", self.max_steps)
        if self.check_every is not None:
            check_whole("check_every", self.check_every)
        if self.on_failure not in ("raise", "warn", "return"):
            raise ValueError(f"`on_failure` must be 'raise', 'warn' or 'return', got {self.on_failure!r}.")
        return self


class Status(enum.Enum):
    """How a solve ended, best first; the value is the sentence shown to people. For PRECISION see fact 7."""

    CONVERGED = "The residual fell below the tolerance."
    PRECISION = "The residual stopped falling at the rounding error of the dtype: the tolerance is out of its reach."
    MAX_STEPS = "The step limit was reached before the residual fell below the tolerance."
    BREAKDOWN = "The linear system met a direction of negative curvature: it is not positive definite."
    NONFINITE = "The map gave an infinite or NaN value."

    def __init__(self, sentence: str):
        self.code = len(type(self).__members__)  # the place in this list; per-sample tensors store it


Solve = Literal["cell", "function", "backward"]  # what was solved: the equation of a cell, a function, a gradient

_SOLVES: dict[Solve, tuple[str, dict[Status, str]]] = {
    "cell": (
        "The equilibrium solve",
        {
            Status.PRECISION: "Loosen `tol` or use a wider dtype.",
            Status.MAX_STEPS: "Raise `max_steps`, loosen `tol`, or use the solver `Proximal()`, which cannot diverge "
            "where E is bounded below.",
            Status.NONFINITE: "Check the input and the weights; the last finite iterate is kept, if there was one.",
        },
    ),
    "function": (
        "The fixed-point solve",
        {
            Status.PRECISION: "Loosen `tol` or use a wider dtype.",
            Status.MAX_STEPS: "Raise `max_steps`, loosen `tol`, or make f contract: smaller weights, a smaller "
            "`relaxation` of the solver; `kerneq.spectral_radius(f, z)` should be under 1.",
            Status.NONFINITE: "Check f, its inputs and its weights; the last finite iterate is kept, if there was one.",
        },
    ),
    "backward": (
        "The backward solve",
        {
            Status.PRECISION: "Loosen `tol` of the gradient, `Implicit(tol=…)`, or use a wider dtype.",
            Status.MAX_STEPS: "Raise `max_steps` of the gradient, `Implicit(max_steps=…)`, or loosen its `tol`; where "
            "f expands near z*, tighten the forward `tol` or use the gradient `Phantom()`.",
            Status.BREAKDOWN: "Use `Implicit(solver=Anderson())`, or tighten the forward `tol`.",
            Status.NONFINITE: "Check the gradient that comes from the loss, and f near z*.",
        },
    ),
}


_NOT_A_TENSOR = (
    "The value of a kerneq `Solution` is `layer(x).value`; between modules, `kerneq.Value()` gives it: "
    "`nn.Sequential(layer, kerneq.Value(), nn.ReLU())`."
)


@dataclasses.dataclass(frozen=True, repr=False)
class Solution:
    """The outcome of a solve; every tensor has one entry, or one row, per sample.

    value (batch, ...), or of the structure of the state; residual, steps, codes and error_bound (batch,). Reading
    `status` (or printing) waits for the device; the tensors do not. `on_failure` of a layer or a solve says whether a
    failure also warns or raises.
    """

    value: Tensor  # z*, as well as it was found
    residual: Tensor  # ‖f(z) − z‖ / ‖f(z)‖
    steps: Tensor  # evaluations of f this sample took
    codes: Tensor  # `Status.code` of each sample
    tol: float
    error_bound: Tensor | None = None  # ‖value − z*‖ is at most this, but for rounding; ∞ if μ may be ≤ 0, in train()
    backward: "list[Solution] | None" = None  # the outcome of every backward solve so far, without its value
    trace: "Trace | None" = None  # what happened on the way, where it was asked for

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Explain that a solution is not a tensor, as in `nn.Sequential(layer, nn.ReLU())`."""
        raise TypeError(f"`{getattr(function, '__name__', 'torch')}` needs a tensor. {_NOT_A_TENSOR}")

    def __getattr__(self, name: str) -> NoReturn:
        """Explain, for an attribute that a tensor would have, how to get the tensor."""
        hint = _NOT_A_TENSOR if name in dir(Tensor) and not name.startswith("_") else ""
        raise AttributeError(f"A kerneq `Solution` has no `{name}`. {hint}".strip())

    def _refuse(self, other: Any) -> NoReturn:
        """Refuse what works for tensors, `x + layer(x)`, or for a tuple, `z, info = layer(x)`."""
        raise TypeError(f"A kerneq `Solution` is neither a tensor nor a tuple. {_NOT_A_TENSOR}")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = __getitem__ = _refuse

    @property
    def converged(self) -> Tensor:
        """Whether each sample reached the tolerance, (batch,) of bool."""
        return self.codes == Status.CONVERGED.code

    @property
    def status(self) -> Status:
        """The worst status among the samples."""
        return list(Status)[int(self.codes.max())]

    def detach(self) -> "Solution":
        """Return the same solution without gradients: a start for the next solve that keeps no graph alive."""
        return map_tensors(Tensor.detach, dataclasses.replace(self, backward=None))

    def __str__(self) -> str:
        """The outcome as one sentence, which is also the `repr`."""
        good, total, steps = int(self.converged.sum()), self.codes.numel(), int(self.steps.max())
        return (
            f"{self.status.value} {good} of {total} samples reached tol={self.tol:g}; worst residual "
            f"{float(self.residual.max()):.1e}, {steps} {'step' if steps == 1 else 'steps'} at most."
        )

    __repr__ = __str__  # the numbers of a batch of pictures would fill the screen

    def _repr_html_(self) -> str:
        """The outcome for a notebook: how many samples ended how, and a histogram of their residuals."""
        rows = [(status, int((self.codes == status.code).sum())) for status in Status]
        cells = "".join(f"<tr><td>{count}</td><td>{status.value}</td></tr>" for status, count in rows if count)
        head = f"<tr><th>samples</th><th>of {self.codes.numel()}, tol={self.tol:g}</th></tr>"
        return f"<div><table>{head}{cells}</table>{_draw_residuals(self.residual, self.converged)}</div>"


def _draw_residuals(residual: Tensor, converged: Tensor) -> str:
    """Return a histogram of the finite residuals as SVG: a bar for each decade, samples that failed in orange."""
    finite = residual.isfinite()
    decades = residual[finite].detach().double().clamp_min(1e-16).log10().floor().long().cpu()
    if not len(decades):
        return ""
    low, high = int(decades.min()), int(decades.max())
    good = torch.bincount((decades - low)[converged[finite].cpu()], minlength=high - low + 1).tolist()
    bars = []
    for place, (count, reached) in enumerate(zip(torch.bincount(decades - low).tolist(), good, strict=True)):
        left, middle, unit = 48 * place + 4, 48 * place + 24, 60 / len(decades)
        tall, blue = unit * count, unit * reached
        bars.append(
            f'<rect x="{left}" y="{76 - tall:.1f}" width="40" height="{tall - blue:.1f}" fill="#D55E00"/>'
            f'<rect x="{left}" y="{76 - blue:.1f}" width="40" height="{blue:.1f}" fill="#0072B2"/>'
            f'<text x="{middle}" y="{72 - tall:.1f}">{count or ""}</text>'
            f'<text x="{middle}" y="92">1e{low + place}</text>'
        )
    width, said = 48 * len(bars), f"Histogram of the residuals, from 1e{low} to 1e{high + 1}"
    return (
        f'<svg role="img" aria-label="{said}" width="{width}" height="98" viewBox="0 0 {width} 98" '
        f'font-size="11" text-anchor="middle" fill="currentColor"><title>{said}</title>{"".join(bars)}</svg>'
    )


@dataclasses.dataclass(frozen=True)
class Trace:
    """What a solve went through: a row for each of its steps. Samples that have converged go on with the others.

    residual and energy (steps, batch); the states are those at the steps that were asked for, with the gradient that
    the layer's rule gives them, for a loss on the way (fixed-point correction).
    """

    residual: Tensor  # ‖f(z) − z‖ / ‖f(z)‖
    energy: Tensor | None  # E(z), for the equation of a cell
    states: dict[int, Any]  # (batch, ...), by their step


class NonfiniteInputError(ValueError):
    """An input with infinite or NaN entries reached an equilibrium layer."""


class EquilibriumError(RuntimeError):
    """A solve, forward or backward, that failed under `on_failure="raise"`; its `solution` says how."""

    def __init__(self, solution: Solution, solve: Solve = "cell"):
        name, remedies = _SOLVES[solve]
        super().__init__(f"{name} failed. {solution} {remedies.get(solution.status, '')}".rstrip())
        self.solution = solution


def report_failure(solution: Solution, on_failure: OnFailure, solve: Solve) -> Solution:
    """Return the solution; warn or raise first if a sample did not converge and `on_failure` asks for it."""
    if on_failure == "return" or torch.compiler.is_compiling() or bool(solution.converged.all()):
        return solution
    error = EquilibriumError(solution, solve)
    if on_failure == "raise":
        raise error
    warnings.warn(str(error), RuntimeWarning, stacklevel=3)
    return solution


def final_codes(residual: Tensor, tol: float) -> Tensor:
    """Return the `Status.code` of samples whose solve is over, (batch,): converged, out of steps, or not finite."""
    missed = torch.where(residual.isfinite(), Status.MAX_STEPS.code, Status.NONFINITE.code)
    return torch.where(residual <= tol, Status.CONVERGED.code, missed)
