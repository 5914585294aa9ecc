"""Implicit gradient: differentiate z* = f(z*) itself, not the iterations that found it."""

import dataclasses
import functools
from typing import Any, final

import torch
from torch import Tensor

from ..equation import AbstractEquation, Reduced
from ..prox import AbstractProx
from ..solution import OnFailure, Solution, check_limits, check_on_failure, settle
from ..solvers.anderson import Anderson
from ..solvers.base import AbstractSolver, Map, working_dtype
from ..solvers.loop import looks, solve
from .base import AbstractGradient
from .conjugate import conjugate_gradient


@final
@dataclasses.dataclass(frozen=True)
class ConjugateGradient:
    """(I − DHD) w = Dg by conjugate gradient, in the space of the state: exact and safe, for any kernel."""


@final
@dataclasses.dataclass(frozen=True)
class InFeatures:
    """y = WDg + WDWᵀNy by a fixed-point solver, in the space of the features, with w = D(g + WᵀNy) after it.

    The features are fewer than the state (four times on the largest branch of GEQ), N = ∂²S/∂v² is known in closed
    form, and no graph is walked: the cheapest way on a GPU. For the linear and the Gaussian kernel; others take
    conjugate gradient.
    """

    solver: AbstractSolver[Any] = Anderson(memory=3)  # `Picard()` is cheaper and enough where the equation contracts


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
        system = _System.at(f, z.detach(), isinstance(self.solver, InFeatures))
        out: Tensor = _Adjoint.apply(system.image, z.detach(), self, f, system)  # type: ignore[no-untyped-call]
        return out

    def adjoint(self, system: "_System", g: Tensor) -> Tensor:
        """u, or w = Du, which is the same to everything behind σ."""
        solver = self.solver
        if isinstance(solver, ConjugateGradient | InFeatures) and system.drive is None:
            raise TypeError(f"{type(solver).__name__} needs the equation of a cell; give `Implicit` another solver.")
        if isinstance(solver, InFeatures) and system.reduced is not None:
            reduced, g = system.reduced, g.to(system.image.dtype)
            source = reduced.source(g)
            return reduced.recover(g, self._solve(functools.partial(reduced.step, source), source, solver.solver))
        if system.drive is not None and not isinstance(solver, AbstractSolver):
            solution = system.symmetric_solve(g, self.tol, self.max_steps, looks(self.check_every, g))
            return settle(solution, self.on_failure, where="The backward solve").value
        fixed_point = solver if isinstance(solver, AbstractSolver) else Anderson()
        return self._solve(lambda u: system.pull(u) + g, g, fixed_point)

    def _solve(self, f: Map, start: Tensor, solver: AbstractSolver[Any]) -> Tensor:
        solution = solve(f, start, solver, tol=self.tol, max_steps=self.max_steps, check_every=self.check_every)
        return settle(solution, self.on_failure, where="The backward solve").value


@dataclasses.dataclass(frozen=True)
class _System:
    """f linearised at z, through the graph of one evaluation."""

    z: Tensor  # a leaf
    image: Tensor  # f(z), with its graph
    drive: Tensor | None = None  # d(z), for an equation
    prox: AbstractProx | None = None
    reduced: Reduced | None = None

    @classmethod
    def at(cls, f: Map, z: Tensor, in_features: bool) -> "_System":
        with torch.enable_grad():
            if not isinstance(f, AbstractEquation):
                z = z.requires_grad_()
                return cls(z, f(z))
            at = f.evaluate(z, energy=False)
            reduced = f.reduce(at) if in_features else None
            if reduced is None:  # products with J go through the graph, which must then reach z
                z = z.requires_grad_()
                at = f.evaluate(z, energy=False)
            assert at.drive is not None
            return cls(z, at.image, at.drive, f.prox, reduced)

    def pull(self, u: Tensor) -> Tensor:
        """Jᵀu."""
        return _vjp(self.image, self.z, u)

    def symmetric_solve(self, g: Tensor, tol: float, max_steps: int, check_every: int) -> Solution:
        assert self.drive is not None and self.prox is not None
        drive, g = self.drive, g.to(working_dtype(g.dtype))
        pull = functools.partial(self.prox.pull, drive.detach().to(g.dtype))

        def matvec(w: Tensor) -> Tensor:
            return w - pull(_vjp(drive, self.z, w))

        with torch.no_grad():
            return conjugate_gradient(matvec, pull(g), tol, max_steps, check_every)


def _vjp(output: Tensor, z: Tensor, u: Tensor) -> Tensor:
    with torch.enable_grad():
        (pulled,) = torch.autograd.grad(output, z, u.to(output.dtype), retain_graph=True, allow_unused=True)
    return torch.zeros_like(u) if pulled is None else pulled.to(u.dtype)


class _Adjoint(torch.autograd.Function):
    """Forward: z as it was found. Backward: g ↦ u, handed to the graph of f(z)."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, z: Tensor, rule: Implicit, f: Map, system: _System) -> Tensor:
        ctx.rule, ctx.f, ctx.system = rule, f, system
        return z.view_as(z).to(image.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None, None]:
        rule, system = ctx.rule, ctx.system
        with torch.no_grad():
            u = rule.adjoint(system, g.detach())
        if torch.is_grad_enabled():  # differentiated twice: z and u depend on what f depends on
            z = rule.attach(ctx.f, system.z)
            image = ctx.f(z)
            start = torch.autograd.grad(image, z, u, retain_graph=True)[0] + g.detach()

            def pull(u: Tensor) -> Tensor:
                return torch.autograd.grad(image, z, u, create_graph=True)[0] + g

            u = dataclasses.replace(rule, solver=None).attach(pull, start if system.drive is not None else u)
        return u.to(g.dtype), None, None, None, None
