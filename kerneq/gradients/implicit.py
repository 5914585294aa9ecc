"""Implicit gradient: differentiate z* = f(z*) itself, not the iterations that found it.

`Implicit` chooses between two ways: through the graph of one evaluation, for any f, and for the equation of a cell by
the derivative in closed form, the `Adjoint`.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Self, final

import torch
from torch import Tensor

from ..conjugate_gradient import conjugate_gradient
from ..equation import Equation, averaged_step
from ..fused.convolution import convolve
from ..kernels.base import Slope
from ..linear_maps import LinearMap
from ..maps import AbstractMap, Function, Linearisation, Map, Point, as_map, linearise_at, run_eager
from ..prox import ReLU
from ..solution import Limits, OnFailure, Solution, final_codes, report_failure
from ..solvers.anderson import Anderson
from ..solvers.base import AbstractSolver, AbstractSpace, Evaluation, evaluate_start, relative_residual
from ..solvers.features import InFeatures
from ..solvers.loops import check_stride, solve_map, solve_space
from ..solvers.newton import Newton
from ..solvers.proximal import Proximal
from ..tensors import check_kind, magnitude, per_sample, widened
from .base import AbstractGradient, attach_through_graph

REACHABLE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # by f's own graph
ONCE = (
    "`Implicit` can be differentiated twice with respect to what f is known to depend on: the inputs behind z0, and "
    "the parameters of f where f is a module or a cell (in `torch.func`: `jacrev(grad(f))`, not `hessian(f)`). For the "
    "rest it can be differentiated once: make it an input, or use the gradient `Phantom()` or `Unrolled(steps)`."
)


@final
@dataclasses.dataclass(frozen=True)
class AdjointPoint:
    """A point of an adjoint system and the products that were computed there."""

    z: Tensor  # the variable that is solved for
    y: Tensor | None = None  # Ww, in the state system
    n: Tensor | None = None  # Ny
    masked: Tensor | None = None  # DWᵀNy, in the feature system


@final
@dataclasses.dataclass(frozen=True)
class Adjoint:
    """The derivative of f(z) = σ(Wᵀm + ∂S/∂z), m = ∂S/∂v at v = Wz, at its equilibrium: the adjoint system.

    With g = ∂L/∂z it is w = D(g + Hw), D the derivative of σ and H = P + WᵀNW, where N = ∂²S/∂v² and P = ∂²S/∂z² are
    known in closed form. Where there is no P it becomes y = WDg + WDWᵀNy for y = Ww, which is smaller, and
    w = D(g + WᵀNy) follows.
    """

    f: Equation
    z: Tensor  # the equilibrium
    v: Tensor  # Wz
    image: Tensor  # f(z), whose entries say what D is; those of z do not: a mixture of iterates has no zeros
    slope: Slope  # ∂S/∂v and ∂S/∂z, with their graph, but for that of v
    operator: LinearMap  # W, without a graph
    hvp: Callable[[Tensor], Tensor]  # N
    state_hvp: Callable[[Tensor], Tensor] | None  # P; None: 0

    @classmethod
    def of(cls, f: Equation, at: Point) -> Self:
        """Differentiate f at its equilibrium; what the solve has computed there is not computed again."""
        operator = dataclasses.replace(f.operator, weight=f.operator.weight.detach())
        z, image = at.z.detach(), at.image
        v = operator(z) if at.features is None else at.features.detach()
        slope = f.kernel.differentiate(f.binding, z, v, value=False)
        if image is None:
            with torch.no_grad():
                image = f.image(slope, drive=False)[0]
        hvp, state_hvp = f.kernel.hvp(f.binding, v), f.kernel.state_hvp(f.binding, z)
        return cls(f, z, v, image, slope, operator, hvp, state_hvp)

    def in_features(self, g: Tensor) -> "FeatureAdjoint":
        """Return the system y = WDg + WDWᵀNy, in a unit of its own."""
        source = self.operator(self.mask(g))
        unit = magnitude(source)
        return FeatureAdjoint(self, source / unit, unit, g)

    def in_state(self, g: Tensor) -> "StateAdjoint":
        """Return the system w = Dg + DHw, in a unit of its own."""
        source = self.mask(g)
        unit = magnitude(source)
        return StateAdjoint(self, source / unit, unit)

    def mask(self, g: Tensor) -> Tensor:
        """Return Dg."""
        return self.f.prox.vjp(self.image.to(g.dtype), g)

    def symmetric(self, w: Tensor) -> Tensor:
        """Return (I − DHD) w for w = Dw."""
        u = w.to(self.z.dtype)
        curved = None if self.state_hvp is None else self.state_hvp(u)
        return w - self.masked_adjoint(self.hvp(self.operator(u)), curved).to(w.dtype)

    def masked_adjoint(self, n: Tensor, g: Tensor | None) -> Tensor:
        """Return D(g + Wᵀn), without g DWᵀn."""
        if n.is_cuda and isinstance(self.f.prox, ReLU):  # perhaps one program for Wᵀ and D
            fused = convolve(n, self.operator.weight, adjoint=True, add=g, mask=self.image)
            if fused is not None:
                return fused
        drive = self.operator.adjoint(n)
        return self.f.prox.vjp(self.image, drive if g is None else g + drive)


@final
@dataclasses.dataclass(frozen=True)
class FeatureAdjoint(AbstractSpace):
    """Iterates y ↦ WDg + WDWᵀNy, whose value at y = 0 is known.

    It is linear in g, which may be too small or too large to be squared: so WDg and y are in units of WDg's own size.
    """

    adjoint: Adjoint
    source: Tensor  # WDg
    unit: Tensor  # of source and y; a power of two a sample
    g: Tensor

    def evaluate(self, z: Tensor) -> Evaluation:
        adjoint = self.adjoint
        n = adjoint.hvp(z)
        masked = adjoint.masked_adjoint(n, None)
        image = convolve(masked, adjoint.operator.weight, add=self.source) if z.is_cuda else None
        if image is None:
            image = self.source + adjoint.operator(masked)
        return Evaluation(z, image, AdjointPoint(z, None, n, masked))

    def start(self, z0: Tensor | None) -> Evaluation:
        if z0 is not None:
            return evaluate_start(self, z0)
        y = 0 * self.source  # where g is no number y is none: a 0 would go unnoticed
        return Evaluation(y, self.source, AdjointPoint(y))

    def recover(self, at: AdjointPoint) -> tuple[Tensor, Tensor, Tensor]:
        """Return w = D(g + WᵀNy), y and Ny, in the unit of g."""
        adjoint = self.adjoint
        scaled = at.z * self.unit
        if at.n is None or at.masked is None:
            n = adjoint.hvp(scaled)
            return adjoint.masked_adjoint(n, self.g), scaled, n
        w = torch.addcmul(adjoint.mask(self.g), at.masked, self.unit)
        return w, scaled, scaled if at.n is at.z else at.n * self.unit  # N = 1 for the linear kernel


@final
@dataclasses.dataclass(frozen=True)
class StateAdjoint(AbstractSpace):
    """Iterates w ↦ Dg + DHw, linear in g too: Dg and w are in units of Dg's own size."""

    adjoint: Adjoint
    source: Tensor  # Dg
    unit: Tensor  # of source and w; a power of two a sample

    def evaluate(self, z: Tensor) -> Evaluation:
        adjoint = self.adjoint
        y = adjoint.operator(z)
        n = adjoint.hvp(y)
        g = self.source if adjoint.state_hvp is None else self.source + adjoint.state_hvp(z)
        return Evaluation(z, adjoint.masked_adjoint(n, g), AdjointPoint(z, y, n))

    def start(self, z0: Tensor | None) -> Evaluation:
        return evaluate_start(self, self.source if z0 is None else z0)

    def recover(self, at: AdjointPoint) -> tuple[Tensor, Tensor, Tensor]:
        """Return w, y = Ww and Ny, in the unit that g had."""
        w, y, n = at.z.to(self.source.dtype), at.y, at.n
        if y is None or n is None:
            y = self.adjoint.operator(w)
            n = self.adjoint.hvp(y)
        return w * self.unit, y * self.unit, n * self.unit


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

    linearises: ClassVar[bool] = True

    solver: AbstractSolver[Any] | ConjugateGradient | None = None  # None: see above; Anderson for functions
    tol: float | None = None  # None: 1e-6, or for a function what its dtype can reach
    max_steps: int = 100
    check_every: int | None = None  # as for `kerneq.solve`
    on_failure: OnFailure = "warn"

    def __post_init__(self) -> None:
        if self.solver is not None and not isinstance(self.solver, ConjugateGradient):
            check_kind("solver", self.solver, AbstractSolver)
        if isinstance(self.solver, Proximal):
            raise TypeError("`Implicit` solves a linear system, which has no energy for `Proximal`: use `Anderson`.")
        self.limits().check()

    def attach(self, f: Map, at: Point) -> Point:
        if isinstance(f, Equation) and not isinstance(self.solver, Newton):
            adjoint = Adjoint.of(f, at)
            again = () if torch.compiler.is_compiling() else f.tensors()  # for second derivatives
            inputs = (adjoint.slope.dv, f.operator.weight, adjoint.slope.dz, adjoint, self, at.backward, *again)
            z, v = _InClosedForm.apply(*inputs)  # type: ignore[no-untyped-call]
            return Point(z, v, adjoint.image, at.backward)
        if isinstance(self.solver, ConjugateGradient | InFeatures):
            name = type(self.solver).__name__
            raise TypeError(f"{name} needs the equation of a cell; give `Implicit` another solver for a function.")
        g = as_map(f)
        system = linearise_at(g, at)
        z = attach_through_graph(
            system,
            at.z.detach(),
            partial(self.solve_through, g, system, at.backward),
            ONCE,
            g.tensors(),
            partial(_differentiate_again, self, g, Point(system.z, backward=at.backward)),
        )
        return Point(z, backward=at.backward)

    def limits(self, tol: float = 1e-6) -> Limits:
        """When a backward solve ends; `tol` is that of a rule that has none."""
        return Limits(self.tol or tol, self.max_steps, self.check_every, self.on_failure)

    def solve_through(self, f: AbstractMap, system: Linearisation, record: list[Solution] | None, g: Tensor) -> Tensor:
        """Return u = Jᵀu + g, solved through the graph of f; `record` is that of the `Point`.

        It is linear in g, which may be too small or too large to be squared: so it is found for g over its size, that
        of each sample, or one for all where f does not tell them apart, for then they may meet in it.
        """
        unit = magnitude(g)
        if f.rows(torch.zeros(1, dtype=torch.long, device=g.device)) is None:
            unit = torch.where(unit.isfinite(), unit, 0.0).amax()
        g = g / unit
        if isinstance(self.solver, Newton):  # the system is linear, so one step is all
            found = self._eliminate(system, g)
        else:
            solver = self._choose_solver()
            pull, limits = (
                Function(lambda u: system.vjp(u) + g, apart=system.apart),
                self.limits(REACHABLE[system.dtype]),
            )
            found = solve_map(pull, g, solver, limits).solution
        self._report(found, record)
        return found.value * unit

    def solve_closed(self, adjoint: Adjoint, g: Tensor, record: list[Solution] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return w = D(g + Hw), solved, y = Ww and Ny; `record` is that of the `Point`."""
        system: FeatureAdjoint | StateAdjoint
        if adjoint.state_hvp is None and (self.solver is None or isinstance(self.solver, InFeatures)):
            system = adjoint.in_features(g)
            found, point = self._solve_features(system)
        else:
            system = adjoint.in_state(g)
            if self.solver is None or isinstance(self.solver, ConjugateGradient | InFeatures):
                found = self._by_conjugate_gradient(system)
                point = AdjointPoint(found.value)
            else:
                found, point = self._iterate(system)
        self._report(found, record)
        return system.recover(point)

    def _solve_features(self, system: FeatureAdjoint) -> tuple[Solution, AdjointPoint]:
        """Solve for y by iteration, and, unless a solver was chosen, what that does not solve by conjugate gradient."""
        found, point = self._iterate(system)
        fixed = check_stride(self.check_every, system.g) >= self.max_steps
        if self.solver is not None or fixed or bool(found.converged.all()):
            return found, point
        state = system.adjoint.in_state(system.g)
        exact = self._by_conjugate_gradient(state)
        y = system.adjoint.operator(exact.value.to(state.source.dtype)) * (state.unit / system.unit)
        solved = found.converged
        y = torch.where(per_sample(solved, y), found.value, y)
        residual = torch.where(solved, found.residual, exact.residual)
        steps = torch.where(solved, found.steps, exact.steps)
        codes = torch.where(solved, found.codes, exact.codes)
        return Solution(y, residual, steps, codes, found.tol), AdjointPoint(y)

    def _iterate(self, system: AbstractSpace) -> tuple[Solution, AdjointPoint]:
        end = solve_space(system, None, self._choose_solver(), self.limits())
        point = end.point if isinstance(end.point, AdjointPoint) else AdjointPoint(end.solution.value)
        return end.solution, point

    def _choose_solver(self) -> AbstractSolver[Any]:
        """Return what iterates the adjoint system, in whichever variable that is."""
        solver = self.solver.solver if isinstance(self.solver, InFeatures) else self.solver
        return solver if isinstance(solver, AbstractSolver) else Anderson()

    def _by_conjugate_gradient(self, system: StateAdjoint) -> Solution:
        stride = check_stride(self.check_every, system.source)
        b = widened(system.source)
        return conjugate_gradient(system.adjoint.symmetric, b, self.tol or 1e-6, self.max_steps, stride)

    def _eliminate(self, system: Linearisation, g: Tensor) -> Solution:
        """Solve for u; its residual is rounding, unless samples meet in f, or f is too steep for its dtype."""
        u = system.solve(g, transposed=True)
        residual, _ = relative_residual(u, system.vjp(u) + g)
        tol = max(self.tol or 1e-6, torch.finfo(g.dtype).eps ** 0.5)  # u is wider than half precision
        codes = final_codes(residual, tol)
        return Solution(u, residual, torch.ones_like(codes), codes, tol)

    def _report(self, solution: Solution, record: list[Solution] | None) -> None:
        report_failure(solution, self.on_failure, "backward")
        if record is not None:
            record.append(dataclasses.replace(solution, value=solution.value.new_empty(0)))


def _differentiate_again(
    rule: Implicit, f: AbstractMap, at: Point, u: Tensor, g: Tensor, g_v: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """Return (∂f/∂t)ᵀu for each tensor t of f that has a gradient, as a function of t and g, at z(t) and u(t, g).

    With `g_v`, which g then contains, also (∂Wz/∂t)ᵀg_v at fixed z.
    """
    z = rule.attach(f, at).z
    views = [t.view_as(t) for t in f.tensors()]  # ∂f/∂t at fixed z: z depends on the tensors, not on these views
    fixed = f.on(*views)
    with run_eager():
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


class _InClosedForm(torch.autograd.Function):
    """Forward: z as it was found, and v = Wz, as functions of m = ∂S/∂v, W and ∂S/∂z. Backward: w and y = Ww, solved.

    No graph is walked, and the last Wᵀm of the forward pass is not computed, nor what the solves have made already.
    The gradients are those of ⟨w, Wᵀm(Wz) + ∂S/∂z⟩ + ⟨∂L/∂v, Wz⟩ at fixed w and z. For a second derivative they are
    made afresh, from a z and a w that depend on the tensors of f.
    """

    @staticmethod
    def forward(
        ctx: Any,
        m: Tensor,
        weight: Tensor,
        dz: Tensor | None,
        adjoint: Adjoint,
        rule: Implicit,
        record: list[Solution] | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(m, adjoint.z, adjoint.v)  # the outputs too: whoever writes to them gets an error
        ctx.set_materialize_grads(False)
        ctx.adjoint, ctx.rule, ctx.record, ctx.count = adjoint, rule, record, len(tensors)
        return adjoint.z.view_as(adjoint.z), adjoint.v.view_as(adjoint.v)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g_v: Tensor | None) -> tuple[Tensor | None, ...]:
        m, *_ = ctx.saved_tensors
        adjoint: Adjoint = ctx.adjoint
        if g_v is not None:
            through = adjoint.f.operator.adjoint(g_v)
            g = through if g is None else g + through
        if g is None:  # nothing depends on either
            return (None,) * (6 + ctx.count)
        with torch.no_grad():
            w, y, n = ctx.rule.solve_closed(adjoint, g.detach().to(m.dtype), ctx.record)
        if torch.is_grad_enabled():
            at = Point(adjoint.z, backward=ctx.record)
            return *[None] * 6, *_differentiate_again(ctx.rule, adjoint.f, at, w, g, g_v)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            operator = adjoint.operator
            second = n if g_v is None else n + g_v
            grad_weight = operator.weight_gradient(w, m) + operator.weight_gradient(adjoint.z, second)
        return y, grad_weight, w if ctx.needs_input_grad[2] else None, *[None] * (3 + ctx.count)
