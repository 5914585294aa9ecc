"""Kernel logistic regression of MNIST against its equilibrium (Appendix G): do all pixels of all images
agree?
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

import kerneq
from kerneq import data
from kerneq.kglm.cell import GLMMap, bound
from kerneq.kglm.families import Bernoulli
from kerneq.kglm.guarantee import certify
from kerneq.kglm.kernels import SquaredExponential, White
from kerneq.kglm.newton import newton
from kerneq.kglm.prior import FLAT
from kerneq.kglm.problem import Problem, error_bound
from kerneq.kglm.system import AbstractSystem, Cholesky, ConjugateGradient
from kerneq.settings import setting
from kerneq.solvers import Picard

COUNTS = ("disagreements", "ties", "beyond_bound", "float32_pixels", "float32_halves", "float32_images")


@dataclasses.dataclass(frozen=True)
class Mnist:
    """Defaults are the paper's; its released scripts have flips = 0.3333 and white = 0."""

    images: int = setting(60000, "how many of the training images", low=1, high=60000)
    flips: float = setting(0.3, "share of the pixels that are flipped", low=0, high=1)
    lengthscale: float = setting(1.0, "of the squared exponential", above=0)
    white: float = setting(1e-8, "variance of the white noise", low=0)
    ratio: float = setting(2.0, "λ / ‖K‖", above=0)
    exact: int = setting(50, "images on which Newton's systems are solved by Cholesky as well", low=0)
    single: bool = setting(True, "also solve the equilibrium in float32, as the paper did")
    chunk: int = setting(2000, "images solved together", low=1)
    seed: int = setting(0, "of the flips", low=0)
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")


@dataclasses.dataclass(frozen=True)
class Solved:
    """Canonical parameters of one chunk with, per image, how far from the exact ones they can be."""

    eta: Tensor  # (images, 784)
    error: Tensor  # (images,)
    steps: int


def binarised(split: Literal["train", "test"], count: int) -> Tensor:
    """Images (count, 784) of zeros and ones, float64: white where the byte is 128 or more."""
    images = data.load("mnist", split)
    if not isinstance(images, data.Images):
        raise TypeError("MNIST is read whole into memory.")
    return (images.pixels[:count].flatten(1) >= 128).double()


def corrupt(images: Tensor, share: float, seed: int) -> Tensor:
    """Every pixel flipped with probability `share`, on its own."""
    flip = torch.rand(images.shape, generator=torch.Generator().manual_seed(seed)) < share
    return torch.where(flip, 1 - images, images)


def kernel_matrix(settings: Mnist) -> Tensor:
    grid = torch.cartesian_prod(torch.arange(28.0), torch.arange(28.0)).double()
    K = (SquaredExponential(settings.lengthscale) + White(settings.white))(grid, grid)
    return torch.where(K < 1e-30, 0.0, K)  # subnormal numbers would make float32 products forty times slower


def equilibrium(problem: Problem, norm: float) -> Solved:
    """z = σ((K/λ)(Y − z)) by plain iteration through `kerneq.solve`, read out as f = (K/λ)(Y − z)."""
    W = problem.K / problem.lam
    f = GLMMap(bound(-W), None, problem.t @ W, problem.family, FLAT, "mean")
    # out of reach, so that every image goes to the floor of its dtype, where `solve` stops it
    tol = 0.5 * torch.finfo(W.dtype).eps
    solution = kerneq.solve(f, torch.full_like(problem.t, 0.5), Picard(), tol=tol, max_steps=60)
    z = solution.value
    alpha = (problem.t - z) / problem.lam
    return _solved(problem, alpha, norm, int(solution.steps.max()))


def kernel_logistic_regression(problem: Problem, norm: float, system: AbstractSystem) -> Solved:
    """Newton's method."""
    fit = newton(problem, system=system, tol=1e-15, max_steps=20)
    return _solved(problem, fit.alpha, norm, fit.steps)


def _solved(problem: Problem, alpha: Tensor, norm: float, steps: int) -> Solved:
    """The a-posteriori bound ‖η − η*‖ ≤ (‖K‖/λ)‖r‖, with the rounding of Kα and of r added to it."""
    eta = problem.canonical(alpha)
    n, eps = eta.shape[-1], torch.finfo(eta.dtype).eps
    product = n * eps * problem.K.abs().sum(-1).max() * alpha.abs().amax(-1)  # of Kα, per entry
    residual = problem.residual(alpha, eta)
    slack = n**0.5 * (8 * eps + problem.family.curvature() * product)
    error = error_bound(norm, problem.lam, residual) + norm / problem.lam * slack + product
    return Solved(eta, error, steps)


def chunks(settings: Mnist, device: torch.device) -> Iterator[Tensor]:
    noisy = corrupt(binarised("train", settings.images), settings.flips, settings.seed)
    for part in torch.split(noisy, settings.chunk):
        yield part.to(device)


@torch.no_grad()
def compare(settings: Mnist, device: torch.device, report: Callable[[int], None] = lambda done: None) -> dict[str, Any]:
    """Solve every image both ways and compare the binarised predictions 1{σ(f) > ½} = 1{f > 0}."""
    K, family = kernel_matrix(settings).to(device), Bernoulli()
    norm = torch.linalg.matrix_norm(K, 2).item()
    lam = settings.ratio * norm
    totals = dict.fromkeys(
        ("disagreements", "ties", "beyond_bound", "float32_pixels", "float32_halves", "float32_images"), 0
    )
    seconds, steps, worst = {"equilibrium": 0.0, "newton": 0.0}, [0, 0], 0.0
    closest: list[tuple[float, int, int, float, float]] = []
    exact_gap = None
    for number, t in enumerate(chunks(settings, device)):
        problem, first = Problem(K, t, family, lam), number * settings.chunk
        start = time.perf_counter()
        deq = equilibrium(problem, norm)
        middle = time.perf_counter()
        klr = kernel_logistic_regression(problem, norm, ConjugateGradient(tol=1e-7))
        seconds["equilibrium"] += middle - start
        seconds["newton"] += time.perf_counter() - middle
        steps = [max(steps[0], deq.steps), max(steps[1], klr.steps)]
        bound_ = (deq.error + klr.error)[:, None]
        gap = (deq.eta - klr.eta).abs()
        worst = max(worst, gap.max().item())
        differ = (deq.eta > 0) != (klr.eta > 0)
        # nearer to 0 than both errors together: no computation to this precision can tell the sign
        tie = torch.minimum(deq.eta.abs(), klr.eta.abs()) <= bound_
        totals["disagreements"] += int((differ & ~tie).sum())
        totals["ties"] += int(tie.sum())
        totals["beyond_bound"] += int((gap > bound_).sum())
        if settings.single:
            low = dataclasses.replace(problem, K=K.float(), t=t.float())
            single = equilibrium(low, norm).eta
            totals["float32_pixels"] += int(((single > 0) != (klr.eta > 0)).sum())
            half = single.sigmoid() == 0.5  # what the paper's eleven disagreements are
            totals["float32_halves"] += int(half.sum())
            totals["float32_images"] += int(half.any(-1).sum())
        if number == 0 and settings.exact:
            few = dataclasses.replace(problem, t=t[: settings.exact])
            exact = kernel_logistic_regression(few, norm, Cholesky())
            exact_gap = (exact.eta - klr.eta[: settings.exact]).abs().max().item()
        closest = _closest(closest, deq.eta, klr.eta, first)
        report(first + len(t))
    guarantee = certify(K, lam, family)
    return {
        "images": settings.images,
        "pixels": settings.images * 784,
        **totals,
        "largest_gap": worst,
        "cholesky_gap": exact_gap,
        "steps": {"equilibrium": steps[0], "newton": steps[1]},
        "seconds": seconds,
        "guarantee": str(guarantee),
        "closest": [
            {"image": i, "pixel": p, "equilibrium": a, "newton": b} for _, i, p, a, b in closest
        ],  # Table 2: the pixels nearest to a tie
    }


def _closest(
    best: list[tuple[float, int, int, float, float]], deq: Tensor, klr: Tensor, first: int
) -> list[tuple[float, int, int, float, float]]:
    """The eleven images whose nearest pixel is nearest to probability ½, with both posterior probabilities."""
    size, pixel = klr.abs().min(-1)
    order = size.argsort()[:11]
    new = [
        (size[i].item(), first + int(i), int(pixel[i]), _probability(deq, i, pixel), _probability(klr, i, pixel))
        for i in order
    ]
    return sorted(best + new)[:11]


def _probability(eta: Tensor, row: Tensor, pixel: Tensor) -> float:
    return eta[row, pixel[row]].sigmoid().item()
