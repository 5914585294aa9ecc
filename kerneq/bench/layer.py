"""One equilibrium layer, forward and backward, by gradient rule; beside torchdeq on the same equation."""

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kerneq.bench.memory import peak_memory
from kerneq.bench.problems import PRECISION, conv
from kerneq.bench.table import Result
from kerneq.bench.timing import Bench, alternate
from kerneq.cells.base import AbstractKernelCell
from kerneq.equilibrium import Equilibrium
from kerneq.gradients import AbstractGradient, ConjugateGradient, Implicit, InFeatures, Phantom
from kerneq.solvers import AbstractSolver, Anderson, Picard, Proximal

TOL, MAX_STEPS = 1e-3, 50
CLOSE = 1e-2  # a gradient further off than this is no rival
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


def bench_layer(bench: Bench) -> Iterator[Result]:
    batch, size = (128 if bench.cuda else 8), 32
    if bench.quick:
        batch, size = 2, 8
    for norm in (1.0,) if bench.quick else (1.0, 2.0):
        cell, x = conv(bench.device, norm, batch, size)
        works = _layers(cell, x)
        gradients = {name: work() for name, work in works.items()}
        bare = _bare(cell, x)
        times = alternate({"bare f": bare, **works}, bench, f"L = {norm**2:g}")
        one = times["bare f"].seconds
        exact = gradients["Proximal; Implicit, conjugate gradient"]
        off = {name: float((gradient - exact).norm() / exact.norm()) for name, gradient in gradients.items()}
        peers = {name: times[name].seconds for name in works if name.startswith("torchdeq") and off[name] < CLOSE}
        best = min(peers, key=lambda name: peers[name], default=None)
        peaks = {name: peak_memory(work, bench.device) for name, work in works.items()}
        rows = [
            {
                "layer": name,
                "time (ms)": 1e3 * times[name].seconds,
                "÷ bare f": times[name].seconds / one,
                "÷ torchdeq's best": times[name].seconds / times[best].seconds if best else None,
                "peak (MiB)": peaks[name] / 2**20,
                "peak ÷ torchdeq's best": peaks[name] / peaks[best] if best else None,
                "gradient off by": off[name],
            }
            for name in works
        ]
        title = f"Forward + backward, L = {norm**2:g}, batch {batch}, 256 × {size} × {size} states, float32"
        notes = (
            f"Solved to a relative residual of {TOL:g}, at most {MAX_STEPS} steps, forward and backward.",
            f"÷ bare f: in bare evaluations of the map without gradients, {1e3 * one:.3g} ms each.",
            "gradient off by: relative difference of ∂L/∂W to the first Proximal row (the tolerance shows in it).",
            f"torchdeq's best: the fastest of its rows whose gradient is off by less than {CLOSE:g}.",
            PRECISION,
        )
        yield Result("layer", title, rows, notes, {"table": "layer", "L": norm**2, "batch": batch})


def _layers(cell: AbstractKernelCell, x: Tensor) -> dict[str, Callable[[], Tensor]]:
    works: dict[str, Callable[[], Tensor]] = {}
    for solver_name, solver in SOLVERS.items():
        for rule_name, rule in RULES.items():
            layer = Equilibrium(cell, solver=solver, gradient=rule, tol=TOL, max_steps=MAX_STEPS)
            works[f"{solver_name}; {rule_name}"] = _step(partial(_value, layer), cell, x)
    if importlib.util.find_spec("torchdeq") is not None:
        works |= {name: _peer(settings, cell, x) for name, settings in PEERS.items()}
    return works


def _bare(cell: AbstractKernelCell, x: Tensor) -> Callable[[], Tensor]:
    with torch.no_grad():
        f = cell.bind(x)
    z = cell.initial(f)
    return torch.no_grad()(partial(f, z))


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
