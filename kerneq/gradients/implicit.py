"""Implicit gradient: differentiate z* = f(z*) itself, not the iterations that found it."""

import dataclasses
from typing import Any, final

import torch
from torch import Tensor

from ..equation import (
    AbstractMap,
    Adjoint,
    Equation,
    Evaluation,
    FeatureAdjointMap,
    Function,
    Linearisation,
    Map,
    StateAdjointMap,
    as_map,
)
from ..operators import bound, conjugate_gradient
from ..solution import OnFailure, Solution, check_limits, final_codes, settle
from ..solvers.anderson import Anderson
from ..solvers.base import AbstractSolver, look_stride, solve
from ..solvers.features import InFeatures
from ..solvers.newton import Newton
from ..solvers.proximal import Proximal
from ..tensors import check_kind, magnitude, per_sample, widened
from .base import AbstractGradient, once

ONCE = (
    "`Implicit` differentiates a plain function once only, and the equation of a cell twice (in `torch.func`: "
    "`jacrev(grad(f))`, not `hessian(f)`); for more use `Phantom` or `Unrolled`."
)


@final
@dataclasses.dataclass(frozen=True)
class ConjugateGradient:
    """(I − DHD) w = Dg by conjugate gradient, in the space of the state: exact and safe, for any kernel."""


@final
@dataclasses.dataclass(frozen=True)
class Implicit(AbstractGradient):
    """With J = ∂f/∂z at z* and g = ∂L/∂z*, the gradient that enters f is u = (I − Jᵀ)⁻¹ g (implicit function theorem).

    It is a fixed point too, u = Jᵀu + g, so any solver finds it. For an equation from a cell J = DH, D the 0/1 slope
    of σ and H the (symmetric) Hessian of S, and w = Du solves (I − DHD) w = Dg. By default that is done by Anderson for
    y = Ww, which is smaller, where the kernel has it (see `InFeatures`), and what that does not solve, or has no such
    form, by conjugate gradient. Memory: one evaluation of f, whatever the solve took. A backward solve that fails warns
    unless told otherwise. Can be differentiated again: u is an equilibrium like any other.
    """

    solver: AbstractSolver[Any] | ConjugateGradient | None = None  # None: see above; Anderson for functions
    tol: float = 1e-6
    max_steps: int = 100
    check_every: int | None = None  # as for `kerneq.solve`
    on_failure: OnFailure = "warn"

    def __post_init__(self) -> None:
        if self.solver is not None and not isinstance(self.solver, ConjugateGradient):
            check_kind("solver", self.solver, AbstractSolver)
        if isinstance(self.solver, Proximal):
            raise TypeError("`Implicit` solves a linear system, which has no energy for `Proximal`: use `Anderson`.")
        check_limits(self.tol, self.max_steps, self.check_every, self.on_failure)

    def attach(self, f: Map, z: Tensor) -> Tensor:
        f = as_map(f)
        adjoint = None if isinstance(self.solver, Newton) else f.closed_adjoint(z)
        if adjoint is not None:
            tensors = f.tensors()
            bare = f.on(*tensors)  # f knows the value; a graph that held f would hold, in a circle, itself
            inputs = (adjoint.m, adjoint.weight, adjoint.dz, adjoint, self, bare, *tensors)
            closed: Tensor
            closed, v = _Closed.apply(*inputs)  # type: ignore[no-untyped-call]
            f.found(closed, Evaluation(closed, adjoint.image, features=v))
            return closed
        if isinstance(self.solver, ConjugateGradient | InFeatures):
            name = type(self.solver).__name__
            raise TypeError(f"{name} needs the equation of a cell; give `Implicit` another solver for a function.")
        z = z.detach()
        system = f.linearise(z)
        out: Tensor = _Adjoint.apply(system.image, z.detach(), self, f, system, *f.tensors())  # type: ignore[no-untyped-call]
        return out

    def solve_through(self, f: AbstractMap, system: Linearisation, g: Tensor) -> Solution:
        """u, through the graph of f.

        It is linear in g, which may be too small or too large to be squared: so it is found for g over its size, that
        of each sample, or one for all where f does not tell them apart, for then they may meet in it.
        """
        unit = magnitude(g)
        if f.rows(torch.zeros(1, dtype=torch.long, device=g.device)) is None:
            unit = torch.where(unit.isfinite(), unit, 0.0).amax()
        g = g / unit
        direct = isinstance(self.solver, Newton)  # the system is linear, so one step is all
        found = self._directly(system, g) if direct else self.solve(lambda u: system.vjp(u) + g, g)
        return dataclasses.replace(found, value=found.value * unit)

    def solve_closed(self, adjoint: Adjoint, g: Tensor) -> tuple[Solution, Tensor, Tensor, Tensor]:
        """How the solve of w = D(g + Hw) went, w, y = Ww and Ny."""
        if adjoint.state_hvp is None and (self.solver is None or isinstance(self.solver, InFeatures)):
            features = adjoint.in_features(g)
            found = self._for_features(features)
            return found, *features.recover(found.value)
        state = adjoint.in_state(g)
        if isinstance(self.solver, AbstractSolver) and not isinstance(self.solver, InFeatures):
            found = self.solve(state, state.source)
        else:
            found = self._settled(self._by_conjugate_gradient(state))
        return found, *state.recover(found.value)

    def _for_features(self, system: FeatureAdjointMap) -> Solution:
        """y, as the rule says; the default is Anderson, and conjugate gradient for what that does not solve."""
        if self.solver is not None or look_stride(self.check_every, system.g) >= self.max_steps:
            return self.solve(system, None)
        found = dataclasses.replace(self, on_failure="return").solve(system, None)
        if bool(found.converged.all()):
            return found
        state = system.adjoint.in_state(system.g)
        exact = self._by_conjugate_gradient(state)
        y = system.adjoint.operator(exact.value.to(state.source.dtype)) * (state.unit / system.unit)
        solved = found.converged
        y = torch.where(per_sample(solved, y), found.value, y)
        residual = torch.where(solved, found.residual, exact.residual)
        steps = torch.where(solved, found.steps, exact.steps)
        codes = torch.where(solved, found.codes, exact.codes)
        return self._settled(Solution(y, residual, steps, codes, self.tol))

    def _by_conjugate_gradient(self, system: StateAdjointMap) -> Solution:
        stride = look_stride(self.check_every, system.source)
        b = widened(system.source)
        return conjugate_gradient(system.adjoint.symmetric, b, self.tol, self.max_steps, stride)

    def _directly(self, system: Linearisation, g: Tensor) -> Solution:
        """u by elimination; its residual is rounding, unless samples meet in f, or f is too steep for its dtype."""
        u = system.solve(g, transposed=True)
        residual, _ = Evaluation(u, system.vjp(u) + g).measured
        codes = final_codes(residual, max(self.tol, torch.finfo(g.dtype).eps ** 0.5))  # u is wider than half precision
        return self._settled(Solution(u, residual, torch.ones_like(codes), codes, self.tol))

    def solve(self, f: Map, start: Tensor | None) -> Solution:
        """The fixed point of f, by the solver of this rule, which works in the space of f."""
        solver = self.solver.solver if isinstance(self.solver, InFeatures) else self.solver
        if not isinstance(solver, AbstractSolver):
            solver = Anderson()
        return self._settled(
            solve(f, start, solver, tol=self.tol, max_steps=self.max_steps, check_every=self.check_every)
        )

    def _settled(self, solution: Solution) -> Solution:
        return settle(solution, self.on_failure, where="The backward solve")


def _note(f: AbstractMap, found: Solution) -> None:
    """Tell those who count failures."""
    if f.backward is not None:
        f.backward.append(found.converged)


class _Adjoint(torch.autograd.Function):
    """Forward: z as it was found. Backward: g ↦ u, handed to the graph of f(z).

    Differentiated twice, that graph will not do: its z is a constant. Then the gradients with respect to the tensors of
    f are made afresh, from a z and a u that depend on them.
    """

    @staticmethod
    def forward(
        ctx: Any, image: Tensor, z: Tensor, rule: Implicit, f: AbstractMap, system: Linearisation, *tensors: Tensor
    ) -> Tensor:
        ctx.rule, ctx.f, ctx.system, ctx.count = rule, f, system, len(tensors)
        return z.view_as(z).to(image.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            found = ctx.rule.solve_through(ctx.f, ctx.system, g.detach())
            _note(ctx.f, found)
        u = found.value
        if not torch.is_grad_enabled():
            return u.to(g.dtype), *[None] * (4 + ctx.count)
        if ctx.count == 0:
            return once(u.to(g.dtype), g, ctx.system.image, ONCE), *[None] * 4
        return None, *[None] * 4, *_differentiable(ctx.rule, ctx.f, ctx.system.z, u, g)


def _differentiable(
    rule: Implicit, f: AbstractMap, z: Tensor, u: Tensor, g: Tensor, g_v: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """(∂f/∂t)ᵀu for each tensor t of f that has a gradient, as a function of t and g, at z(t) and u(t, g).

    With `g_v`, which g then contains, also (∂Wz/∂t)ᵀg_v at fixed z.
    """
    z = rule.attach(f, z)
    views = [t.view_as(t) for t in f.tensors()]  # ∂f/∂t at fixed z: z depends on the tensors, not on these views
    at = f.on(*views)
    image = at(z)
    start = torch.autograd.grad(image, z, u.to(image.dtype), retain_graph=True)[0] + g.detach()

    def pull(u: Tensor, g: Tensor) -> Tensor:
        return torch.autograd.grad(image, z, u.to(image.dtype), create_graph=True)[0] + g

    u = dataclasses.replace(rule, solver=_second_solver(rule, f)).attach(Function(pull, (g,)), start)  # samples apart
    outputs, gradients = [image], [u.to(image.dtype)]
    if g_v is not None:
        assert isinstance(at, Equation)
        outputs.append(at.operator(z))
        gradients.append(g_v)
    wanted = [t for t in views if t.requires_grad]
    found = iter(torch.autograd.grad(outputs, wanted, gradients, create_graph=True, allow_unused=True))
    return tuple(next(found) if t.requires_grad else None for t in views)


def _second_solver(rule: Implicit, f: AbstractMap) -> AbstractSolver[Any] | None:
    """What solves v = Jv + h: the steps of the rule, or, where J may expand, averaged ones, by L."""
    if isinstance(rule.solver, AbstractSolver) and not isinstance(rule.solver, InFeatures):
        return rule.solver
    if isinstance(f, Equation) and f.contraction is None:
        return Anderson(relaxation=float(2 / (2 + f.bound)))
    return None


class _Closed(torch.autograd.Function):
    """Forward: z as it was found, and v = Wz, as functions of m = ∂S/∂v, W and ∂S/∂z. Backward: w and y = Ww, solved.

    No graph is walked, and the last Wᵀm of the forward pass is not computed, nor what the solves have made already.
    The gradients are those of ⟨w, Wᵀm(Wz) + ∂S/∂z⟩ + ⟨∂L/∂v, Wz⟩ at fixed w and z. Differentiated twice, as in
    `_Adjoint`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        m: Tensor,
        weight: Tensor,
        dz: Tensor | None,
        adjoint: Adjoint,
        rule: Implicit,
        f: AbstractMap,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(m, adjoint.z, adjoint.v)  # the outputs too: whoever writes to them gets an error
        ctx.set_materialize_grads(False)
        ctx.adjoint, ctx.rule, ctx.f, ctx.count = adjoint, rule, f, len(tensors)
        return adjoint.z.view_as(adjoint.z), adjoint.v.view_as(adjoint.v)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g_v: Tensor | None) -> tuple[Tensor | None, ...]:
        m, *_ = ctx.saved_tensors
        adjoint: Adjoint = ctx.adjoint
        if g_v is not None:
            through = bound(adjoint.weight).adjoint(g_v)
            g = through if g is None else g + through
        if g is None:  # nothing depends on either
            return (None,) * (6 + ctx.count)
        with torch.no_grad():
            found, w, y, n = ctx.rule.solve_closed(adjoint, g.detach().to(m.dtype))
            _note(ctx.f, found)
        if torch.is_grad_enabled():
            return *[None] * 6, *_differentiable(ctx.rule, ctx.f, adjoint.z, w, g, g_v)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            operator = adjoint.operator
            second = n if g_v is None else torch.add(n, g_v, alpha=adjoint.sign)
            grad_weight = operator.weight_gradient(w, m)
            grad_weight = torch.add(grad_weight, operator.weight_gradient(adjoint.z, second), alpha=adjoint.sign)
        return y, grad_weight, w if ctx.needs_input_grad[2] else None, *[None] * (3 + ctx.count)
