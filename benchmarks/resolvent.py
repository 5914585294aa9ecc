"""What an equilibrium of a `Resolvent` costs: evaluations of its equation to an error of 10⁻³, by solver."""

import dataclasses
from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor, nn

import kerneq as kq
from kerneq.maps import AbstractMap, Point
from kerneq.solvers.base import AbstractSpace, Evaluation

from .measure import Setup
from .results import Result

NORMS = (2**0.5, 2.0, 10**0.5)
MOST = 40  # evaluations
SEEDS = 3
NOTES = (
    "evaluations: the fewest after which ‖R − R*‖ ≤ 10⁻³‖a‖ for each of 4 inputs, mean of 3 random layers; "
    f"–: more than {MOST}. Counted, not timed, in float64.",
    "3×3 convolutions of 12 channels, 12×12 pixels, ReLU with a random bias, W at its bound.",
)


@final
@dataclasses.dataclass(frozen=True)
class Before:
    image: Tensor  # T(z) of the step before


@final
@dataclasses.dataclass(frozen=True)
class ShortSteps(AbstractSpace):
    """Iterates z ↦ prox_{αφ}((1 − α) z + α d(z)), α = 1/(1 + L), the inverse of how steep the gradient of E is."""

    f: kq.cells.Equation

    def evaluate(self, z: Tensor) -> Evaluation:
        v, image, drive, _ = self.f.evaluate(z, drive=True)
        assert drive is not None
        alpha = 1 / (1 + self.f.bound)
        return Evaluation(z, self.f.prox(torch.lerp(z, drive, alpha), alpha), Point(z, v, image))

    def start(self, z0: Tensor | None) -> Evaluation:
        return self.evaluate(torch.zeros(self.f.state_shape).to(self.f.binding.a) if z0 is None else z0)


@final
@dataclasses.dataclass(frozen=True)
class Nesterov(kq.solvers.AbstractSolver[Before]):
    """Accelerated proximal gradient for a 1-strongly convex E: z ← T(z) + β(T(z) − T of the step before), T the step of
    length 1/(1 + L)."""

    lipschitz: float

    def space(self, f: AbstractMap) -> AbstractSpace:
        assert isinstance(f, kq.cells.Equation)
        return ShortSteps(f)

    def init(self, space: AbstractSpace, z0: Tensor) -> Before:
        return Before(z0)

    def step(self, space: AbstractSpace, at: Evaluation, memory: Before) -> tuple[Tensor, Before]:
        condition = (1 + self.lipschitz) ** 0.5
        return at.image + (condition - 1) / (condition + 1) * (at.image - memory.image), Before(at.image)


def bench_resolvent(setup: Setup) -> Iterator[Result]:
    """Evaluations to an error of 10⁻³ at several norms of W, by solver."""
    for kernel in (kq.kernels.Squared(), kq.kernels.Multiquadric(0.2, split=4, hidden=16)):
        rows = []
        for norm in NORMS[:2] if setup.quick else NORMS:
            setup.progress(f"{kernel}, ‖W‖ = {norm:.3g}")
            found = [_count_by_solver(kernel, norm, seed) for seed in range(SEEDS)]
            means = {name: [one[name] for one in found] for name in found[0]}
            mean = {name: None if None in counts else sum(counts) / SEEDS for name, counts in means.items()}
            rows.append({"‖W‖": f"{norm:.3g}"} | mean)
        title = f"Evaluations of a resolvent to an error of 10⁻³, {type(kernel).__name__}"
        yield Result("resolvent", title, rows, NOTES, {"table": "resolvent"})


@torch.no_grad()
def _count_by_solver(kernel: kq.kernels.AbstractKernel, norm: float, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    sizes = {"inputs": 12, "state": 12, "features": 12}
    cell = kq.cells.ConvCell(kernel, **sizes, norm=norm, bias=True, inject=nn.Identity())  # type: ignore[arg-type]
    cell = cell.double().eval()
    assert cell.bias is not None
    cell.operator.weight.mul_(50)
    nn.init.normal_(cell.bias, std=0.3)
    a = torch.randn(4, 12, 12, 12, dtype=torch.float64)
    solvers = {
        "Proximal": kq.solvers.Proximal(),
        "Proximal, bare": kq.solvers.Proximal(memory=0),
        "Nesterov": Nesterov(norm**2),
        "Anderson(3), in features": kq.solvers.InFeatures(kq.solvers.Anderson(3)),
        "Anderson(8), in features": kq.solvers.InFeatures(kq.solvers.Anderson(8)),
    }
    layer = kq.Resolvent(cell, tol=1e-12, max_steps=3000).eval()
    exact = layer(a)
    return {name: count_evaluations(layer, solver, a, exact) for name, solver in solvers.items()}


@torch.no_grad()
def count_evaluations(layer: kq.Resolvent, solver: Any, a: Tensor, exact: Tensor) -> int | None:
    """The fewest steps of the solver after which R(a) is right to 10⁻³ of ‖a‖, in every sample."""
    solve = layer.equilibrium
    before = solve.solver, solve.max_steps, solve.check_every
    try:
        for steps in range(1, MOST + 1):
            solve.solver, solve.max_steps, solve.check_every = solver, steps, steps
            error = (layer(a) - exact).flatten(1).norm(dim=1) / a.flatten(1).norm(dim=1)
            if bool((error <= 1e-3).all()):
                return steps
    finally:
        solve.solver, solve.max_steps, solve.check_every = before
    return None
