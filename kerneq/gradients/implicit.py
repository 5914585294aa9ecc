"""Implicit gradient: differentiate z* = f(z*) itself, not the iterations that found it."""

import dataclasses
from typing import Any, final

import torch
from torch import Tensor

from ..adjoint import Adjoint, AdjointPoint, FeatureAdjoint, StateAdjoint, open_adjoint
from ..conjugate_gradient import conjugate_gradient
from ..equation import Equation, averaged_step
from ..maps import AbstractMap, Function, Linearisation, Map, Point, as_map, linearise
from ..solution import OnFailure, Solution, check_limits, final_codes, report_failure
from ..solvers.anderson import Anderson
from ..solvers.base import AbstractSolver
from ..solvers.features import InFeatures
from ..solvers.loops import check_stride, solve, solve_space
from ..solvers.newton import Newton
from ..solvers.proximal import Proximal
from ..spaces import AbstractSpace, relative_residual
from ..tensors import check_kind, magnitude, per_sample, widened
from .base import AbstractGradient, once

ONCE = (
    "`Implicit` differentiates a plain function once only, and the equation of a cell twice (in `torch.func`: "
    "`jacrev(grad(f))`, not `hessian(f)`); for more use `Phantom` or `Unrolled`."
)


@final
@dataclasses.dataclass(frozen=True)
class ConjugateGradient:
    """Solves (I − DHD) w = Dg by conjugate gradient, in the space of the state: exact and safe, for any kernel."""


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

    def attach(self, f: Map, at: Point) -> Point:
        if isinstance(f, Equation) and not isinstance(self.solver, Newton):
            adjoint = open_adjoint(f, at)
            inputs = (adjoint.m, adjoint.weight, adjoint.dz, adjoint, self, f, at.backward, *f.tensors())
            z, v = _Closed.apply(*inputs)  # type: ignore[no-untyped-call]
            return Point(z, v, adjoint.image, at.backward)
        if isinstance(self.solver, ConjugateGradient | InFeatures):
            name = type(self.solver).__name__
            raise TypeError(f"{name} needs the equation of a cell; give `Implicit` another solver for a function.")
        f, z = as_map(f), at.z.detach()
        system = linearise(f, z)
        out = _Adjoint.apply(system.image, z.detach(), self, f, system, at.backward, *f.tensors())  # type: ignore[no-untyped-call]
        return Point(out, backward=at.backward)

    def solve_through(self, f: AbstractMap, system: Linearisation, g: Tensor) -> Solution:
        """Solve for u through the graph of f.

        It is linear in g, which may be too small or too large to be squared: so it is found for g over its size, that
        of each sample, or one for all where f does not tell them apart, for then they may meet in it.
        """
        unit = magnitude(g)
        if f.rows(torch.zeros(1, dtype=torch.long, device=g.device)) is None:
            unit = torch.where(unit.isfinite(), unit, 0.0).amax()
        g = g / unit
        if isinstance(self.solver, Newton):  # the system is linear, so one step is all
            found = self._solve_directly(system, g)
        else:
            adjoint, solver, tol = Function(lambda u: system.vjp(u) + g), self._inner_solver(), self.tol
            found = self._report(
                solve(adjoint, g, solver, tol=tol, max_steps=self.max_steps, check_every=self.check_every)
            )
        return dataclasses.replace(found, value=found.value * unit)

    def solve_closed(self, adjoint: Adjoint, g: Tensor) -> tuple[Solution, Tensor, Tensor, Tensor]:
        """Solve w = D(g + Hw); return how the solve went, w, y = Ww and Ny."""
        if adjoint.state_hvp is None and (self.solver is None or isinstance(self.solver, InFeatures)):
            features = adjoint.in_features(g)
            found, point = self._solve_features(features)
            return found, *features.recover(point)
        state = adjoint.in_state(g)
        if isinstance(self.solver, AbstractSolver) and not isinstance(self.solver, InFeatures):
            found, point = self._solve_space(state)
            return self._report(found), *state.recover(point)
        found = self._report(self._by_conjugate_gradient(state))
        return found, *state.recover(AdjointPoint(found.value))

    def _solve_features(self, system: FeatureAdjoint) -> tuple[Solution, AdjointPoint]:
        """Solve for y as the rule says; the default is Anderson, and conjugate gradient for what that does not
        solve."""
        found, point = self._solve_space(system)
        fixed = check_stride(self.check_every, system.g) >= self.max_steps
        if self.solver is not None or fixed or bool(found.converged.all()):
            return self._report(found), point
        state = system.adjoint.in_state(system.g)
        exact = self._by_conjugate_gradient(state)
        y = system.adjoint.operator(exact.value.to(state.source.dtype)) * (state.unit / system.unit)
        solved = found.converged
        y = torch.where(per_sample(solved, y), found.value, y)
        residual = torch.where(solved, found.residual, exact.residual)
        steps = torch.where(solved, found.steps, exact.steps)
        codes = torch.where(solved, found.codes, exact.codes)
        return self._report(Solution(y, residual, steps, codes, self.tol)), AdjointPoint(y)

    def _solve_space(self, space: AbstractSpace) -> tuple[Solution, AdjointPoint]:
        solver, limits = self._inner_solver(), (self.tol, self.max_steps, self.check_every)
        found, _, point = solve_space(space, None, solver, *limits)
        return found, point if isinstance(point, AdjointPoint) else AdjointPoint(found.value)

    def _by_conjugate_gradient(self, system: StateAdjoint) -> Solution:
        stride = check_stride(self.check_every, system.source)
        b = widened(system.source)
        return conjugate_gradient(system.adjoint.symmetric, b, self.tol, self.max_steps, stride)

    def _solve_directly(self, system: Linearisation, g: Tensor) -> Solution:
        """Solve for u by elimination; its residual is rounding, unless samples meet in f, or f is too steep for its
        dtype."""
        u = system.solve(g, transposed=True)
        residual, _ = relative_residual(u, system.vjp(u) + g)
        codes = final_codes(residual, max(self.tol, torch.finfo(g.dtype).eps ** 0.5))  # u is wider than half precision
        return self._report(Solution(u, residual, torch.ones_like(codes), codes, self.tol))

    def _inner_solver(self) -> AbstractSolver[Any]:
        """Return what iterates the adjoint system, in whichever variable that is."""
        solver = self.solver.solver if isinstance(self.solver, InFeatures) else self.solver
        return solver if isinstance(solver, AbstractSolver) else Anderson()

    def _report(self, solution: Solution) -> Solution:
        return report_failure(solution, self.on_failure, where="The backward solve")


class _Adjoint(torch.autograd.Function):
    """Forward: z as it was found. Backward: g ↦ u, handed to the graph of f(z).

    Differentiated twice, that graph will not do: its z is a constant. Then the gradients with respect to the tensors of
    f are made afresh, from a z and a u that depend on them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        image: Tensor,
        z: Tensor,
        rule: Implicit,
        f: AbstractMap,
        system: Linearisation,
        record: list[Tensor] | None,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.rule, ctx.f, ctx.system, ctx.record, ctx.count = rule, f, system, record, len(tensors)
        return z.view_as(z).to(image.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            found = ctx.rule.solve_through(ctx.f, ctx.system, g.detach())
        if ctx.record is not None:
            ctx.record.append(found.converged)
        u = found.value
        if not torch.is_grad_enabled():
            return u.to(g.dtype), *[None] * (5 + ctx.count)
        if ctx.count == 0:
            return once(u.to(g.dtype), g, ctx.system.image, ONCE), *[None] * 5
        at = Point(ctx.system.z, backward=ctx.record)
        return None, *[None] * 5, *_differentiable(ctx.rule, ctx.f, at, u, g)


def _differentiable(
    rule: Implicit, f: AbstractMap, at: Point, u: Tensor, g: Tensor, g_v: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """Return (∂f/∂t)ᵀu for each tensor t of f that has a gradient, as a function of t and g, at z(t) and u(t, g).

    With `g_v`, which g then contains, also (∂Wz/∂t)ᵀg_v at fixed z.
    """
    z = rule.attach(f, at).z
    views = [t.view_as(t) for t in f.tensors()]  # ∂f/∂t at fixed z: z depends on the tensors, not on these views
    fixed = f.on(*views)
    image = fixed(z)
    start = torch.autograd.grad(image, z, u.to(image.dtype), retain_graph=True)[0] + g.detach()

    def pull(u: Tensor, g: Tensor) -> Tensor:
        return torch.autograd.grad(image, z, u.to(image.dtype), create_graph=True)[0] + g

    second = dataclasses.replace(rule, solver=_second_solver(rule, f))
    u = second.attach(Function(pull, (g,)), Point(start)).z  # with g as an input, samples stay apart
    outputs, gradients = [image], [u.to(image.dtype)]
    if g_v is not None:
        assert isinstance(fixed, Equation)
        outputs.append(fixed.operator(z))
        gradients.append(g_v)
    wanted = [t for t in views if t.requires_grad]
    found = iter(torch.autograd.grad(outputs, wanted, gradients, create_graph=True, allow_unused=True))
    return tuple(next(found) if t.requires_grad else None for t in views)


def _second_solver(rule: Implicit, f: AbstractMap) -> AbstractSolver[Any] | None:
    """Return what solves v = Jv + h: the solver of the rule, or, where J may expand, averaged steps, by L."""
    if isinstance(rule.solver, AbstractSolver) and not isinstance(rule.solver, InFeatures):
        return rule.solver
    if isinstance(f, Equation) and f.contraction is None:
        return Anderson(relaxation=float(averaged_step(f.bound)))
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
        f: Equation,
        record: list[Tensor] | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(m, adjoint.z, adjoint.v)  # the outputs too: whoever writes to them gets an error
        ctx.set_materialize_grads(False)
        ctx.adjoint, ctx.rule, ctx.f, ctx.record, ctx.count = adjoint, rule, f, record, len(tensors)
        return adjoint.z.view_as(adjoint.z), adjoint.v.view_as(adjoint.v)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g_v: Tensor | None) -> tuple[Tensor | None, ...]:
        m, *_ = ctx.saved_tensors
        adjoint: Adjoint = ctx.adjoint
        if g_v is not None:
            through = dataclasses.replace(adjoint.operator, weight=adjoint.weight).adjoint(g_v)
            g = through if g is None else g + through
        if g is None:  # nothing depends on either
            return (None,) * (7 + ctx.count)
        with torch.no_grad():
            found, w, y, n = ctx.rule.solve_closed(adjoint, g.detach().to(m.dtype))
        if ctx.record is not None:
            ctx.record.append(found.converged)
        if torch.is_grad_enabled():
            at = Point(adjoint.z, backward=ctx.record)
            return *[None] * 7, *_differentiable(ctx.rule, ctx.f, at, w, g, g_v)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            operator = adjoint.operator
            second = n if g_v is None else torch.add(n, g_v, alpha=adjoint.sign)
            grad_weight = operator.weight_gradient(w, m)
            grad_weight = torch.add(grad_weight, operator.weight_gradient(adjoint.z, second), alpha=adjoint.sign)
        return y, grad_weight, w if ctx.needs_input_grad[2] else None, *[None] * (4 + ctx.count)
