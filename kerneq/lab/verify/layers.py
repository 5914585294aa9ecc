"""The claims about single layers: resolvents, phantom gradients, the influence of patches, the averaged step."""

import dataclasses
import math

import torch
from torch import Tensor

from ...certificates.layers import bound_influence, bound_movement, find_certain_entries, phantom_error
from ...equation import averaged_step
from ...gradients import Phantom
from ...kernels import AbstractRadialKernel, Cauchy, Gaussian, Multiquadric
from ...solvers import Proximal, solve
from .facts import RADIAL, bind_cell, make_cell, solve_newton
from .propositions import multiply
from .search import RESTARTS, WorstCase, ascend, draw_normal, find_fixed_point, find_largest, scale_to_norm

STEEP = 20.0  # ‖W‖ of the attacked resolvents


def reflect(W: Tensor, b: Tensor, a: Tensor, gamma: float, start: Tensor) -> Tensor:
    """Return R(a) of the multiquadric, or for γ = 0 of the squared kernel, with weights of its own for each row."""
    step = 2 / (2 + torch.linalg.matrix_norm(W.detach(), 2).square())[:, None]

    def slope(z: Tensor) -> Tensor:
        r = a - multiply(W, z)
        return r * torch.rsqrt(1 + gamma * r.square().sum(1, keepdim=True))

    def descend(z: Tensor) -> Tensor:
        return torch.relu((1 - step) * z + step * (multiply(W.mT, slope(z)) + b))

    with torch.no_grad():
        for _ in range(150):  # from afar Newton may cycle about a kink
            start = descend(start)
    return 2 * slope(find_fixed_point(descend, start)) - a


def check_resolvent() -> WorstCase:
    """kerneq fact 13: a reflected resolvent is 1-Lipschitz whatever ‖W‖."""
    worst = 0.0
    for gamma in (0.0, 0.5):

        def ratio(W: Tensor, b: Tensor, a: Tensor, move: Tensor, gamma: float = gamma) -> Tensor:
            W, start = scale_to_norm(W, STEEP), torch.zeros(len(W), 3)
            moved = reflect(W, b, a + move, gamma, start) - reflect(W, b, a, gamma, start)
            return moved.norm(dim=1) / move.norm(dim=1)

        worst = find_largest(worst, ascend(ratio, *draw_normal((3, 3), (3,), (3,), (3,)), steps=5))
    return WorstCase(worst, f"ascent on W, b and both inputs at ‖W‖ = {STEEP:g}")


@torch.no_grad()
def check_resolvent_error() -> WorstCase:
    """kerneq fact 13: the error of an unfinished resolvent."""
    W, b, a = draw_normal((3, 3), (3,), (3,))
    W, worst = scale_to_norm(W, 3.0), 0.0
    for gamma in (0.0, 0.5):
        exact = (reflect(W, b, a, gamma, torch.zeros(RESTARTS, 3)) + a) / 2
        for size in (0.01, 1.0, 10.0):
            v = multiply(W, torch.randn(RESTARTS, 3).relu() * size)
            p = (a - v) * torch.rsqrt(1 + gamma * (a - v).square().sum(1, keepdim=True))
            gap = multiply(W, torch.relu(multiply(W.mT, p) + b)) - v
            worst = find_largest(worst, (p - exact).norm(dim=1) / (gap.norm(dim=1) + 1e-9))
    return WorstCase(worst, "any v: ‖p − p*‖ over ‖Wσ(Wᵀp + b) − v‖")


def check_phantom() -> WorstCase:
    """kerneq fact 14: the relative error of a phantom gradient."""
    worst = 0.0
    for kernel in RADIAL:
        for norm in (0.7, 1.0, 1.2):
            active = (torch.rand(RESTARTS, 4) < 0.7).double()
            rule = Phantom()
            bound = phantom_error(rule, norm**2, kernel.lowest)

            def ratio(
                W: Tensor, r: Tensor, g: Tensor, kernel: type[AbstractRadialKernel] = kernel, norm: float = norm,
                active: Tensor = active, rule: Phantom = rule, bound: float = bound,
            ) -> Tensor:  # fmt: skip
                W, s, eye = scale_to_norm(W, norm), r.square().sum(1), torch.eye(4)
                N = kernel.weight(s)[:, None, None] * torch.eye(3) + 2 * kernel.slope(s)[:, None, None] * (
                    r[:, :, None] * r[:, None, :]
                )
                J = -active[:, :, None] * (W.mT @ N @ W) * active[:, None, :]
                w = torch.linalg.solve(eye - J, active * g)
                left = torch.linalg.matrix_power((1 - rule.relaxation) * eye + rule.relaxation * J, rule.steps)
                return multiply(left, w).norm(dim=1) / (bound * w.norm(dim=1) + 1e-12)

            worst = find_largest(worst, ascend(ratio, *draw_normal((3, 4), (3,), (4,)), steps=15))
    return WorstCase(worst, "ascent on W, r and ∂L/∂z: five steps of 0.8, L = 0.49 … 1.44")


@torch.no_grad()
def check_certain_entries() -> WorstCase:
    """kerneq fact 14: entries that an unfinished solve leaves certain."""
    worst, certain, wrong = 0.0, 0, 0
    for kernel, norm in ((Gaussian, 1.3), (Cauchy, 2.0), (Multiquadric, 3.0)):
        f = bind_cell(kernel(gamma=0.3, split=3), norm, 2)
        star = f.drive(solve_newton(f).value)
        for steps in (5, 10, 20):
            s = solve(f, None, Proximal(memory=0), tol=1e-13, max_steps=steps)
            assert s.error_bound is not None
            sure, drive = find_certain_entries(f, s.value, s.error_bound), f.drive(s.value)
            certain, wrong = certain + int(sure.sum()), wrong + int((sure & ((drive > 0) != (star > 0))).sum())
            worst = find_largest(worst, (drive - star).norm(dim=1) / (f.bound * s.error_bound + 1e-10))
    where = f"the move of d over L times the bound; {certain} of {9 * 64 * 5} entries certain, {wrong} of them wrong"
    return WorstCase(math.inf if wrong else worst, where)


@torch.no_grad()
def check_influence() -> WorstCase:
    """kerneq fact 15: a replaced patch moves z* by a bounded length."""
    worst = 0.0
    for kernel, norm in ((Multiquadric, 5.0), (Gaussian, 1.3), (Cauchy, 2.5)):
        for size in (1.0, 1e4):
            cell = make_cell(kernel(gamma=0.5, split=3), norm)
            x = 2 * torch.randn(64, 3)
            f = cell.bind(x)
            a = f.binding.a.clone()
            a[:, :3] = size * torch.randn(64, 3)  # one of two patches
            other = dataclasses.replace(f, binding=dataclasses.replace(f.binding, a=a))
            moved = (solve_newton(f).value - solve_newton(other).value).norm(dim=1)
            some, sharper = bound_influence(kernel(gamma=0.5), 0.5, norm, patches=1), bound_movement(cell, x, patches=1)
            worst = find_largest(worst, moved / some, moved / sharper)
    return WorstCase(worst, "one of two patches replaced by up to 10⁴ times as much")


@torch.no_grad()
def check_averaged_step() -> WorstCase:
    """kerneq fact 3: averaged steps in the features lower E for any weights."""
    worst = 0.0
    for kernel in RADIAL:
        for L in (1.5, 20.0, 60.0):
            f = bind_cell(kernel(gamma=0.2, split=3), math.sqrt(L), 3)
            z, beta = 3 * torch.rand(64, 5), averaged_step(f.bound)
            image = f(z)
            drop = f.energy(z) - f.energy(torch.lerp(z, image, beta))
            least = 0.5 * beta**2 * f.operator(image - z).square().sum(1) / f.stretch
            worst = find_largest(worst, (least / drop)[least > 1e-9])
    return WorstCase(worst, "β²‖F(v) − v‖²/2‖W‖² over the fall of E")


RESOLVENTS = (check_resolvent, check_resolvent_error)
LAYERS = (*RESOLVENTS, check_phantom, check_certain_entries, check_influence, check_averaged_step)
