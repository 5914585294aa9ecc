"""One equilibrium layer, forward and backward, by gradient rule; beside torchdeq on the same equation."""

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kerneq.bench.memory import peak_memory
from kerneq.bench.problems import conv
from kerneq.bench.table import Result
from kerneq.bench.timing import alternate, effort
from kerneq.cells.base import AbstractKernelCell
from kerneq.equilibrium import Equilibrium
from kerneq.gradients import AbstractGradient, ConjugateGradient, Implicit, InFeatures, Phantom
from kerneq.solvers import AbstractSolver, Anderson, Picard, Proximal

TOL, MAX_STEPS = 1e-3, 50
RULES: dict[str, AbstractGradient] = {
    "Implicit, conjugate gradient": Implicit(ConjugateGradient(), tol=TOL, max_steps=MAX_STEPS, on_failure="return"),
    "Implicit, in features": Implicit(InFeatures(), tol=TOL, max_steps=MAX_STEPS, on_failure="return"),
    "Phantom(5)": Phantom(),
}
SOLVERS: dict[str, AbstractSolver[Any]] = {"Picard": Picard(), "Proximal": Proximal(), "Anderson(5)": Anderson(5)}
PEERS: dict[str, dict[str, Any]] = {
    "torchdeq fixed_point_iter, ift": {"f_solver": "fixed_point_iter", "b_solver": "fixed_point_iter", "ift": True},
    "torchdeq anderson, ift": {"f_solver": "anderson", "b_solver": "anderson", "ift": True},
    "torchdeq anderson, phantom 5": {"f_solver": "anderson", "grad": 5, "tau": 0.8},
}


def bench_layer(device: torch.device, quick: bool) -> Iterator[Result]:
    batch = 256 if device.type == "cuda" else (4 if quick else 16)
    for norm in (1.0, 2.0):
        cell, x = conv(device, norm, batch)
        works: dict[str, Callable[[], Tensor]] = {}
        for solver_name, solver in SOLVERS.items():
            for rule_name, rule in RULES.items():
                layer = Equilibrium(cell, solver=solver, gradient=rule, tol=TOL, max_steps=MAX_STEPS)
                works[f"{solver_name}; {rule_name}"] = _step(partial(_value, layer), cell, x)
        if importlib.util.find_spec("torchdeq") is not None:
            works |= {name: _peer(settings, cell, x) for name, settings in PEERS.items()}
        times = alternate(dict(works), device, *effort(device, quick))
        gradients = {name: work() for name, work in works.items()}
        exact = gradients["Proximal; Implicit, conjugate gradient"]
        best = min((t.seconds for name, t in times.items() if name.startswith("torchdeq")), default=None)
        rows = [
            {
                "layer": name,
                "time (ms)": 1e3 * times[name].seconds,
                "÷ torchdeq's best": times[name].seconds / best if best else None,
                "peak (MiB)": peak_memory(work, device) / 2**20,
                "gradient off by": float((gradients[name] - exact).norm() / exact.norm()),
            }
            for name, work in works.items()
        ]
        title = f"forward + backward, L = {norm**2:g}, batch {batch}, 256 × 32 × 32 states, float32"
        notes = (
            f"Solved to a relative residual of {TOL:g}, at most {MAX_STEPS} steps, forward and backward.",
            "gradient off by: relative difference of ∂L/∂W to the first Proximal row (the tolerance shows in it).",
        )
        yield Result("layer", title, rows, notes)


def _value(layer: Equilibrium, x: Tensor) -> Tensor:
    value: Tensor = layer(x).value
    return value


def _step(forward: Callable[[Tensor], Tensor], cell: AbstractKernelCell, x: Tensor) -> Callable[[], Tensor]:
    """∂L/∂W of L = ½‖z*‖²."""

    def work() -> Tensor:
        cell.zero_grad(set_to_none=True)
        torch.autograd.backward(forward(x).square().sum() / 2)
        gradient = cell.operator.weight.grad
        assert gradient is not None
        return gradient

    return work


def _peer(settings: dict[str, Any], cell: AbstractKernelCell, x: Tensor) -> Callable[[], Tensor]:
    from torchdeq import get_deq

    limits = {"f_max_iter": MAX_STEPS, "b_max_iter": MAX_STEPS, "f_tol": TOL, "b_tol": TOL}
    deq = get_deq(**settings, **limits, f_stop_mode="rel", b_stop_mode="rel").train()

    def forward(x: Tensor) -> Tensor:
        f = cell.bind(x)
        states, _ = deq(lambda z: f(z), cell.initial(f))
        value: Tensor = states[-1]
        return value

    return _step(forward, cell, x)
