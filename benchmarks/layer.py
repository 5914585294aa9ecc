"""One equilibrium layer, forward and backward, by solver and gradient rule; beside torchdeq on the same equation."""

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import kerneq as kq

from .measure import SPREAD, Call, Setup, columns, compare
from .problems import PRECISION, Problem, conv
from .results import Result

TOL, MAX_STEPS = 1e-3, 50
CLOSE = 1e-2  # a gradient with a larger error is not compared
SOLVERS: dict[str, kq.solvers.AbstractSolver[Any]] = {
    "Picard": kq.solvers.Picard(),
    "Proximal": kq.solvers.Proximal(),
    "Anderson(5)": kq.solvers.Anderson(5),
}
GRADIENTS: dict[str, kq.gradients.AbstractGradient] = {
    "Implicit": kq.gradients.Implicit(tol=TOL, max_steps=MAX_STEPS, on_failure="return"),
    "Implicit, conjugate gradient": kq.gradients.Implicit(
        kq.gradients.ConjugateGradient(), tol=TOL, max_steps=MAX_STEPS, on_failure="return"
    ),
    "Implicit, in features": kq.gradients.Implicit(
        kq.gradients.InFeatures(), tol=TOL, max_steps=MAX_STEPS, on_failure="return"
    ),
    "Phantom(5)": kq.gradients.Phantom(),
}
DEFAULT = "Proximal; Implicit"  # what `kq.Equilibrium(cell)` does
EXACT = "Proximal; Implicit, conjugate gradient"  # whose gradient the others are compared with
TORCHDEQ: dict[str, dict[str, Any]] = {
    "torchdeq fixed_point_iter, ift": {"f_solver": "fixed_point_iter", "b_solver": "fixed_point_iter", "ift": True},
    "torchdeq anderson, ift": {"f_solver": "anderson", "b_solver": "anderson", "ift": True},
    "torchdeq anderson, phantom 5": {"f_solver": "anderson", "grad": 5, "tau": 0.8},
}


def bench_layer(setup: Setup) -> Iterator[Result]:
    """One equilibrium layer forward and backward, by gradient rule, beside torchdeq on the same equation."""
    batch, size = (128 if setup.cuda else 8), 32
    if setup.quick:
        batch, size = 2, 8
    for norm in (1.0,) if setup.quick else (1.0, 2.0):
        yield _table(conv(setup.device, norm, batch, size), setup)
    yield _measure_tutorial(setup, batch, size)


def _table(problem: Problem, setup: Setup) -> Result:
    f, z0 = problem.bind()
    bare = torch.no_grad()(partial(f, z0))
    calls = _layers(problem)
    gradients = {name: call() for name, call in calls.items()}
    exact = gradients[EXACT]
    error = {name: float((gradient - exact).norm() / exact.norm()) for name, gradient in gradients.items()}
    costs, _ = compare({"bare f": bare, **calls}, setup, f"L = {problem.norm**2:g}")
    one = costs["bare f"].eager.seconds
    accurate = [costs[name] for name in TORCHDEQ if name in calls and error[name] < CLOSE]
    best = min(accurate, key=lambda cost: cost.eager.seconds, default=None)
    rows = []
    for name in calls:
        timing, peak = costs[name].eager, costs[name].peak
        rows.append(
            {
                "layer": name,
                **columns(timing),
                "÷ bare f": timing.seconds / one,
                "÷ torchdeq's best": timing.seconds / best.eager.seconds if best else None,
                "peak (MiB)": peak / 2**20,
                "peak ÷ torchdeq's best": peak / best.peak if best else None,
                "gradient off by": error[name],
            }
        )
    batch, _, size, _ = problem.x.shape
    title = f"Forward + backward, L = {problem.norm**2:g}, batch {batch}, 256 × {size} × {size} states, float32"
    notes = (
        f"Solved to a relative residual of {TOL:g}, at most {MAX_STEPS} steps, forward and backward.",
        f"÷ bare f: in bare evaluations of the map without gradients, {1e3 * one:.3g} ms each.",
        f"gradient off by: relative difference of ∂L/∂W to that of `{EXACT}` (the tolerance shows in it).",
        f"torchdeq's best: the fastest of its rows whose gradient is off by less than {CLOSE:g}.",
        SPREAD,
        PRECISION,
    )
    return Result("layer", title, rows, notes, {"table": "layer", "L": problem.norm**2, "batch": batch})


def _layers(problem: Problem) -> dict[str, Callable[[], Tensor]]:
    """Every pair of solver and gradient rule, and torchdeq's where it is installed: calls that return ∂L/∂W."""
    calls: dict[str, Callable[[], Tensor]] = {}
    for solver_name, solver in SOLVERS.items():
        for gradient_name, gradient in GRADIENTS.items():
            layer = kq.Equilibrium(problem.cell, solver=solver, gradient=gradient, tol=TOL, max_steps=MAX_STEPS)
            calls[f"{solver_name}; {gradient_name}"] = partial(_gradient, problem, partial(_forward, layer))
    if importlib.util.find_spec("torchdeq") is not None:
        for name, settings in TORCHDEQ.items():
            calls[name] = partial(_gradient, problem, _torchdeq(problem, settings))
    return calls


def _gradient(problem: Problem, forward: Callable[[Tensor], Tensor]) -> Tensor:
    """∂L/∂W of L = ½‖z*‖²."""
    problem.cell.zero_grad(set_to_none=True)
    torch.autograd.backward(forward(problem.x).square().sum() / 2)
    gradient = problem.cell.operator.weight.grad
    assert gradient is not None
    return gradient


def _forward(layer: kq.Equilibrium, x: Tensor) -> Tensor:
    value: Tensor = layer(x).value
    return value


def _torchdeq(problem: Problem, settings: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    deq = _get_deq(settings, TOL, MAX_STEPS)

    def forward(x: Tensor) -> Tensor:
        f = problem.cell.bind(x)
        states, _ = deq(lambda z: f(z), torch.zeros_like(f.evaluate(None).image))
        value: Tensor = states[-1]
        return value

    return forward


def _get_deq(settings: dict[str, Any], tol: float, max_steps: int) -> Any:
    """torchdeq's layer, to a relative residual forward and backward."""
    from torchdeq import get_deq

    limits = {"f_max_iter": max_steps, "b_max_iter": max_steps, "f_tol": tol, "b_tol": tol}
    return get_deq(**settings, **limits, f_stop_mode="rel", b_stop_mode="rel").train()


# A user's function: the cell of the deep implicit layers tutorial, with which torchdeq's examples begin


class TutorialCell(nn.Module):
    """A residual block with group norms: norm(relu(z + norm(x + conv(norm(relu(conv(z)))))))."""

    def __init__(self, channels: int = 48, inner: int = 64):
        super().__init__()
        self.first = nn.Conv2d(channels, inner, 3, padding=1, bias=False)
        self.second = nn.Conv2d(inner, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for width in (inner, channels, channels))
        for convolution in (self.first, self.second):
            nn.init.normal_(convolution.weight, std=0.01)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        y = self.norms[0](self.first(z).relu())
        out: Tensor = self.norms[2]((z + self.norms[1](x + self.second(y))).relu())
        return out


def _measure_tutorial(setup: Setup, batch: int, size: int) -> Result:
    """Measure a training step of that cell, by Anderson to 1e-2 forward and backward."""
    tol, most = 1e-2, 25
    torch.manual_seed(0)
    cell = TutorialCell().to(setup.device)
    x, direction = torch.randn(2, batch, 48, size, size, device=setup.device)
    z0 = torch.zeros_like(x)
    rule = kq.gradients.Implicit(tol=tol, max_steps=most, on_failure="return")

    def ours() -> Tensor:
        return kq.fixed_point(cell, z0, x, gradient=rule, tol=tol, max_steps=most).value

    forward = {"kq.fixed_point": ours}
    if importlib.util.find_spec("torchdeq") is not None:
        name = "torchdeq anderson, ift"
        deq = _get_deq(TORCHDEQ[name], tol, most)
        forward[name] = lambda: deq(lambda z: cell(z, x), z0)[0][-1]

    def step(value: Callable[[], Tensor]) -> None:
        cell.zero_grad(set_to_none=True)
        torch.autograd.backward(value(), direction)

    calls: dict[str, Call] = {name: partial(step, value) for name, value in forward.items()}
    costs, _ = compare(calls, setup, "tutorial cell")
    rows = [{"layer": name} | columns(cost.eager) | {"peak (MiB)": cost.peak / 2**20} for name, cost in costs.items()]
    title = f"Forward + backward of a user's function, batch {batch}, 48 × {size} × {size} states, float32"
    notes = (
        "The residual block with group norms of the tutorials, by Anderson to 0.01 forward and backward.",
        SPREAD,
        PRECISION,
    )
    return Result("layer", title, rows, notes, {"table": "function", "batch": batch})
