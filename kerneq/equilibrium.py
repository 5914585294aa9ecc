"""The layer: a cell, a solver and a gradient rule; `fixed_point` does the same for any function."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import Tensor, nn

from .cells import AbstractCell
from .gradients import AbstractGradient, AbstractSteps, Implicit
from .gradients.transforms import opaque
from .maps import AbstractMap, Function, Point, as_map
from .solution import Limits, OnFailure, Solution, Status
from .solvers import AbstractSolver, Anderson, Proximal
from .solvers.loops import find_point, run_untraced
from .tensors import check_kind, in_backward, is_only_channels_last, is_transformed

SolveHook = Callable[["Equilibrium", AbstractMap, Tensor], None]
Output = Callable[[AbstractMap, Point], Tensor]  # what a layer makes of the state


@final
class Equilibrium(nn.Module):
    """x ↦ the z* with z* = σ(d(z*; x)), as a `Solution`; its value carries gradients in `train()` and `eval()` alike.

    This is one layer of GEQ's Algorithm 1: solve, then differentiate.

    x is (batch, ...) as the cell takes it; `solution.value` is (batch, ...), the state of the cell
    (or what the cell's `output` makes of it), and `residual`, `steps`, `converged`, `error_bound` are (batch,) and
    speak of the state.

        cell = kq.cells.ConvCell(kq.kernels.Gaussian(gamma=0.2), inputs=16, state=64, features=32)
        layer = kq.Equilibrium(cell, tol=1e-3)
        z = layer(torch.randn(8, 16, 32, 32)).value  # (8, 64, 32, 32)

    `solver` finds z*, to a relative residual of `tol` within `max_steps` evaluations; `gradient` says how ∂L/∂z*
    reaches the parameters. `on_failure` says what happens when a sample does not converge: "return" leaves it to the
    reader of the solution, "warn" and "raise" wait for the device after every solve to find out. For `check_every` see
    `kerneq.solve`. In `eval()` the layer works under the transforms of `torch.func` and in forward mode; their
    derivatives solve again.
    """

    def __init__(
        self,
        cell: AbstractCell,
        *,
        solver: AbstractSolver[Any] = Proximal(),  # noqa: B008  (a frozen value)
        gradient: AbstractGradient = Implicit(),  # noqa: B008
        tol: float = 1e-3,
        max_steps: int = 50,
        check_every: int | None = None,
        on_failure: OnFailure = "return",
    ):
        super().__init__()
        check_kind("cell", cell, AbstractCell)
        check_kind("solver", solver, AbstractSolver)
        check_kind("gradient", gradient, AbstractGradient)
        self.cell, self.solver, self.gradient = cell, solver, gradient
        self.tol, self.max_steps, self.check_every, self.on_failure = tol, max_steps, check_every, on_failure
        self.limits.check()
        self.solve_hook: SolveHook | None = None  # see `hook_solves`

    @property
    def limits(self) -> Limits:
        """`tol`, `max_steps`, `check_every` and `on_failure` as they are now."""
        return Limits(self.tol, self.max_steps, self.check_every, self.on_failure)

    def extra_repr(self) -> str:
        return f"solver={self.solver}, gradient={self.gradient}, tol={self.tol:g}, max_steps={self.max_steps}"

    def forward(self, x: Tensor) -> Solution:
        return run_untraced(self._run, x)

    def _run(self, x: Tensor) -> Solution:
        if is_transformed():
            return self._transformed(x)
        f = self.cell.bind(x)
        solution, at = _find(f, self.cell.initial(f), self.solver, self.gradient, self.limits)
        if self.training and not in_backward():  # gradient checkpointing computes the same layer twice
            self.cell.observe(f, at.z)
        if self.solve_hook is not None:
            self.solve_hook(self, f, at.z)
        known = f.tensors()  # empty for a map that does not say: then it may depend on anything
        wanted = torch.is_grad_enabled() and (not known or any(t.requires_grad for t in known))
        output = self.cell.output
        value = _attach(self.gradient, f, solution, at, output) if wanted else output(f, at)
        error = None if solution.error_bound is None else self.cell.output_error(f, solution.error_bound)
        if value.is_cpu and not is_only_channels_last(x):
            value = value.contiguous()
        return dataclasses.replace(solution, value=value, error_bound=error, backward=at.backward)

    def _transformed(self, x: Tensor) -> Solution:
        """Run under a transform, as a function of x, the parameters and the buffers that the transform follows."""
        if self.training:
            raise RuntimeError(
                "`torch.func`, or forward mode, needs a layer in `eval()`, got one in `train()`, which changes when it "
                "is called (it follows the norm of W): call `layer.eval()` first, or differentiate with "
                "`torch.autograd.grad`."
            )
        is_followed = torch._C._functorch.is_functorch_wrapped_tensor
        named = dict(self.named_parameters()) | {name: b for name, b in self.named_buffers() if is_followed(b)}

        def run(x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            s = torch.func.functional_call(self, dict(zip(named, tensors, strict=True)), (x,))
            return s.value, s.residual, s.steps, s.codes, *([] if s.error_bound is None else [s.error_bound])

        value, residual, steps, codes, *bound = opaque(run, x, *named.values())
        return Solution(value, residual, steps, codes, self.tol, bound[0] if bound else None)


@final
class Value(nn.Module):
    """Returns the value of a `Solution`, between modules: `nn.Sequential(layer, kerneq.Value(), nn.ReLU())`.

    Backward hooks belong on this module: PyTorch calls only those of modules that return tensors.
    """

    def forward(self, solution: Solution) -> Tensor:
        return solution.value


def fixed_point(
    f: Callable[..., Tensor],
    z0: Tensor,
    *inputs: Tensor,
    solver: AbstractSolver[Any] = Anderson(),  # noqa: B008  (a frozen value)
    gradient: AbstractGradient = Implicit(),  # noqa: B008
    tol: float = 1e-3,
    max_steps: int = 50,
    check_every: int | None = None,
    on_failure: OnFailure = "return",
) -> Solution:
    """Return the z (batch, ...) with z = f(z) for any function of a batch: a `Solution` whose value carries gradients.

    The gradients reach all that f depends on, parameters and inputs, by the rule `gradient`; the solve starts at z0.
    `solve` alone does the same without gradients.

        s = kq.fixed_point(lambda z: torch.tanh(linear(z) + x), torch.zeros_like(x))
        s.value.sum().backward()

    Inputs (batch, ...) given after z0 are passed on to f(z, x): samples that have converged then leave the computation,
    and a sample that became NaN spoils no gradient. That is for functions that treat every sample of a batch on its own
    (batch norm does not).
    """
    check_kind("solver", solver, AbstractSolver)
    check_kind("gradient", gradient, AbstractGradient)
    limits = Limits(tol, max_steps, check_every, on_failure).check()
    if is_transformed():
        raise RuntimeError(
            "`torch.func`, or forward mode, cannot go through `fixed_point`, which does not know what f depends on: "
            "use `torch.autograd.grad`, or an `Equilibrium` layer."
        )
    if isinstance(z0, Tensor) and any(not isinstance(x, Tensor) or x.shape[:1] != z0.shape[:1] for x in inputs):
        got = ", ".join(str(tuple(x.shape) if isinstance(x, Tensor) else x) for x in inputs)
        raise ValueError(f"The inputs behind `z0` must be tensors of its {len(z0)} samples, got {got}.")

    def run() -> Solution:
        g = Function(f, inputs) if inputs else as_map(f)
        solution, at = _find(g, z0, solver, gradient, limits)
        if not torch.is_grad_enabled():
            return solution
        return dataclasses.replace(solution, value=_attach(gradient, g, solution, at), backward=at.backward)

    return run_untraced(run)


def _find(
    f: AbstractMap, z0: Tensor | None, solver: AbstractSolver[Any], gradient: AbstractGradient, limits: Limits
) -> tuple[Solution, Point]:
    """Run the solver; where the gradient is that of unrolled steps, run those steps: validated as they are trained.

    As everywhere, the residual of a solve out of steps is that of the point from which its last step was made.
    """
    if isinstance(gradient, AbstractSteps):
        solver = gradient.choose_solver(f)
        limits = dataclasses.replace(limits, max_steps=gradient.steps, check_every=gradient.steps)
        z0 = None if z0 is None else torch.zeros_like(z0)
    solution, at = find_point(f, z0, solver, limits)
    return solution, dataclasses.replace(at, backward=[])


def _attach(
    gradient: AbstractGradient, f: AbstractMap, solution: Solution, at: Point, output: Output = lambda f, at: at.z
) -> Tensor:
    """Return what the layer gives for z*, with its gradient.

    Samples whose map gave no numbers have none, since a loss that masks them would get NaN; on a GPU, where finding
    them would wait for the device, all have one.
    """
    z = at.z
    if not z.is_cuda and not torch.compiler.is_compiling():
        lost = solution.codes == Status.NONFINITE.code
        kept = lost.logical_not().nonzero().flatten()
        part = f.rows(kept) if 0 < len(kept) < len(z) else None
        if part is not None:
            with torch.no_grad():
                value = output(f, at)
            found = gradient.attach(part, Point(z[kept], backward=at.backward))
            return torch.index_copy(value, 0, kept, output(part, found))
    return output(f, gradient.attach(f, at))


def layers_of(model: nn.Module) -> list[Equilibrium]:
    """Return the equilibrium layers of a model."""
    return [module for module in model.modules() if isinstance(module, Equilibrium)]


@contextlib.contextmanager
def hook_solves(model: nn.Module, hook: SolveHook) -> Iterator[None]:
    """Inside this context, every equilibrium layer of `model` calls hook(layer, f, z) after each solve.

    It gets the layer, its equation and the z* it found, in any order: on a GPU branches are solved side by side.

    with hook_solves(model, lambda layer, f, z: energies.append(f.energy(z))):
        model(x)
    """
    layers = layers_of(model)
    before = [layer.solve_hook for layer in layers]
    for layer in layers:
        layer.solve_hook = hook
    try:
        yield
    finally:
        for layer, old in zip(layers, before, strict=True):
            layer.solve_hook = old


@contextlib.contextmanager
def solving(
    model: nn.Module,
    *,
    tol: float | None = None,
    max_steps: int | None = None,
    gradient: AbstractGradient | None = None,
    exact: bool = False,
) -> Iterator[None]:
    """Inside this context, solve and differentiate every equilibrium layer of `model` as given; None changes nothing.

        with solving(model, max_steps=4):
            logits = model(x)

    `exact` sets the implicit gradient to a residual of 1e-5, by the layer's own backward solver if it has one, and
    turns off TF32, which rounds to three digits. A layer with an unrolled gradient is its steps, and keeps them.
    """
    if exact and gradient is not None:
        raise ValueError(f"`exact` is a gradient of its own: give either it or `gradient`, got both, {gradient!r}.")
    layers = layers_of(model)
    before, tf32 = [(layer.tol, layer.max_steps, layer.gradient) for layer in layers], torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = tf32 and not exact
        for layer in layers:
            layer.tol = layer.tol if tol is None else tol
            layer.max_steps = layer.max_steps if max_steps is None else max_steps
            layer.gradient = _exact_rule(layer.gradient) if exact else gradient or layer.gradient
            layer.limits.check()
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = tf32
        for layer, settings in zip(layers, before, strict=True):
            layer.tol, layer.max_steps, layer.gradient = settings


def _exact_rule(rule: AbstractGradient) -> AbstractGradient:
    """Return the exact gradient of what a layer with this rule computes: its equilibrium, or its unrolled steps."""
    if isinstance(rule, AbstractSteps):
        return rule
    implicit = rule if isinstance(rule, Implicit) else Implicit(Anderson())
    return dataclasses.replace(implicit, tol=1e-5, max_steps=50, check_every=None, on_failure="return")
