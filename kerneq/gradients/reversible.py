"""The exact gradient of a solve's own steps, with memory that does not grow with them (McCallum et al., 2025)."""

import dataclasses
import warnings
from typing import Any, final

import torch
from torch import Tensor

from ..equation import Equation
from ..maps import AbstractMap, Map, Point, as_map
from ..solvers.base import AbstractSolver, AbstractSpace, Evaluation
from ..tensors import check_share, check_whole, per_sample_norm
from .base import AbstractSteps, find_leaves

LOST = 1e-3  # of the size of the state: how far from z = 0 the steps back may end
ONCE = "`Reversible` can be differentiated once only; for second derivatives use `Unrolled` or `Implicit`."


@final
@dataclasses.dataclass(frozen=True)
class Before:
    """The memory of `Leapfrog`: the iterate before the present one."""

    z: Tensor


@final
@dataclasses.dataclass(frozen=True)
class Leapfrog(AbstractSolver[Before]):
    """zₖ₊₁ = (1 − β) zₖ₋₁ + β f(zₖ), which can be run backward: zₖ₋₁ = (zₖ₊₁ − β f(zₖ)) / (1 − β)."""

    relaxation: float  # β

    @property
    def steady(self) -> bool:
        return True

    def init(self, space: AbstractSpace, z0: Tensor) -> Before:
        return Before(z0)

    def step(self, space: AbstractSpace, at: Evaluation, memory: Before) -> tuple[Tensor, Before]:
        return torch.lerp(memory.z.to(at.image.dtype), at.image, self.relaxation), Before(at.z)


@final
@dataclasses.dataclass(frozen=True)
class Reversible(AbstractSteps):
    """`steps` steps zₖ₊₁ = (1 − β) zₖ₋₁ + β f(zₖ) from z = 0, and their exact gradient, whatever their residual.

    The steps are the value of a layer, in the place of its solver. The backward pass makes them again from the last
    two, so it keeps two states however many steps there are, and costs one evaluation of f with its gradient a step.
    Both passes add up in float64, as the steps back multiply rounding errors by 1 / (1 − β) every second step; where
    they do not end near z = 0 again, the gradient is wrong and a warning says so. f must give the same numbers for the
    same z (see `FixedRandomness`). It converges where z ← (1 − β) z + β f(z) does and the contraction of f is small
    enough. (RevDEQ: McCallum, Arora, Foster, 2025.)
    """

    steps: int = 10
    relaxation: float = 0.8  # β

    def __post_init__(self) -> None:
        check_whole("steps", self.steps)
        check_share("relaxation", self.relaxation)
        if self.relaxation == 1:
            raise ValueError("`relaxation` must be less than 1: a step of 1 forgets where it came from.")

    def choose_solver(self, f: AbstractMap) -> AbstractSolver[Any]:
        return Leapfrog(self.relaxation)

    def attach(self, f: Map, at: Point) -> Point:
        f, zero = as_map(f), torch.zeros_like(at.z)
        with torch.enable_grad():
            tensors = f.tensors() if isinstance(f, Equation) else tuple(find_leaves(f(zero)))
        return Point(_Steps.apply(zero, self, f, *tensors), backward=at.backward)  # type: ignore[no-untyped-call]


class _Steps(torch.autograd.Function):
    """Forward: the last state. Backward: the states again, last to first, each with its share of the gradient."""

    @staticmethod
    def forward(ctx: Any, zero: Tensor, rule: Reversible, f: AbstractMap, *tensors: Tensor) -> Tensor:
        beta, before = rule.relaxation, zero.double()
        z = before
        for _ in range(rule.steps):
            image = f(z.to(zero.dtype))
            before, z = z, torch.lerp(before, image.double(), beta)
        ctx.rule, ctx.f, ctx.dtype = rule, f, zero.dtype
        kind = zero.device.type
        ctx.autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        ctx.save_for_backward(before, z, *tensors)
        return z.to(image.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        here, after, *tensors = ctx.saved_tensors
        beta, size = ctx.rule.relaxation, per_sample_norm(after)
        wanted = [t for t in tensors if t.requires_grad]
        totals = [torch.zeros_like(t) for t in wanted]
        g_after, g_here = g.double(), torch.zeros_like(here)
        kind, dtype, on = ctx.autocast
        for _ in range(ctx.rule.steps):  # after = (1 − β) before + β f(here)
            with torch.enable_grad(), torch.autocast(kind, dtype, enabled=on):
                z = here.to(ctx.dtype).requires_grad_()
                image = ctx.f(z)
            pulled, *shares = torch.autograd.grad(
                image, [z, *wanted], (beta * g_after).to(image.dtype), retain_graph=True, materialize_grads=True
            )
            for total, share in zip(totals, shares, strict=True):
                total += share
            after, here = here, (after - beta * image.double()) / (1 - beta)
            g_after, g_here = g_here + pulled.double(), (1 - beta) * g_after
        if bool((per_sample_norm(here) > LOST * size).any()):
            warnings.warn(
                f"The gradient of `Reversible` is wrong: {ctx.rule.steps} steps back lost too many digits. Use fewer "
                "`steps` or a smaller `relaxation`; f must also give the same numbers for the same z.",
                RuntimeWarning,
                stacklevel=2,
            )
        found = iter(totals)
        return None, None, None, *[next(found) if t.requires_grad else None for t in tensors]
