"""Models of users: the map of every showcase in examples/, by kerneq and by torchdeq's fastest solver."""

import copy
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import kerneq as kq

from .measure import SPREAD, Call, Setup, columns, compare
from .results import BenchmarkError, Result, ratio

EXAMPLES = Path(__file__).parent.parent / "examples"
# The arguments of `train` of each: fewer steps than the showcase takes, enough for a map as it is in training.
SHOWCASES: dict[str, tuple[Any, ...]] = {
    "text_transformer": (48, 60),
    "graph_chains": (30, 60),
    "implicit_picture": (48, 60, {}),
    "flow_two_states": (24, 60, {}),
    "prefix_sums": (12, 300),
    "restore_pictures": (False, 60, {}),
}
QUICK: dict[str, tuple[Any, ...]] = {"graph_chains": (4, 5), "prefix_sums": (4, 20)}


def bench_own(setup: Setup) -> Iterator[Result]:
    """Every showcase's layer forward and backward, beside torchdeq's fastest solver at the same residual."""
    if setup.cuda:
        raise BenchmarkError("the showcases are small and made for a CPU: give --device cpu.")
    if importlib.util.find_spec("torchdeq") is None:
        raise BenchmarkError("torchdeq is not installed: `pip install torchdeq`.")
    sys.path.insert(0, str(EXAMPLES))
    try:
        for name, arguments in (QUICK if setup.quick else SHOWCASES).items():
            yield _measure(name, arguments, setup)
    finally:
        sys.path.remove(str(EXAMPLES))


def _measure(name: str, arguments: tuple[Any, ...], setup: Setup) -> Result:
    """Train one showcase by kerneq, then take training steps of its layer by all solvers in turns."""
    beside = importlib.import_module("beside_torchdeq")
    setup.progress(f"{name}: training")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what did not converge stands in the table
        layer, inputs, _ = importlib.import_module(name).train(*arguments)
        layers = {"kerneq, by default": _default(layer)}
        if repr(layer.solver) != repr(layers["kerneq, by default"].solver):
            layers[f"kerneq, {type(layer.solver).__name__}"] = layer
        reached = {method: beside.find_tolerance(layer, method, inputs) for method in beside.SOLVERS}
        layers |= {f"torchdeq, {m}": beside.like(layer, m, looser or 1.0) for m, looser in reached.items()}
        found = {key: beside.find_residual(each, inputs) for key, each in layers.items()}
        calls: dict[str, Call] = {key: partial(beside.step, each, inputs) for key, each in layers.items()}
        costs, _ = compare(calls, setup, name)
    working = [f"torchdeq, {method}" for method, looser in reached.items() if looser]
    best = min(working, key=lambda key: costs[key].eager.seconds, default=None)
    rows = []
    for key, cost in costs.items():
        (residual, steps), other = found[key], costs[best] if best else None
        rows.append(
            {
                "layer": key,
                **columns(cost.eager),
                "÷ torchdeq's best": ratio(cost.eager.seconds, other.eager.seconds if other else None),
                "peak (MiB)": cost.peak / 2**20,
                "peak ÷ torchdeq's best": ratio(cost.peak, other.peak if other else None),
                "residual": residual,
                "steps": float(steps),
            }
        )
    notes = (
        "A training step of the layer, forward and backward, on the map that the showcase has trained, float32.",
        f"Solved to {layer.tol or 1e-3:g}, measured on the state that is returned; torchdeq with the loosest tolerance "
        "that reaches it. Backward both to the same tolerance, within as many steps.",
        "torchdeq's best: the fastest of its solvers that reach it.",
        SPREAD,
    )
    return Result("own", f"examples/{name}.py", rows, notes, {"table": name})


def _default(layer: kq.Equilibrium) -> kq.Equilibrium:
    """Return the layer with the solvers that kerneq chooses for a function it knows nothing of, and the same limits."""
    default, rule = copy.copy(layer), layer.gradient
    default.solver = kq.solvers.Anderson()
    if isinstance(rule, kq.gradients.Implicit):
        default.gradient = kq.gradients.Implicit(tol=rule.tol, max_steps=rule.max_steps, on_failure="return")
    default.on_failure = "return"
    return default
