"""What is proved about one layer: how far off a phantom gradient is, and how far a few patches move an equilibrium."""

import math

import torch
from torch import Tensor

from ..cells import DenseCell
from ..equation import Equation
from ..gradients import Phantom
from ..kernels import AbstractRadialKernel
from ..kernels.radial import PatchParameters, patch_distances
from ..solvers import Proximal, solve
from .norms import matrix_norm


def phantom_error(rule: Phantom, lipschitz: float, lowest: float) -> float:
    """Return a bound on the relative error of a phantom gradient at an equilibrium (docs/theory.md, fact 14).

    `lipschitz` is L and `lowest` that of the kernel: the slopes of m lie in [lowest, 1] · ‖W_h‖². 7.8 % for the
    papers' five steps of 0.8 at L = 1; nothing is proved where it is 1 or more.
    """
    away, kept = rule.relaxation, 1 - rule.relaxation
    return max(abs(kept - away * lipschitz), kept + away * max(0.0, -lowest) * lipschitz) ** rule.steps


def find_certain_entries(f: Equation, z: Tensor, error: Tensor) -> Tensor:
    """Return which entries of z are surely active, or surely 0, at the equilibrium too, shaped as z, of ReLU.

    z is off by at most `error`, (batch,), as `Solution.error_bound` says, and so d(z) by at most L times that.
    """
    reach = f.bound * f.scaling.excess**2 * error
    certain: Tensor = f.drive(z).abs() > reach.view(-1, *[1] * (z.dim() - 1))
    return certain & torch.isfinite(reach).view(-1, *[1] * (z.dim() - 1))


def bound_influence(kernel: AbstractRadialKernel, gamma: float, gain: float, patches: int) -> float:
    """Return how far z* moves, at most, if so many patches of a are replaced by anything (docs/theory.md, fact 15).

    `gain` is ‖W‖‖W_h‖. ∞ where uniqueness is not shown, or where a single patch may push without limit.
    """
    convexity = 1 + min(0.0, kernel.lowest) * gain**2
    if convexity <= 0:
        return math.inf
    return 2 * math.sqrt(patches / gamma) * gain * kernel.reach / convexity


@torch.no_grad()
def bound_movement(cell: DenseCell, x: Tensor, patches: int) -> Tensor:
    """Return how far z* of each x moves, at most, if any so many patches of its a are replaced by anything, (batch,).

    Sharper than `bound_influence`, since it knows how hard each patch pushes at this x, ‖mᵢ‖, and the norm of its own
    rows of W: the sum of the largest ‖Wᵢ‖(‖mᵢ‖ + q/√γ), over μ. The cell is in `eval()`.
    """
    kernel, part = cell.kernel, cell.similarity
    if not isinstance(kernel, AbstractRadialKernel) or not isinstance(part, PatchParameters):
        raise TypeError(f"The influence of patches is bounded for radial kernels, got {kernel!r}.")
    f = cell.bind(x)
    solution = solve(f, None, Proximal(), tol=torch.finfo(x.dtype).eps ** 0.6, max_steps=2000)
    assert solution.error_bound is not None and f.binding.gamma is not None
    rows = part.project.weight.double() @ f.operator.weight.double().view(-1, part.split, f.operator.weight.shape[1])
    norms = torch.linalg.matrix_norm(rows, 2)  # of z ↦ each patch of WzW_h
    convexity = 1 + min(0.0, kernel.lowest) * matrix_norm(rows.flatten(0, 1)) ** 2
    if convexity <= 0:
        return torch.full_like(solution.error_bound, math.inf)
    gamma = float(f.binding.gamma)
    r = f.binding.a - f.operator(solution.value)
    t = patch_distances(r, part.project.weight, split=part.split, patch=part.patch).double()
    off = kernel.steepest * norms * solution.error_bound[:, None]
    present = kernel.weight(gamma * t) * t.sqrt() + off  # ‖mᵢ‖ at z*, at most
    pushes = norms * (present + kernel.reach / gamma**0.5)
    return pushes.topk(patches, dim=1).values.sum(1) / convexity
