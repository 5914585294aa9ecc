"""What the showcases share: the same layer by torchdeq, the table of both, and pictures.

A showcase trains with `Layer=kerneq.Equilibrium`; then with `Torchdeq`, whose solver is the fastest of torchdeq's that
reaches the tolerance on the map that kerneq trained. There all of them take one training step of the layer, from the
same start to the same residual: residuals are measured here, on the state that each library returns, and since the
state that torchdeq returns is ahead of the one at which it stops, it stops there at the loosest of `LOOSER` that does.
"""

import dataclasses
import gc
import importlib.util
import os
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch: its profiler, which counts the memory, is talkative

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.utils import parametrize

import kerneq as kq

SOLVERS = ("fixed_point_iter", "anderson", "broyden")
TIMES = 3  # a step is taken; the shortest counts
LOOSER = (1000.0, 300.0, 100.0, 30.0, 10.0, 3.0, 1.0)  # times tol


@dataclasses.dataclass
class Trained:
    """What a showcase hands over: a layer of f, inputs at which to compare, and how well the model does, in words."""

    layer: nn.Module
    inputs: tuple[Any, ...]
    metric: str


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


def compare(train: Callable[[Any], Trained], metric: str) -> Trained:
    """Train with both libraries, print the table, and return what kerneq has trained."""
    seconds, ours = _timed(lambda: train(kq.Equilibrium))
    print(f"{'':28s} {metric:>20s} {'training':>10s} {'a step':>10s} {'peak':>10s} {'residual':>10s} {'steps':>6s}")
    name = type(ours.layer.solver).__name__
    _show(f"kerneq, {name}", ours.metric, seconds, _measure(ours.layer, ours.inputs))
    if importlib.util.find_spec("torchdeq") is None:
        print("torchdeq is not installed: `pip install torchdeq` for the other half of this table.")
        return ours
    looser = {name: find_tolerance(ours.layer, name, ours.inputs) for name in SOLVERS}
    rows = {name: _measure(like(ours.layer, name, times or 1.0), ours.inputs) for name, times in looser.items()}
    best = min((name for name in SOLVERS if looser[name]), key=lambda name: rows[name][0], default=None)
    for name, row in rows.items():
        if name == best:
            seconds, theirs = _timed(lambda name=name: train(partial(Torchdeq, method=name)))
            _show(f"torchdeq, {name}", theirs.metric, seconds, row)
        else:
            _show(f"torchdeq, {name}", "(slower)" if looser[name] else "(not reached)", None, row)
    return ours


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


def draw(pictures: dict[str, Tensor], path: Path) -> None:
    """Save pictures (height, width) or (height, width, 3) side by side."""
    figure = Figure(figsize=(2.7 * len(pictures), 3), layout="constrained")
    for axes, (name, picture) in zip(figure.subplots(1, len(pictures)), pictures.items(), strict=True):
        axes.imshow(picture.numpy(), cmap="gray")
        axes.set(title=name, xticks=[], yticks=[])
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Save a figure, in a new folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
