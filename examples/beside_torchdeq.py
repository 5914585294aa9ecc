"""The showcases by both libraries: a table of kerneq and torchdeq for each, `python examples/beside_torchdeq.py NAME`.

A showcase trains with `Layer=kerneq.Equilibrium`; then with `Torchdeq`, whose solver is the fastest of torchdeq's that
reaches the tolerance on the map that kerneq trained. There all of them take one training step of the layer, from the
same start to the same residual: residuals are measured here, on the state that each library returns, and since the
state that torchdeq returns is ahead of the one at which it stops, it stops there at the loosest of `LOOSER` that does.
"""

import argparse
import dataclasses
import gc
import importlib
import importlib.util
import os
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch: its profiler, which counts the memory, is talkative

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import kerneq as kq

SOLVERS = ("fixed_point_iter", "anderson", "broyden")
TIMES = 3  # a step is taken; the shortest counts
LOOSER = (1000.0, 300.0, 100.0, 30.0, 10.0, 3.0, 1.0)  # times tol


# What `train` of each returns: its layer, inputs at which the libraries are compared, and how good the model is.
Trained = tuple[nn.Module, tuple[Any, ...], str]
# The title of what it is good at, and the arguments of `train`.
SHOWCASES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "text_transformer": ("a letter, unseen", (48, 150)),
    "graph_chains": ("right, new chains", (30, 100)),
    "implicit_picture": ("fidelity (PSNR)", (48, 150, {})),
    "flow_two_states": ("error, new pairs", (24, 150, {})),
    "prefix_sums": ("strings right", (12, 300)),
    "restore_pictures": ("another photograph", (False, 150, {})),
}


@dataclasses.dataclass
class Found:
    """What `Torchdeq` returns, with the names of a `kerneq.Solution`."""

    value: Any
    steps: Tensor


class Torchdeq(nn.Module):
    """torchdeq's layer with the arguments of `kerneq.Equilibrium` and the same stopping rule and limits.

    `solver` is kerneq's and ignored, `method` is torchdeq's.
    It has no states of dicts and dataclasses, and none without a batch: such a state gets a batch of one.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        *,
        method: str,
        looser: float = 1.0,
        solver: object = None,
        gradient: kq.gradients.Implicit = kq.gradients.Implicit(),  # noqa: B008  (a frozen value)
        init: Callable[..., Any] | None = None,
        batched: bool = True,
        tol: float = 1e-3,
        max_steps: int | tuple[int, int] = 50,
    ):
        super().__init__()
        from torchdeq import get_deq

        self.cell, self.init, self.batched, self.tol = kq.cells.FunctionCell(f), init, batched, tol
        train, test = max_steps if isinstance(max_steps, tuple) else (max_steps, max_steps)
        rules = {
            "f_tol": looser * tol,
            "b_tol": gradient.tol or 1e-5,
            "f_stop_mode": "rel",
            "b_stop_mode": "rel",
            "ift": True,
        }
        limits = {"f_max_iter": train, "eval_f_max_iter": test, "b_max_iter": gradient.max_steps}
        self.deq = get_deq(f_solver=method, b_solver=method, **rules, **limits)

    def forward(self, *inputs: Any, z0: Any = None) -> Found:
        f = self.cell.f
        if z0 is None:
            z0 = torch.zeros_like(inputs[0]) if self.init is None else self.init(*inputs)
        with parametrize.cached():  # normalised weights once a solve, as torchdeq's own `apply_norm` has them
            for module in self.modules():
                if parametrize.is_parametrized(module):
                    [getattr(module, name) for name in module.parametrizations]  # here, with their graph
            if not self.batched:
                values, info = self.deq(lambda z: f(z[0], *inputs)[None], z0[None])
                return Found(values[-1][0], info["nstep"])
            values, info = self.deq(lambda *z: f(z if len(z) > 1 else z[0], *inputs), z0)
        return Found(tuple(values[-1]) if isinstance(z0, tuple) else values[-1], info["nstep"])


def compare(train: Callable[..., Trained], metric: str) -> None:
    """Train with both libraries and print the table."""
    seconds, (layer, inputs, words) = _timed(lambda: train(Layer=kq.Equilibrium))
    print(f"{'':28s} {metric:>20s} {'training':>10s} {'a step':>10s} {'peak':>10s} {'residual':>10s} {'steps':>6s}")
    name = type(layer.solver).__name__
    _show(f"kerneq, {name}", words, seconds, _measure(layer, inputs))
    if importlib.util.find_spec("torchdeq") is None:
        print("torchdeq is not installed: `pip install torchdeq` for the other half of this table.")
        return
    looser = {name: find_tolerance(layer, name, inputs) for name in SOLVERS}
    rows = {name: _measure(like(layer, name, times or 1.0), inputs) for name, times in looser.items()}
    best = min((name for name in SOLVERS if looser[name]), key=lambda name: rows[name][0], default=None)
    for name, row in rows.items():
        if name == best:
            seconds, (_, _, words) = _timed(lambda name=name: train(Layer=partial(Torchdeq, method=name)))
            _show(f"torchdeq, {name}", words, seconds, row)
        else:
            _show(f"torchdeq, {name}", "(slower)" if looser[name] else "(not reached)", None, row)


def like(layer: kq.Equilibrium, method: str, looser: float) -> Torchdeq:
    """Return torchdeq's layer of the same function."""
    return Torchdeq(
        layer.cell.f,
        method=method,
        looser=looser,
        gradient=layer.gradient,
        init=layer.cell.init,
        batched=layer.batched,
        tol=layer.tol or 1e-3,
        max_steps=layer.max_steps,
    )


def find_tolerance(layer: kq.Equilibrium, method: str, inputs: tuple[Any, ...]) -> float | None:
    """Return the largest of `LOOSER` at which the state that torchdeq returns has the residual asked for."""
    for looser in LOOSER:
        theirs = like(layer, method, looser)
        if find_residual(theirs, inputs)[0] <= theirs.tol:
            return looser
    return None


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    found = call()
    return time.perf_counter() - started, found


def step(layer: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """Solve and differentiate once, as in training; return the solution."""
    layer.zero_grad()
    solution = layer.train()(*inputs)
    leaves = solution.value if isinstance(solution.value, tuple) else (solution.value,)
    sum(leaf.square().sum() for leaf in leaves).backward()
    return solution


def _measure(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[float, float, float, int]:
    """Return seconds and peak MiB of a training step, the worst residual of its value, and its steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a tolerance was missed stands in the table
        residual, steps = find_residual(layer, inputs)
        step(layer, inputs)
        seconds = min(_timed(lambda: step(layer, inputs))[0] for _ in range(TIMES))
        layer.zero_grad()
        return seconds, peak(lambda: step(layer, inputs)), residual, steps


def peak(call: Callable[[], Any]) -> float:
    """Return the MiB that a call holds at most, from the profiler: PyTorch's CPU allocator has no counters."""
    gc.collect()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = highest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest / 2**20


def find_residual(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[float, int]:
    """Solve as in training; return the largest ‖f(z) − z‖ / ‖f(z)‖ of a sample, and its steps."""

    def flat(state: Any) -> Tensor:
        leaves = state if isinstance(state, tuple) else (state,)
        return torch.cat([t.reshape(len(t) if layer.batched else 1, -1) for t in leaves], 1)

    solution, f = layer.train()(*inputs), layer.cell.f
    with torch.no_grad():
        z, image = (
            flat(solution.value),
            flat(f.eval()(solution.value, *inputs)),
        )  # in `train()` a spectral norm moves on
    f.train()
    return float(((image - z).norm(dim=1) / image.norm(dim=1)).max()), int(solution.steps.max())


def _show(name: str, metric: str, seconds: float | None, row: tuple[float, float, float, int]) -> None:
    trained = "" if seconds is None else f"{seconds:.1f} s"
    ms, held, residual, steps = row[0] * 1e3, *row[1:]
    print(f"{name:28s} {metric:>20s} {trained:>10s} {ms:7.1f} ms {held:6.1f} MiB {residual:10.1e} {steps:6d}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=", ".join(SHOWCASES))
    for showcase in parser.parse_args().names or SHOWCASES:
        title, arguments = SHOWCASES[showcase]
        print(showcase)
        compare(partial(importlib.import_module(showcase).train, *arguments), title)
