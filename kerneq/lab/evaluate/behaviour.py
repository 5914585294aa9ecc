"""Solver behaviour of a trained model.

Residual and E along the iterations, steps and failures as deployed, the contraction factor at the equilibrium next to
its bound, and the accuracy of the same model stopped after 1, 2, 4, … steps.
"""

import dataclasses
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ...equation import Equation
from ...equilibrium import Equilibrium, hook_solves, layers_of, solving
from ...maps import AbstractMap
from ...solvers import solve
from ...stability import spectral_radius
from ..data import Images
from .trained import TrainedRun

SETTLED = 1e-5  # residual of an equilibrium at which the Jacobian is taken
FLOOR = 1e-6  # residual at which a trace ends
IMAGES, TRACED = 10_000, 32  # test images at most, and those that are traced
LONGEST = 100  # most steps of a trace, or of the solve before a Jacobian


@final
@dataclasses.dataclass(frozen=True)
class LayerBehaviour:
    """One equilibrium layer. Steps, residual and failures are as deployed, over all pictures; the rest is in float32.

    Numbers may be infinite (null in JSON): E outside the domain of φ, a trace that diverged.
    """

    name: str
    solver: str
    steps: float
    most_steps: int
    residual: float
    unconverged: float  # share of the pictures
    contraction: float  # spectral radius of ∂f/∂z at the equilibrium, mean over the traced pictures
    most_contraction: float
    bound: float | None  # L: the contraction is at most this
    convexity: float | None  # μ of E: where it is positive there is one equilibrium
    residuals: list[float]  # mean over the traced pictures at every step
    energies: list[float] | None
    sample_residuals: list[list[float]]  # the same for a few pictures
    sample_energies: list[list[float]] | None


@final
@dataclasses.dataclass(frozen=True)
class StoppedScore:
    """The score of the trained model when every solve ends after at most `steps` steps."""

    steps: int  # evaluations of f; most solvers return the last point they evaluated f at
    accuracy: float
    loss: float
    residual: float


@final
@dataclasses.dataclass(frozen=True)
class BehaviourResult:
    """The solver behaviour of a trained run on test images, layer by layer."""

    images: int
    traced: int
    tol: float
    max_steps: int
    layers: list[LayerBehaviour]
    stopped: list[StoppedScore]  # the last at `max_steps`: as deployed

    def summary(self) -> list[tuple[str, str]]:
        lines = []
        for layer in self.layers:
            limit = "" if layer.bound is None else f" (bound {layer.bound:.2f})"
            words = f"{layer.steps:.1f} steps, residual {layer.residual:.1e}, {layer.unconverged:.1%} not converged, "
            lines.append((layer.name, words + f"contraction {layer.contraction:.2f}{limit}"))
        for s in self.stopped:
            lines.append((f"stopped after {s.steps}", f"accuracy {s.accuracy:.2%}, loss {s.loss:.4f}"))
        return lines


def measure_behaviour(
    trained: TrainedRun, *, images: int = IMAGES, traced: int = TRACED, shown: int = 4
) -> BehaviourResult:
    """Measure the run's solves on test images; `traced` of them get traces, `shown` of these are also kept singly."""
    layers, chosen = layers_of(trained.model), trained.test.sample(images)
    own = max(layer.limits.max_steps for layer in layers)
    limits = [*(2**k for k in range(own) if 2**k < own), own]
    stopped: list[StoppedScore] = []
    solves: dict[str, Tensor] = {}
    for limit in trained.track(limits, "stopped solves", len(limits)):
        score, solves = _stopped(trained, chosen, limit)  # the last pass is as deployed
        stopped.append(score)
    x = next(iter(trained.batches(chosen).epoch(0)))[0][:traced]
    seen: dict[Equilibrium, tuple[AbstractMap, Tensor]] = {}
    with torch.no_grad(), hook_solves(trained.model, lambda layer, f, z: seen.update({layer: (f, z)})):
        trained.model(x)
    parts = zip(layers, solves.items(), strict=True)
    found = [_behaviour(name, layer, *seen[layer], numbers, shown) for layer, (name, numbers) in parts]
    return BehaviourResult(len(chosen), len(x), layers[0].limits.tolerance(x.dtype), own, found, stopped)


def _stopped(trained: TrainedRun, images: Images, limit: int) -> tuple[StoppedScore, dict[str, Tensor]]:
    """The score with at most `limit` steps a solve, and of each layer steps, residual and failure, (images, 3)."""
    right, loss = 0, 0.0
    solves: dict[str, list[Tensor]] = {}
    with solving(trained.model, max_steps=limit):
        for _, labels, logits, solutions in trained.outputs(images, captured=False):
            right += int((logits.argmax(1) == labels).sum())
            loss += float(cross_entropy(logits, labels, reduction="sum"))
            for name, s in solutions.items():
                columns = torch.stack([s.steps.double(), s.residual.double(), (~s.converged).double()], dim=1)
                solves.setdefault(name, []).append(columns.cpu())
    joined = {name: torch.cat(rows) for name, rows in solves.items()}
    residual = float(torch.stack([rows[:, 1] for rows in joined.values()]).mean())
    return StoppedScore(limit, right / len(images), loss / len(images), residual), joined


def _behaviour(name: str, layer: Equilibrium, f: AbstractMap, z: Tensor, solves: Tensor, shown: int) -> LayerBehaviour:
    """One layer, given its equation and equilibria of the traced pictures, and `solves` of all pictures."""
    steps = min(max(2 * layer.limits.max_steps, 16), LONGEST)
    traced = solve(f, layer.cell.initial(f), layer.solver, max_steps=steps, check_every=steps, trace=True).trace
    assert traced is not None
    residual, energy = traced.residual, traced.energy
    above = int((~(residual <= FLOOR)).any(1).sum())  # below, residuals are rounding errors
    residual, energy = residual[: above + 1], None if energy is None else energy[: above + 1]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        factor = spectral_radius(f, solve(f, z, layer.solver, tol=SETTLED, max_steps=LONGEST).value)
    steps, gap, failed = solves.mean(0).tolist()
    return LayerBehaviour(
        name=name,
        solver=repr(layer.solver),
        steps=steps,
        most_steps=int(solves[:, 0].max()),
        residual=gap,
        unconverged=failed,
        contraction=float(factor.mean()),
        most_contraction=float(factor.max()),
        bound=float(f.bound.max()) if isinstance(f, Equation) else None,
        convexity=float(f.convexity.min()) if isinstance(f, Equation) else None,
        residuals=residual.mean(1).tolist(),
        energies=None if energy is None else energy.mean(1).tolist(),
        sample_residuals=residual[:, :shown].mT.tolist(),
        sample_energies=None if energy is None else energy[:, :shown].mT.tolist(),
    )
