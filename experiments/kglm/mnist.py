"""Kernel logistic regression of MNIST against its equilibrium (Appendix G): do all pixels of all images agree?

Table 2 and Figure 13: the images whose prediction is nearest to a tie.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from common import Experiment, Figures, Job, Record, Result, main, subplots
from pictures import load_pixels
from torch import Tensor
from torch.nn import functional as F

import kerneq
from kerneq.kglm import Bernoulli, SquaredExponential, White, check_assumptions
from kerneq.kglm.exact import Gram
from kerneq.kglm.initialisation import uniform
from kerneq.kglm.newton import Problem, newton
from kerneq.maps import Function
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
    return (load_pixels("mnist", split, count).flatten(1) >= 128).double()


def corrupt(images: Tensor, share: float, seed: int) -> Tensor:
    """Every pixel flipped with probability `share`, on its own."""
    flip = torch.rand(images.shape, generator=torch.Generator().manual_seed(seed)) < share
    return torch.where(flip, 1 - images, images)


def kernel_matrix(settings: Mnist) -> Tensor:
    """K on the 28 × 28 pixels, (784, 784)."""
    grid = torch.cartesian_prod(torch.arange(28.0), torch.arange(28.0)).double()
    K = (SquaredExponential(settings.lengthscale) + White(settings.white))(grid, grid)
    return torch.where(K < 1e-30, 0.0, K)  # subnormal numbers would make float32 products forty times slower


def equilibrium(problem: Problem, norm: float) -> Solved:
    """z = σ((K/λ)(Y − z)) by plain iteration through `kerneq.solve`, read out as f = (K/λ)(Y − z)."""
    W = problem.basis.K / problem.lam
    # out of reach, so that every image goes to the floor of its dtype, where `solve` stops it
    tol = 0.5 * torch.finfo(W.dtype).eps
    start = torch.full_like(problem.t, 0.5)
    f = Function(lambda z, drive: torch.sigmoid(drive - F.linear(z, W)), (problem.t @ W,))
    solution = kerneq.solve(f, start, Picard(), tol=tol, max_steps=60)
    alpha = (problem.t - solution.value) / problem.lam
    return _solved(problem, alpha, norm, int(solution.steps.max()))


def kernel_logistic_regression(problem: Problem, norm: float) -> Solved:
    """Newton's method; the images of a chunk share one factor, and conjugate gradient does the rest."""
    fit = newton(problem, tol=1e-15, max_steps=20)
    return _solved(problem, fit.coefficients, norm, fit.steps)


def error_bound(problem: Problem, alpha: Tensor, eta: Tensor, norm: float) -> Tensor:
    """How far η can be from the solution, per image: ‖η − η*‖ ≤ (‖K‖/λ)‖r‖ for every kernel, family and λ.

    Subtract the two optimality conditions and multiply by η − η*: A′ + Q′ is monotone and K semi-definite, so
    λ‖α − α*‖²_K ≤ ‖r‖‖η − η*‖, while ‖η − η*‖² ≤ ‖K‖‖α − α*‖²_K. `norm` is ‖K‖.
    """
    return norm / problem.lam * problem.residual(alpha, eta).norm(dim=-1)


def _solved(problem: Problem, alpha: Tensor, norm: float, steps: int) -> Solved:
    """The a-posteriori bound ‖η − η*‖ ≤ (‖K‖/λ)‖r‖, with the rounding of Kα and of r added to it."""
    eta = problem.canonical(alpha)
    n, eps = eta.shape[-1], torch.finfo(eta.dtype).eps
    product = n * eps * problem.basis.K.abs().sum(-1).max() * alpha.abs().amax(-1)  # of Kα, per entry
    slack = n**0.5 * (8 * eps + problem.family.variance_range()[1] * product)
    error = error_bound(problem, alpha, eta, norm) + norm / problem.lam * slack + product
    return Solved(eta, error, steps)


def chunks(settings: Mnist, device: torch.device) -> Iterator[Tensor]:
    """The corrupted images, (chunk, 784) each."""
    noisy = corrupt(binarised("train", settings.images), settings.flips, settings.seed)
    for part in torch.split(noisy, settings.chunk):
        yield part.to(device)


@torch.no_grad()
def run(settings: Mnist, job: Job) -> Result:
    """Solve every image both ways and compare the binarised predictions 1{σ(f) > ½} = 1{f > 0}."""
    K, family = kernel_matrix(settings).to(job.device), Bernoulli()
    norm = torch.linalg.matrix_norm(K, 2).item()
    lam = settings.ratio * norm
    tally: dict[str, Any] = job.saved.load("tally") or {
        "chunks": 0,
        **dict.fromkeys(COUNTS, 0),
        "largest_gap": 0.0,
        "cholesky_gap": None,
        "steps": {"equilibrium": 0, "newton": 0},
        "seconds": {"equilibrium": 0.0, "newton": 0.0},
        "closest": [],
    }
    for number, t in enumerate(chunks(settings, job.device)):
        if number < tally["chunks"]:
            continue
        problem, first = Problem(Gram(K), t, family, lam), number * settings.chunk
        start = time.perf_counter()
        deq = equilibrium(problem, norm)
        middle = time.perf_counter()
        klr = kernel_logistic_regression(problem, norm)
        tally["seconds"]["equilibrium"] += middle - start
        tally["seconds"]["newton"] += time.perf_counter() - middle
        for way, solved in (("equilibrium", deq), ("newton", klr)):
            tally["steps"][way] = max(tally["steps"][way], solved.steps)
        error = (deq.error + klr.error)[:, None]
        gap = (deq.eta - klr.eta).abs()
        tally["largest_gap"] = max(tally["largest_gap"], gap.max().item())
        differ = (deq.eta > 0) != (klr.eta > 0)
        # nearer to 0 than both errors together: no computation to this precision can tell the sign
        tie = torch.minimum(deq.eta.abs(), klr.eta.abs()) <= error
        tally["disagreements"] += int((differ & ~tie).sum())
        tally["ties"] += int(tie.sum())
        tally["beyond_bound"] += int((gap > error).sum())
        if settings.single:
            low = dataclasses.replace(problem, basis=Gram(K.float()), t=t.float())
            single = equilibrium(low, norm).eta
            tally["float32_pixels"] += int(((single > 0) != (klr.eta > 0)).sum())
            half = single.sigmoid() == 0.5  # what the paper's eleven disagreements are
            tally["float32_halves"] += int(half.sum())
            tally["float32_images"] += int(half.any(-1).sum())
        if number == 0 and settings.exact:
            alone = [dataclasses.replace(problem, t=image[None]) for image in t[: settings.exact]]
            exact = torch.cat([kernel_logistic_regression(one, norm).eta for one in alone])  # with factors of their own
            tally["cholesky_gap"] = (exact - klr.eta[: settings.exact]).abs().max().item()
        tally["closest"] = _closest(tally["closest"], deq.eta, klr.eta, first)
        tally["chunks"] = number + 1
        past = first + len(t)
        job.report(past / settings.images, f"{past} of {settings.images} images")
        if job.saved.due():
            job.saved.save("tally", tally)
    job.saved.drop("tally")
    del tally["chunks"]
    closest = [{"image": i, "pixel": p, "equilibrium": a, "newton": b} for _, i, p, a, b in tally["closest"]]
    sizes = {"images": settings.images, "pixels": settings.images * 784}
    return {
        **sizes,
        **tally,
        "guarantee": str(check_assumptions(K, lam, family)),
        "closest": closest,
    }  # closest: Table 2


def _closest(best: list[tuple[float, ...]], deq: Tensor, klr: Tensor, first: int) -> list[tuple[float, ...]]:
    """The eleven images whose nearest pixel is nearest to probability ½: |f|, image, pixel, both probabilities."""
    size, pixel = klr.abs().min(-1)
    images = size.argsort()[:11]
    pixels = pixel[images]
    probabilities = (eta[images, pixels].sigmoid() for eta in (deq, klr))
    columns = (size[images], first + images, pixels, *probabilities)
    return sorted([*best, *zip(*(column.tolist() for column in columns), strict=True)])[:11]


@torch.no_grad()
def draw(records: Sequence[Record[Mnist]]) -> Figures:
    """Rows of Figure 13: corrupted input, Newton, equilibrium (the pixel nearest to a tie in red), random weights."""
    settings, result = records[0].settings, records[0].result
    rows = [entry["image"] for entry in result["closest"]]
    noisy = corrupt(binarised("train", settings.images), settings.flips, settings.seed)[rows]
    K = kernel_matrix(settings)
    norm = torch.linalg.matrix_norm(K, 2).item()
    problem = Problem(Gram(K), noisy, Bernoulli(), settings.ratio * norm)
    regression = kernel_logistic_regression(problem, norm).eta > 0
    kernel = equilibrium(problem, norm).eta > 0
    pictures = [noisy > 0.5, regression, kernel, _random(noisy)]
    names = ["input", "Newton", "equilibrium", "random weights"]
    figure, axes = subplots(4, len(rows), width=len(rows) * 0.8 + 0.4, height=3.6)
    for row, (name, images) in enumerate(zip(names, pictures, strict=True)):
        for column, image in enumerate(images.cpu()):
            colours = image.view(28, 28, 1).double().repeat(1, 1, 3)
            if row == 2:
                pixel = result["closest"][column]["pixel"]
                colours[pixel // 28, pixel % 28] = torch.tensor([1.0, 0.0, 0.0]).double()
            axes[row, column].imshow(colours.numpy(), interpolation="nearest")
            axes[row, column].set_axis_off()
        axes[row, 0].set_title(name, fontsize=7, loc="left")
    figure.suptitle("binarised at ½; red: the pixel nearest to a tie", fontsize=7)
    return {"closest": figure}


def _random(y: Tensor) -> Tensor:
    """The same architecture with PyTorch's default weights."""
    g = torch.Generator().manual_seed(0)
    W1, W2, V1, V2 = (uniform(y.new_zeros(784, 784), g) for _ in range(4))
    f = lambda z: torch.sigmoid(z @ W1.mT + y @ W2.mT)  # noqa: E731
    z = kerneq.solve(f, torch.full_like(y, 0.5), Picard(), tol=1e-6, max_steps=200).value
    return z @ V1.mT + y @ V2.mT > 0


def summarise(settings: Mnist, result: Result) -> list[str]:
    """How many pixels disagree, in float64 and in float32."""
    lines = [
        f"{result['images']} images, {result['pixels']} pixels: the equilibrium and Newton's method disagree on "
        f"{result['disagreements']} pixels that are not provable ties; {result['ties']} provable ties; largest "
        f"difference of f {result['largest_gap']:.1e}."
    ]
    if settings.single:
        lines.append(
            f"In float32 the sign of f differs from Newton's in float64 on {result['float32_pixels']} pixels; σ(f) "
            f"is ½ to the last bit on {result['float32_halves']} pixels of {result['float32_images']} images (the "
            "paper's disagreements are such pixels, on 11 images)."
        )
    return lines


EXPERIMENT = Experiment("mnist", Mnist, run, draw, summarise, label=lambda settings: "mnist")

if __name__ == "__main__":
    main(EXPERIMENT)
