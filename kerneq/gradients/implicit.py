"""Implicit gradient: differentiate z* = f(z*) itself, not the iterations that found it."""

import dataclasses
import functools
from typing import Any, final

import torch
from torch import Tensor

from ..equation import AbstractEquation
from ..prox import AbstractProx
from ..solution import OnFailure, Solution, check_limits, check_on_failure, settle
from ..solvers.anderson import Anderson
from ..solvers.base import AbstractSolver, Map, looks, working_dtype
from ..solvers.features import InFeatures
from ..solvers.loop import advance, solve
from .base import AbstractGradient
from .conjugate import conjugate_gradient
from .features import attach


@final
@dataclasses.dataclass(frozen=True)
class ConjugateGradient:
    """(I − DHD) w = Dg by conjugate gradient, in the space of the state: exact and safe, for any kernel."""


@final
@dataclasses.dataclass(frozen=True)
class Implicit(AbstractGradient):
    """With J = ∂f/∂z at z* and g = ∂L/∂z*, the gradient that enters f is u = (I − Jᵀ)⁻¹ g (implicit function theorem).

    It is a fixed point too, u = Jᵀu + g, so any solver finds it. For an equation from a cell J = DH, D the 0/1 slope
    of σ and H the (symmetric) Hessian of S, and w = Du solves (I − DHD) w = Dg: conjugate gradient, the default there,
    or `InFeatures`. Memory: one evaluation of f, whatever the solve took. A backward solve that fails warns unless told
    otherwise. Can be differentiated again: u is an equilibrium like any other.
    """

    solver: AbstractSolver[Any] | ConjugateGradient | InFeatures | None = (
        None  # None: see above; Anderson for functions
    )
    tol: float = 1e-6
    max_steps: int = 100
    check_every: int | None = None  # as for `kerneq.solve`
    on_failure: OnFailure = "warn"

    def __post_init__(self) -> None:
        check_limits(self.tol, self.max_steps)
        check_on_failure(self.on_failure)

    def attach(self, f: Map, z: Tensor) -> Tensor:
        z = z.detach()
        if isinstance(self.solver, ConjugateGradient | InFeatures) and not isinstance(f, AbstractEquation):
            name = type(self.solver).__name__
            raise TypeError(f"{name} needs the equation of a cell; give `Implicit` another solver for a function.")
        if isinstance(self.solver, InFeatures) and isinstance(f, AbstractEquation):
            closing = f.closing(z)
            if closing is not None:
                return attach(closing, z, self._solve, self.solver)
        system = _System.at(f, z)
        tensors = f.tensors() if isinstance(f, AbstractEquation) else ()
        inputs = (system.image, z.detach(), self, f, system, *tensors)
        out: Tensor = _Adjoint.apply(*inputs)  # type: ignore[no-untyped-call]
        return out

    def adjoint(self, system: "_System", g: Tensor) -> Tensor:
        """u, or w = Du, which is the same to everything behind σ."""
        if system.drive is None or isinstance(self.solver, AbstractSolver):
            fixed_point = self.solver if isinstance(self.solver, AbstractSolver) else Anderson()
            return self._solve(lambda u: system.pull(u) + g, g, fixed_point)
        solution = system.symmetric_solve(g, self.tol, self.max_steps, looks(self.check_every, g))
        return settle(solution, self.on_failure, where="The backward solve").value

    def _solve(self, f: Map, start: Tensor, solver: AbstractSolver[Any]) -> Tensor:
        if self.on_failure == "return" and looks(self.check_every, start) >= self.max_steps:
            return advance(f, start, solver, self.max_steps)  # nobody will ask for the residual
        solution = solve(f, start, solver, tol=self.tol, max_steps=self.max_steps, check_every=self.check_every)
        return settle(solution, self.on_failure, where="The backward solve").value


@dataclasses.dataclass(frozen=True)
class _System:
    """f linearised at z, through the graph of one evaluation."""

    z: Tensor  # a leaf
    image: Tensor  # f(z), with its graph
    drive: Tensor | None = None  # d(z), for an equation
    prox: AbstractProx | None = None

    @classmethod
    def at(cls, f: Map, z: Tensor) -> "_System":
        with torch.enable_grad():
            z = z.requires_grad_()
            if not isinstance(f, AbstractEquation):
                return cls(z, f(z))
            at = f.evaluate(z, energy=False)
            return cls(z, at.image, at.drive, f.prox)

    def pull(self, u: Tensor) -> Tensor:
        """Jᵀu."""
        return _vjp(self.image, self.z, u)

    def symmetric_solve(self, g: Tensor, tol: float, max_steps: int, check_every: int) -> Solution:
        assert self.drive is not None and self.prox is not None
        drive, g = self.drive, g.to(working_dtype(g.dtype))
        pull = functools.partial(self.prox.pull, self.image.detach().to(g.dtype))

        def matvec(w: Tensor) -> Tensor:
            return w - pull(_vjp(drive, self.z, w))

        with torch.no_grad():
            return conjugate_gradient(matvec, pull(g), tol, max_steps, check_every)


def _vjp(output: Tensor, z: Tensor, u: Tensor) -> Tensor:
    with torch.enable_grad():
        (pulled,) = torch.autograd.grad(output, z, u.to(output.dtype), retain_graph=True, allow_unused=True)
    return torch.zeros_like(u) if pulled is None else pulled.to(u.dtype)


class _Adjoint(torch.autograd.Function):
    """Forward: z as it was found. Backward: g ↦ u, handed to the graph of f(z).

    Differentiated twice, that graph will not do: its z is a constant. Then the gradients with respect to the tensors of
    f are made afresh, from a z and a u that depend on them.
    """

    @staticmethod
    def forward(
        ctx: Any, image: Tensor, z: Tensor, rule: Implicit, f: Map, system: _System, *tensors: Tensor
    ) -> Tensor:
        ctx.rule, ctx.f, ctx.system, ctx.count = rule, f, system, len(tensors)
        return z.view_as(z).to(image.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            u = ctx.rule.adjoint(ctx.system, g.detach())
        if not torch.is_grad_enabled():
            return u.to(g.dtype), *[None] * (4 + ctx.count)
        if not isinstance(ctx.f, AbstractEquation):
            return _Once.apply(u.to(g.dtype), ctx.system.image), *[None] * 4  # type: ignore[no-untyped-call]
        return None, *[None] * 4, *_differentiable(ctx.rule, ctx.f, ctx.system.z, u, g)


def _differentiable(rule: Implicit, f: AbstractEquation, z: Tensor, u: Tensor, g: Tensor) -> tuple[Tensor | None, ...]:
    """(∂f/∂t)ᵀu for each tensor t of f that has a gradient, as a function of t and g, at z(t) and u(t, g)."""
    z = rule.attach(f, z)
    views = [t.view_as(t) for t in f.tensors()]  # ∂f/∂t at fixed z: z depends on the tensors, not on these views
    image = f.on(*views)(z)
    start = torch.autograd.grad(image, z, u.to(image.dtype), retain_graph=True)[0] + g.detach()

    def pull(u: Tensor) -> Tensor:
        return torch.autograd.grad(image, z, u.to(image.dtype), create_graph=True)[0] + g

    u = dataclasses.replace(rule, solver=None).attach(pull, start)
    wanted = [t for t in views if t.requires_grad]
    found = iter(torch.autograd.grad(image, wanted, u.to(image.dtype), create_graph=True, allow_unused=True))
    return tuple(next(found) if t.requires_grad else None for t in views)


class _Once(torch.autograd.Function):
    """u, which must not be differentiated: what a plain function depends on is not known."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, image: Tensor) -> Tensor:
        return u.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, None]:
        raise RuntimeError(
            "`Implicit` differentiates a plain function once only; for second derivatives use the equation of a cell, "
            "or `Phantom` or `Unrolled`."
        )
