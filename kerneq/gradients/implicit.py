"""Implicit gradient: differentiate z* = f(z*) itself, not the iterations that found it."""

import dataclasses
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from ..equation import AbstractEquation
from ..solution import OnFailure, Solution, check_limits, check_on_failure, settle
from ..solvers.anderson import Anderson
from ..solvers.base import AbstractSolver, Map, working_dtype
from ..solvers.loop import looks, solve
from .base import AbstractGradient
from .conjugate import conjugate_gradient


@final
@dataclasses.dataclass(frozen=True)
class ConjugateGradient:
    """The backward solver for symmetric systems, which an equation from a cell has on its active set."""


@final
@dataclasses.dataclass(frozen=True)
class Implicit(AbstractGradient):
    """With J = ∂f/∂z at z* and g = ∂L/∂z*, the gradient that enters f is u = (I − Jᵀ)⁻¹ g (implicit function theorem).

    It is a fixed point too, u = Jᵀu + g, so any solver finds it. For an equation from a cell J = DH, D the 0/1 slope
    of σ and H the (symmetric) Hessian of S, and w = Du solves (I − DHD) w = Dg: conjugate gradient, the default there.
    Memory: one evaluation of f, whatever the solve took. A backward solve that fails warns unless told otherwise.
    Can be differentiated again: u is an equilibrium like any other.
    """

    solver: AbstractSolver[Any] | ConjugateGradient | None = None  # None: conjugate gradient if it applies, or Anderson
    tol: float = 1e-6
    max_steps: int = 100
    check_every: int | None = None  # as for `kerneq.solve`
    on_failure: OnFailure = "warn"

    def __post_init__(self) -> None:
        check_limits(self.tol, self.max_steps)
        check_on_failure(self.on_failure)

    def attach(self, f: Map, z: Tensor) -> Tensor:
        system = _System.at(f, z.detach())
        out: Tensor = _Adjoint.apply(system.image, z.detach(), self, f, system)  # type: ignore[no-untyped-call]
        return out

    def adjoint(self, system: "_System", g: Tensor) -> Tensor:
        """u, or Du, which is the same to everything behind σ."""
        symmetric = system.active is not None
        if isinstance(self.solver, ConjugateGradient) and not symmetric:
            raise TypeError(
                "Conjugate gradient needs the equation of a cell; give `Implicit` another solver for a function."
            )
        if symmetric and (self.solver is None or isinstance(self.solver, ConjugateGradient)):
            stride = looks(self.check_every, g)
            solution = system.symmetric_solve(g, self.tol, self.max_steps, stride)
        else:
            solver = self.solver if isinstance(self.solver, AbstractSolver) else Anderson()
            solution = solve(
                lambda u: system.pull(u) + g,
                g,
                solver,
                tol=self.tol,
                max_steps=self.max_steps,
                check_every=self.check_every,
            )
        return settle(solution, self.on_failure, where="The backward solve").value


@dataclasses.dataclass(frozen=True)
class _System:
    """f linearised at z, through the graph of one evaluation."""

    z: Tensor  # a leaf
    image: Tensor  # f(z), with its graph
    drive: Tensor | None = None  # d(z), for an equation
    active: Tensor | None = None  # D

    @classmethod
    def at(cls, f: Map, z: Tensor) -> "_System":
        with torch.enable_grad():
            z = z.requires_grad_() if z.is_leaf else z
            if not isinstance(f, AbstractEquation):
                return cls(z, f(z))
            at = f.evaluate(z, energy=False)
            assert at.drive is not None
            return cls(z, at.image, at.drive, f.prox.slope(at.drive.detach()))

    def pull(self, u: Tensor) -> Tensor:
        """Jᵀu."""
        return _vjp(self.image, self.z, u)

    def symmetric_solve(self, g: Tensor, tol: float, max_steps: int, check_every: int) -> Solution:
        assert self.drive is not None and self.active is not None
        drive, active = self.drive, self.active
        dtype = working_dtype(g.dtype)
        matvec: Callable[[Tensor], Tensor] = lambda w: w - active * _vjp(drive, self.z, w)  # noqa: E731
        with torch.no_grad():
            return conjugate_gradient(matvec, active * g.to(dtype), tol, max_steps, check_every)


def _vjp(output: Tensor, z: Tensor, u: Tensor) -> Tensor:
    with torch.enable_grad():
        (pulled,) = torch.autograd.grad(output, z, u.to(output.dtype), retain_graph=True, allow_unused=True)
    return torch.zeros_like(u) if pulled is None else pulled.to(u.dtype)


class _Adjoint(torch.autograd.Function):
    """Forward: z as it was found. Backward: g ↦ u, handed to the graph of f(z)."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, z: Tensor, rule: Implicit, f: Map, system: _System) -> Tensor:
        ctx.rule, ctx.f, ctx.system = rule, f, system
        return z.to(image.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None, None]:
        rule, system = ctx.rule, ctx.system
        with torch.no_grad():
            u = rule.adjoint(system, g.detach())
        if torch.is_grad_enabled():  # differentiated twice: z and u depend on what f depends on
            z = rule.attach(ctx.f, system.z)
            image = ctx.f(z)
            pull = lambda u: torch.autograd.grad(image, z, u, create_graph=True)[0] + g  # noqa: E731
            start = u if system.drive is None else system.pull(u) + g.detach()
            u = dataclasses.replace(rule, solver=None).attach(pull, start)
        return u.to(g.dtype), None, None, None, None
