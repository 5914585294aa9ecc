"""The layer: a cell or a function, a solver and a gradient rule; `fixed_point` does the same in one call."""

import contextlib
import dataclasses
import html
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .cells import AbstractCell, AbstractKernelCell, FunctionCell, bind_function
from .gradients import AbstractGradient, AbstractSteps, Implicit, Phantom, Shine, Unrolled
from .gradients.transforms import opaque, solve_opaque
from .maps import AbstractMap, Function, Point
from .randomness import warn_of_randomness
from .solution import EquilibriumError, Limits, OnFailure, Solution, Status
from .solvers import AbstractSolver, Anderson, Proximal
from .solvers.loops import find_point, map_states, run_untraced
from .structure import Norm, Packed, Tree, keep_samples, pack_state, unpack_state
from .tensors import check_kind, in_backward, is_only_channels_last, is_transformed

SolveHook = Callable[["Equilibrium", AbstractMap, Tensor], None]
Output = Callable[[AbstractMap, Point], Tensor]  # what a layer makes of the state
Steps = int | range  # a limit; a range: one of its numbers, drawn at every call in training, and its last one otherwise
Wanted = bool | Collection[int]  # whether each step is recorded, or the states after which steps are, too


@final
class Equilibrium(nn.Module):
    """x ↦ the z* with z* = f(z*; x), as a `Solution`; its value carries gradients in `train()` and `eval()` alike.

    With the equation of a cell, f(z) = σ(d(z; x)), this is one layer of GEQ's Algorithm 1: solve, then differentiate.

        cell = kq.cells.ConvCell(kq.kernels.Gaussian(gamma=0.2), inputs=16, state=64, features=32)
        layer = kq.Equilibrium(cell, tol=1e-3)
        z = layer(torch.randn(8, 16, 32, 32)).value  # (8, 64, 32, 32)

    Or f is any module or function f(z, *inputs, **named). The state is taken to be like the first input; for another
    one `init` makes the start from the inputs. It may be a tuple, list, dict, named tuple or dataclass of tensors.

        layer = kq.Equilibrium(block)  # block(z, x) has the shape of x
        layer = kq.Equilibrium(pair, init=lambda x: (torch.zeros(len(x), 64), torch.zeros(len(x), 8)))
        s = layer(x, z0=before.detach().value)  # starts at the solution for another input

    x is (batch, ...); `solution.value` is (batch, ...), the state (or what the cell's `output` makes of it), and
    `residual`, `steps`, `converged`, `error_bound` are (batch,) and speak of the state. `batched=False`: the state has
    no batch dimension, or its samples meet in f, and it is solved as one. `norm="leaf"`: the residual of a state of
    several tensors is that of the worst one, not that of all together.

    `solver` finds z*: `Proximal()` unless given, for a function `Anderson()`. It stops at a relative residual of `tol`
    (None: 1e-3, or what the dtype can reach) or after `max_steps` evaluations. Both may be pairs, (in training, in
    evaluation), and a number of steps may be a range, of which every call in training draws one. `gradient` says how
    ∂L/∂z* reaches the parameters. `on_failure` says what happens when a sample does not converge: "return" leaves it to
    the reader of the solution, "warn" and "raise" wait for the device to find out. None is "warn" for a function that
    is solved adaptively, otherwise "return". For `check_every` see `kerneq.solve`.

    `layer(x, trace=True)` records each step, and `trace=(2, 5)` the states after these steps too: `Solution.trace`.
    Weights of f that are parametrised (`torch.nn.utils.parametrizations.weight_norm`, `spectral_norm`) are computed
    once a solve. A layer that takes a fixed number of steps (`check_every >= max_steps`) can be inside
    `torch.compile(fullgraph=True)`: with a cell in `eval()`, with a function by `Phantom` or `Unrolled`, or without
    gradients; any other is called from the compiled program. In `eval()` the layer works under the transforms of
    `torch.func` and in forward mode; their derivatives solve again.
    """

    def __init__(
        self,
        cell: AbstractCell | Callable[..., Tree],
        *,
        init: Callable[..., Tree] | None = None,
        batched: bool = True,
        norm: Norm = "joint",
        solver: AbstractSolver[Any] | None = None,
        gradient: AbstractGradient = Implicit(),  # noqa: B008  (a frozen value)
        tol: float | tuple[float | None, float | None] | None = None,
        max_steps: Steps | tuple[Steps, Steps] = 50,
        check_every: int | None = None,
        on_failure: OnFailure | None = None,
    ):
        super().__init__()
        if isinstance(cell, AbstractCell) and (init is not None or not batched or norm != "joint"):
            raise ValueError(
                "`init`, `batched` and `norm` are for a function: a cell says by itself what its state is."
            )
        self.cell = cell if isinstance(cell, AbstractCell) else FunctionCell(cell, init)
        if solver is None:
            solver = Proximal() if isinstance(cell, AbstractKernelCell) else Anderson()
        self.solver, self.gradient, self.batched, self.norm = solver, gradient, batched, norm
        self.tol, self.max_steps, self.check_every, self.on_failure = tol, max_steps, check_every, on_failure
        self.solve_hook: SolveHook | None = None  # see `hook_solves`
        self.check()

    def check(self) -> None:
        """Raise if a setting has no meaning."""
        check_kind("solver", self.solver, AbstractSolver)
        check_kind("gradient", self.gradient, AbstractGradient)
        for training in (True, False):
            tol, steps = self._pick_limits(training)
            if isinstance(steps, range):
                steps = min(steps, default=0)
            Limits(tol, steps, self.check_every, self.on_failure or "return").check()

    def _pick_limits(self, training: bool) -> tuple[float | None, Steps]:
        """Return `tol` and `max_steps` of training or of evaluation, where they are pairs."""
        tol, steps = self.tol, self.max_steps
        tol = tol[not training] if isinstance(tol, tuple) else tol
        return tol, steps[not training] if isinstance(steps, tuple) else steps

    @property
    def limits(self) -> Limits:
        """`tol`, `max_steps`, `check_every` and `on_failure` for the next solve, in training or in evaluation."""
        tol, steps = self._pick_limits(self.training)
        if isinstance(steps, range):
            steps = steps[int(torch.randint(len(steps), ())) if self.training else -1]
        on_failure = self.on_failure or "return"
        if self.on_failure is None and isinstance(self.cell, FunctionCell):
            on_failure = _choose_failure(self.gradient, self.check_every, steps)
        return Limits(tol, steps, self.check_every, on_failure)

    def extra_repr(self) -> str:
        return f"solver={self.solver}, gradient={self.gradient}, tol={self.tol}, max_steps={self.max_steps}"

    def _repr_html_(self) -> str:
        """The layer as a table, for a notebook: its equation with sizes and bound, and how it is solved."""
        parameters = f"{sum(p.numel() for p in self.parameters()):,}"
        how = {"solver": self.solver, "gradient": self.gradient, "tol": self.tol, "max_steps": self.max_steps}
        rows = {**self.cell.describe(), "parameters": parameters, **how}
        cells = (f"<tr><th>{name}</th><td>{html.escape(str(value))}</td></tr>" for name, value in rows.items())
        return f"<table>{''.join(cells)}</table>"

    def forward(self, *inputs: Any, z0: Tree = None, trace: Wanted = False, **named: Any) -> Solution:
        if torch.compiler.is_dynamo_compiling() and self._is_traceable():
            return self._run(inputs, named, z0, trace)
        if not _PENDING.get():
            return run_untraced(self._run, inputs, named, z0, trace)
        with _apply_pending(self):
            return run_untraced(self._run, inputs, named, z0, trace)

    def _is_traceable(self) -> bool:
        """Whether a compiler can follow a call: a fixed number of steps, by plain operations.

        In training the norm of W is followed by numbers that are read; `Implicit` of a function needs autograd itself.
        """
        if not _takes_fixed_steps(self.gradient, self.check_every, self.max_steps):
            return False
        if not isinstance(self.cell, FunctionCell):
            return not self.training
        return not torch.is_grad_enabled() or isinstance(self.gradient, Phantom | Unrolled)

    def _run(self, inputs: tuple[Any, ...], named: dict[str, Any], z0: Tree, trace: Wanted) -> Solution:
        if isinstance(self.cell, FunctionCell):
            return self._run_function(self.cell, inputs, named, z0, trace)
        if is_transformed():
            if z0 is not None or trace is not False:
                raise ValueError("Under `torch.func`, or forward mode, a layer of a cell takes no `z0` and no `trace`.")
            return self._transformed(*inputs)
        f = self.cell.bind(*inputs, **named)
        start = self.cell.initial(f) if z0 is None else z0
        solution, at = _solve(f, start, self.solver, self.gradient, self.limits, trace, self.cell.output)
        if self.training and not in_backward():  # gradient checkpointing computes the same layer twice
            self.cell.observe(f, at.z)
        if self.solve_hook is not None:
            self.solve_hook(self, f, at.z)
        value, error = solution.value, solution.error_bound
        if value.is_cpu and not is_only_channels_last(inputs[0]):
            value = value.contiguous()
        error = None if error is None else self.cell.output_error(f, error)
        return dataclasses.replace(solution, value=value, error_bound=error)

    def _run_function(
        self, cell: FunctionCell, inputs: tuple[Any, ...], named: dict[str, Any], z0: Tree, trace: Wanted
    ) -> Solution:
        with _cache_weights(cell):
            f = cell.bind(*inputs, **named)
            f, start = pack_state(f, cell.initial(f) if z0 is None else z0, self.batched, self.norm)
            with _explain_start(z0 is None and cell.init is None):
                solution, at = _solve_function(f, start, self.solver, self.gradient, self.limits, trace)
        if self.solve_hook is not None:
            self.solve_hook(self, f, at.z)
        return map_states(solution, partial(unpack_state, f))

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
        return Solution(value, residual, steps, codes, self.limits.tolerance(value.dtype), bound[0] if bound else None)


@final
class Value(nn.Module):
    """Returns the value of a `Solution`, between modules: `nn.Sequential(layer, kerneq.Value(), nn.ReLU())`.

    Backward hooks belong on this module: PyTorch calls only those of modules that return tensors.
    """

    def forward(self, solution: Solution) -> Tensor:
        return solution.value


def fixed_point(
    f: Callable[..., Tree],
    z0: Tree,
    *inputs: Any,
    solver: AbstractSolver[Any] = Anderson(),  # noqa: B008  (a frozen value)
    gradient: AbstractGradient = Implicit(),  # noqa: B008
    tol: float | None = None,
    max_steps: int = 50,
    check_every: int | None = None,
    on_failure: OnFailure | None = None,
    batched: bool = True,
    norm: Norm = "joint",
    trace: Wanted = False,
    **named: Any,
) -> Solution:
    """Return the z with z = f(z, *inputs, **named) for any function: a `Solution` whose value carries gradients.

    z0, where the solve starts, is a tensor (batch, ...), or a tuple, list, dict, named tuple or dataclass of them, and
    the value is the same. The gradients reach all that f depends on, parameters and inputs, by the rule `gradient`;
    `solve` alone does the same without gradients.

        s = kq.fixed_point(lambda z, x: torch.tanh(linear(z) + x), torch.zeros_like(x), x)
        s.value.sum().backward()

    Where all tensors among the inputs have the batch as their first dimension, samples that have converged leave the
    computation. With inputs, and with an f that is a module, its gradients can be differentiated again, and
    `torch.func` and forward mode go through. For the other settings see `Equilibrium`.
    """
    check_kind("solver", solver, AbstractSolver)
    check_kind("gradient", gradient, AbstractGradient)
    on_failure = on_failure or _choose_failure(gradient, check_every, max_steps)
    limits = Limits(tol, max_steps, check_every, on_failure).check()

    def run() -> Solution:
        with _cache_weights(f if isinstance(f, nn.Module) else None):
            g, start = pack_state(bind_function(f, inputs, named), z0, batched, norm)
            solution, _ = _solve_function(g, start, solver, gradient, limits, trace)
            return map_states(solution, partial(unpack_state, g))

    return run_untraced(run)


def attach(
    f: Callable[..., Tree],
    z: Tree,
    *inputs: Any,
    gradient: AbstractGradient = Implicit(),  # noqa: B008  (a frozen value)
    batched: bool = True,
    **named: Any,
) -> Tree:
    """Return z, an equilibrium z = f(z, *inputs, **named) found elsewhere, with a gradient path into all behind f.

    z (batch, ...) is a tensor or a structure of tensors, as for `fixed_point`, and is returned as such.
    """
    check_kind("gradient", gradient, AbstractGradient)
    g, start = pack_state(bind_function(f, inputs, named), z, batched, "joint")
    assert start is not None
    return unpack_state(g, gradient.attach(g, Point(start.detach())).z)


def _solve_function(
    f: AbstractMap,
    z0: Tensor | None,
    solver: AbstractSolver[Any],
    gradient: AbstractGradient,
    limits: Limits,
    trace: Wanted,
) -> tuple[Solution, Point]:
    """Solve z = f(z) and attach the gradient, under the transforms of `torch.func` too."""
    if not is_transformed():
        return _solve(f, z0, solver, gradient, limits, trace)
    if trace is not False:
        raise ValueError("Under `torch.func`, or forward mode, a solve leaves no `trace`.")
    return solve_opaque(f, z0, lambda f, z0: _solve(f, z0, solver, gradient, limits, False)[0])


def _solve(
    f: AbstractMap,
    z0: Tensor | None,
    solver: AbstractSolver[Any],
    gradient: AbstractGradient,
    limits: Limits,
    trace: Wanted,
    output: Output = lambda f, at: at.z,
) -> tuple[Solution, Point]:
    """Solve z = f(z) and attach the gradient; return the solution, and the point that was found, without gradients."""
    if isinstance(gradient, AbstractSteps):  # those steps are the value, validated as they are trained
        solver = gradient.choose_solver(f)
        limits = dataclasses.replace(limits, max_steps=gradient.steps, check_every=gradient.steps)
        z0 = None if z0 is None else torch.zeros_like(z0)
    if isinstance(gradient, Shine):
        gradient.check_solver(solver)
        f = keep_samples(f)
    free = isinstance(f, Function | Packed)
    known = () if free else f.tensors()  # a function may depend on anything
    attaches = torch.is_grad_enabled() and (len(known) == 0 or any(t.requires_grad for t in known))
    with warn_of_randomness(z0) if free else contextlib.nullcontext():
        solution, at = find_point(f, z0, solver, limits, trace, graph=attaches and gradient.linearises)
    at = dataclasses.replace(at, backward=None if torch.compiler.is_compiling() else [])
    if not attaches:
        return dataclasses.replace(solution, value=output(f, at), backward=at.backward), at
    value = _attach(gradient, f, solution, at, output)
    if solution.trace is not None:
        states = {step: gradient.attach(f, Point(z)).z for step, z in solution.trace.states.items()}
        solution = dataclasses.replace(solution, trace=dataclasses.replace(solution.trace, states=states))
    return dataclasses.replace(solution, value=value, backward=at.backward), at


def _attach(gradient: AbstractGradient, f: AbstractMap, solution: Solution, at: Point, output: Output) -> Tensor:
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


def _choose_failure(gradient: AbstractGradient, check_every: int | None, steps: object) -> OnFailure:
    """Return what a failed solve of a function does unless told: it warns, where its residual is read anyway."""
    return "return" if _takes_fixed_steps(gradient, check_every, steps) else "warn"


def _takes_fixed_steps(gradient: AbstractGradient, check_every: int | None, steps: object) -> bool:
    """Whether a solve reads no residual on its way: what a compiler can trace and a CUDA graph can hold."""
    return isinstance(gradient, AbstractSteps) or (isinstance(steps, int) and (check_every or 0) >= steps)


@contextlib.contextmanager
def _cache_weights(module: nn.Module | None) -> Iterator[None]:
    """Compute the parametrised weights of this module once, with their graph: a solve and its gradient share them."""
    modules = [] if module is None else [m for m in module.modules() if parametrize.is_parametrized(m)]
    if not modules or is_transformed():
        yield
        return
    with parametrize.cached():
        for m in modules:
            for name in m.parametrizations:  # type: ignore[union-attr]
                getattr(m, name)
        yield


@contextlib.contextmanager
def _explain_start(inferred: bool) -> Iterator[None]:
    """Add to an error that f raises that the shape of the state was inferred, where it was."""
    try:
        yield
    except Exception as error:
        if inferred and not isinstance(error, EquilibriumError | Warning):  # those of a solve that ran
            error.add_note("The layer started at zeros like its first input; for another state give `init=` or `z0=`.")
        raise


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


_PENDING: ContextVar[tuple[Callable[[nn.Module], Any], ...]] = ContextVar("pending", default=())  # see `solving`


@contextlib.contextmanager
def solving(
    model: nn.Module | None = None,
    *,
    solver: AbstractSolver[Any] | None = None,
    tol: float | None = None,
    max_steps: int | None = None,
    gradient: AbstractGradient | None = None,
    on_failure: OnFailure | None = None,
    exact: bool = False,
) -> Iterator[None]:
    """Inside this context, solve and differentiate every equilibrium layer as given; None changes nothing.

        with kq.solving(max_steps=4):
            logits = model(x)

    These are the layers of `model`, or without one all that are called inside the context.

    `exact` sets the implicit gradient to a residual of 1e-5, by the layer's own backward solver if it has one, and
    turns off TF32, which rounds to three digits. A layer with an unrolled gradient is its steps, and keeps them.
    """
    if exact and gradient is not None:
        raise ValueError(f"`exact` is a gradient of its own: give either it or `gradient`, got both, {gradient!r}.")
    if model is None:
        settings = {"solver": solver, "tol": tol, "max_steps": max_steps, "gradient": gradient}
        pending = partial(solving, **settings, on_failure=on_failure, exact=exact)  # type: ignore[arg-type]
        token = _PENDING.set((*_PENDING.get(), pending))
        try:
            yield
        finally:
            _PENDING.reset(token)
        return
    layers, tf32 = layers_of(model), torch.backends.cudnn.allow_tf32
    before = [(layer.solver, layer.tol, layer.max_steps, layer.gradient, layer.on_failure) for layer in layers]
    try:
        torch.backends.cudnn.allow_tf32 = tf32 and not exact
        for layer in layers:
            layer.solver = layer.solver if solver is None else solver
            layer.tol = layer.tol if tol is None else tol
            layer.on_failure = on_failure or layer.on_failure
            layer.max_steps = layer.max_steps if max_steps is None else max_steps
            layer.gradient = _exact_rule(layer.gradient) if exact else gradient or layer.gradient
            layer.check()
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = tf32
        for layer, old in zip(layers, before, strict=True):
            layer.solver, layer.tol, layer.max_steps, layer.gradient, layer.on_failure = old


@contextlib.contextmanager
def _apply_pending(layer: Equilibrium) -> Iterator[None]:
    """Set up this layer as the contexts around its call say that have no model."""
    with contextlib.ExitStack() as stack:
        for context in _PENDING.get():
            stack.enter_context(context(layer))
        yield


def is_pending() -> bool:
    """Whether a context around sets up all layers that are called."""
    return bool(_PENDING.get())


def _exact_rule(rule: AbstractGradient) -> AbstractGradient:
    """Return the exact gradient of what a layer with this rule computes: its equilibrium, or its unrolled steps."""
    if isinstance(rule, AbstractSteps):
        return rule
    implicit = rule if isinstance(rule, Implicit) else Implicit(Anderson())
    return dataclasses.replace(implicit, tol=1e-5, max_steps=50, check_every=None, on_failure="return")
