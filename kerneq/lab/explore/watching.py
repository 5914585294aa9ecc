"""Watch the equilibria of a trained model being found: every step of their solves, as numbers that a page can draw."""

import base64
import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, pad

from ...cells import FunctionCell
from ...certificates import certify
from ...equation import Equation
from ...equilibrium import Equilibrium, layers_of
from ...gradients import AbstractSteps, Implicit
from ...kernels.radial import Width
from ...maps import AbstractMap, Function
from ...models.baselines import MultiscaleCell
from ...settings import setting
from ...solution import Solution, Trace
from ...solvers import AbstractSolver, Anderson, Broyden, InFeatures, Picard, Proximal
from ..console import printable
from ..data import normalise
from ..evaluate import NotApplicableError, TrainedRun, check_certifiable

OWN: Literal["own"] = "own"  # the solver that the model has
Name = Literal["own", "proximal", "anderson", "picard", "picard-relaxed", "broyden", "in-features"]
SOLVERS: dict[Name, AbstractSolver[Any]] = {  # Newton's is for states of fewer numbers
    "proximal": Proximal(),
    "anderson": Anderson(),
    "picard": Picard(),
    "picard-relaxed": Picard(relaxation=0.5),
    "broyden": Broyden(),
    "in-features": InFeatures(),
}
MOST = 100  # steps
CHANNELS, SIDE = 4, 64  # channels shown beside the mean of all, and numbers in a row of a map, at most
CLASSES = 6  # shown at most, but for those that were in front at some step
TOGETHER = 8  # steps whose probabilities are computed as one batch


@final
@dataclasses.dataclass(frozen=True)
class Controls:
    """How the equilibria are to be solved."""

    solver: Name = setting(OWN, "how z = f(z) is solved")
    tol: float = setting(1e-3, "relative residual at which a solve ends", low=1e-8, high=1)
    steps: int = setting(30, "evaluations of f in a solve, at most", low=1, high=MOST)
    width: float = setting(1.0, "factor of every γ of the model", low=1 / 64, high=64)


def describe_model(trained: TrainedRun) -> dict[str, Any]:
    """Return what the page says of the model: its equation, its own limits, which solvers fit, what is provable.

    A model without an equilibrium is a `NotApplicableError`.
    """
    name, layers = trained.config.model.name, layers_of(trained.model)
    if not layers:
        raise NotApplicableError(f"{name} has no equilibrium layer, so that there is nothing to watch.")
    obstacle, limits = "", layers[0].limits
    try:
        check_certifiable(trained)
    except NotApplicableError as error:
        obstacle = str(error)
    has_energy = not any(isinstance(layer.cell, MultiscaleCell | FunctionCell) for layer in layers)
    return {
        "name": name,
        "run": printable(trained.run.name),
        "equation": trained.config.model.settings.equation,
        "side": trained.seen.shape[1],
        "controls": dataclasses.asdict(
            Controls(tol=limits.tolerance(torch.float32), steps=min(limits.max_steps, MOST))
        ),
        "solvers": [OWN, *(name for name in SOLVERS if has_energy or name != "proximal")],
        "own": str(layers[0].solver),
        "unrolled": any(isinstance(layer.gradient, AbstractSteps) for layer in layers),
        "widths": any(isinstance(module, Width) for module in trained.model.modules()),
        "obstacle": obstacle,
    }


@torch.no_grad()
def watch(trained: TrainedRun, pixels: Tensor, controls: Controls) -> dict[str, Any]:
    """Classify a picture, uint8 (channels, side, side), and return every step of every solve: maps, curves, classes.

    Solves end at the tolerance, which is looked at after every step, even where the model takes a fixed number.
    """
    x, model = _normalise(trained, pixels), _copy_model(trained, controls.width)
    layers, equations = layers_of(model), dict[Equilibrium, AbstractMap]()
    more = {layer: dict[str, Any](trace=range(1, MOST + 1)) for layer in layers}  # arguments of its calls
    for layer in layers:
        layer.tol, layer.max_steps, layer.check_every = controls.tol, controls.steps, 1
        if controls.solver != OWN:
            layer.solver, layer.gradient = SOLVERS[controls.solver], Implicit()
        layer.solve_hook = lambda layer, f, z: equations.__setitem__(layer, f)
        layer.register_forward_pre_hook(lambda layer, x, named: (x, named | more[layer]), with_kwargs=True)
    logits, solutions = model(x, solutions=True)
    found = dict(zip(layers, solutions.values(), strict=True))
    count = max(len(solution.trace.residual) for solution in found.values())
    states = {layer: _stack_states(solution.trace, count) for layer, solution in found.items()}
    described = [_describe_layer(layer, equations[layer], found[layer], states[layer]) for layer in layers]
    for layer in layers:  # a solve whose tolerance every state meets returns the one where it starts
        layer.solver, layer.gradient, layer.tol, layer.max_steps = Picard(), Implicit(), 1e30, 2
    parts = []
    for place in torch.split(torch.arange(count), TOGETHER):
        more |= {layer: {"z0": z[place]} for layer, z in states.items()}
        parts.append(model(x.repeat(len(place), 1, 1, 1)).float().softmax(1))
    shares, final = torch.cat(parts), logits[0].float().softmax(0)
    order = final.nan_to_num().argsort(descending=True).tolist()
    ahead = {*order[:CLASSES], *shares.nan_to_num().argmax(1).tolist()}
    names = [printable(name) for name in trained.classes]
    classes = [
        {"name": names[i], "share": float(final[i]), "steps": shares[:, i].tolist()} for i in order if i in ahead
    ]
    return {"steps": count, "layers": described, "classes": classes}


def certify_pictures(trained: TrainedRun, pictures: Sequence[Tensor], width: float = 1.0) -> list[str]:
    """Return what is proved about the class of each picture, in sentences; for a large model this takes minutes."""
    check_certifiable(trained)
    x = torch.cat([_normalise(trained, pixels) for pixels in pictures])
    found = certify(_copy_model(trained, width), x, std=trained.seen.std)
    assert found.pixel_radius is not None
    proved = []
    for columns in zip(found.prediction, found.pixel_radius, found.margin, found.error, strict=True):
        label, radius, margin, error = (column.item() for column in columns)
        name = printable(trained.classes[label])
        sentence = (
            f"Radius {radius:.3g}: at the equilibrium the class is {name}, and stays so "
            "for every change of the pixels, which are from 0 to 1, whose Euclidean length is below that."
            if radius > 0
            else f"Radius 0: nothing is certified about {name}, the class at the equilibrium."
        )
        proved.append(f"{sentence} Its logit leads by {margin:.3g}; the equilibria were computed to {error:.1e}.")
    return proved


def _copy_model(trained: TrainedRun, width: float) -> nn.Module:
    """Return a model of one's own to change, every γ of which is `width` times as large."""
    model = copy.deepcopy(trained.model)
    for module in model.modules():
        if isinstance(module, Width):
            module.register_forward_hook(lambda module, inputs, gamma: gamma * width)
    return model


def _normalise(trained: TrainedRun, pixels: Tensor) -> Tensor:
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (trained.seen.mean, trained.seen.std))
    return normalise(pixels, mean, std)[None].to(trained.process.device)


def _stack_states(trace: Trace, count: int) -> Tensor:
    """Return the states after the first `count` steps, (count, ...); of a solve that ended earlier the last again."""
    return torch.cat([trace.states[min(step, len(trace.states))] for step in range(1, count + 1)])


def _describe_layer(layer: Equilibrium, f: AbstractMap, solution: Solution, states: Tensor) -> dict[str, Any]:
    """Return the curves of one layer, its maps by their titles, and the constants of its equation."""
    trace, bound, constants, weights = solution.trace, solution.error_bound, {}, None
    assert trace is not None
    if isinstance(f, Equation):
        gamma = f.binding.gamma
        constants = {"L": float(f.bound), "mu": float(f.convexity), "gamma": None if gamma is None else float(gamma)}
        if states.dim() == 4:
            weights = f.rows(torch.zeros(len(states), dtype=torch.int64, device=states.device)).weights(states)
    if isinstance(layer.cell, MultiscaleCell) and isinstance(f, Function):  # of several scales the finest is shown
        states = layer.cell.unpack(states, f.inputs[0])[0]
    if states.dim() == 4:
        maps = {f"mean of {states.shape[1]} channels": states.mean(1)}
        strongest = states[-1].flatten(1).norm(dim=1).nan_to_num().topk(min(CHANNELS, states.shape[1])).indices
        maps |= {f"channel {channel}": states[:, channel] for channel in sorted(strongest.tolist())}
    else:
        rows = states.flatten(1)
        across = math.ceil(rows.shape[1] ** 0.5)
        maps = {"state, row by row": pad(rows, (0, -rows.shape[1] % across)).view(len(rows), -1, across)}
    return constants | {
        "size": " × ".join(map(str, states.shape[1:])) + (" numbers" if states.dim() == 2 else ""),
        "steps": len(trace.residual),
        "converged": bool(solution.converged.all()),
        "status": solution.status.name.lower().replace("_", " "),
        "residual": trace.residual[:, 0].tolist(),
        "reached": float(solution.residual),  # by the state that the layer gives: the best one, where steps ran out
        "energy": None if trace.energy is None else trace.energy[:, 0].tolist(),
        "error": None if bound is None else float(bound),
        "maps": {title: encode(each) for title, each in maps.items()},
        "weights": None if weights is None else encode(weights.mean(1)),
    }


def encode(maps: Tensor) -> dict[str, Any]:
    """Return maps (steps, h, w) as bytes in base64, 0 for `low` and 255 for `high`, in one scale for all steps.

    Maps of more than SIDE numbers a row are averaged. What is not finite counts as `low`.
    """
    maps = adaptive_avg_pool2d(maps.float().cpu(), (min(SIDE, maps.shape[1]), min(SIDE, maps.shape[2])))
    finite = maps[maps.isfinite()]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
    shares = ((maps - low) / (high - low or 1.0)).nan_to_num(0.0, 0.0, 0.0)
    data = base64.b64encode((shares * 255).round().to(torch.uint8).numpy().tobytes()).decode()
    return {"low": low, "high": high, "rows": maps.shape[1], "columns": maps.shape[2], "data": data}
