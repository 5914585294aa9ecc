"""Image denoising over a grid of spectral norms, kernel against random starts (Figures 3, 6, 9 to 12, Table
1).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from kerneq.kglm.bank import ConvBank
from kerneq.kglm.convolution import Pairs, Window, filters, random_lengthscales
from kerneq.kglm.experiments.pictures import Pictures, Source, pictures
from kerneq.kglm.experiments.training import backward, plain, train
from kerneq.kglm.spectral import convolution_norm
from kerneq.settings import setting
from kerneq.solvers import Picard

SCHEMES = ("kernel", "random")


@dataclasses.dataclass(frozen=True)
class Denoise:
    """Defaults are the paper's grid on CIFAR-10 with 5 × 5 filters, the size its parameter counts imply."""

    source: Source = setting("cifar10", "cifar10, hsi or synthetic; hsi falls back to synthetic where absent")
    channels: int = setting(3, "of the pictures; for hsi and synthetic the first so many", low=1, high=25)
    size: int = setting(0, "side of the central square cut out, 0: whole pictures", low=0)
    train: int = setting(50000, "training pictures", low=1)
    test: int = setting(10000, "test pictures", low=1)
    noise: float = setting(0.2, "standard deviation of the noise", low=0)
    radius: int = setting(2, "of the filters", low=0)
    smallest: float = setting(0.01, "first spectral norm of the grid", above=0)
    largest: float = setting(10.0, "last spectral norm of the grid", above=0)
    norms: int = setting(25, "how many, in equal ratios", low=1)
    seeds: int = setting(100, "models per norm and scheme", low=1)
    epochs: int = setting(5, "", low=0)
    batch: int = setting(10, "pictures per step", low=1)
    lr: float = setting(1e-3, "Adam's, falling as a cosine", above=0)
    kernel: Literal["paper", "scripts", "definite"] = setting(
        "paper", "paper: ℓ² ~ U(0, 4); scripts: ℓ ~ U(0, 4), off-diagonals halved; definite: a true kernel"
    )
    relaxation: float = setting(1.0, "of Picard iteration; 1 is the paper's plain iteration", above=0, high=1)
    tol: float = setting(1e-2, "relative residual, forward and backward", above=0)
    max_steps: int = setting(50, "evaluations per solve, forward and backward", low=1)
    models_together: int = setting(500, "models trained side by side; less needs less memory", low=1)
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")

    def grid(self) -> Tensor:
        return torch.logspace(math.log10(self.smallest), math.log10(self.largest), self.norms)


def starts(settings: Denoise, size: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W₁, W₂, V₁, V₂ of all models, ordered scheme, norm, seed: (models, c, c, k, k) each."""
    c, side = settings.channels, 2 * settings.radius + 1
    g = torch.Generator().manual_seed(0)
    grid = settings.grid()[:, None, None, None, None, None]
    lengths = random_lengthscales(c, g, batch=(settings.norms, settings.seeds), squared=settings.kernel != "scripts")
    window: Window = "triangle" if settings.kernel == "definite" else "box"
    pairs: Pairs = "definite" if settings.kernel == "definite" else "published"
    table = filters(lengths, settings.radius, window, pairs, 0.5 if settings.kernel == "scripts" else 1.0)
    norm = norms_of(table.flatten(0, 1), size).view(settings.norms, settings.seeds, 1, 1, 1, 1)
    kernel = (grid * table / norm).flatten(0, 1)
    # entries N(0, ν²), with ν such that the norm is the grid's on average; the paper's ν is norm/19 at c = 3
    typical = norms_of(torch.randn(64, c, c, side, side, generator=g), size).mean()
    drawn = [
        (torch.randn(settings.norms, settings.seeds, c, c, side, side, generator=g) * grid / typical).flatten(0, 1)
        for _ in range(4)
    ]
    signs = (-1, 1, -1, 1)
    W1, W2, V1, V2 = (torch.cat([sign * kernel, draw]) for sign, draw in zip(signs, drawn, strict=True))
    return W1, W2, V1, V2


def norms_of(weights: Tensor, size: tuple[int, int]) -> Tensor:
    """Spectral norms of filters (models, c, c, k, k), a few at a time.

    On a torus of 32 × 32 at most: the symbol of a 5 × 5 filter is a polynomial of degree 2 in each frequency, whose
    maximum a finer grid can raise by 4 % at most.
    """
    torus = (min(size[0], 32), min(size[1], 32))
    return torch.cat([convolution_norm(part, torus) for part in weights.split(64)])  # type: ignore[no-untyped-call]


def run(settings: Denoise, device: torch.device, report: Callable[[str], None] = lambda words: None) -> dict[str, Any]:
    """Test errors (epoch, scheme, norm, seed) and each model's average spectral norm at the start."""
    data = pictures(
        settings.source, settings.train, settings.test, settings.channels, settings.size, settings.noise, device
    )
    size = (data.train.shape[-2], data.train.shape[-1])
    weights = starts(settings, size)
    norms = torch.stack([norms_of(weight, size) for weight in weights]).mean(0)
    parts = range(0, len(norms), settings.models_together)
    errors = []
    for first in parts:
        chosen = [weight[first : first + settings.models_together].to(device) for weight in weights]
        report(f"models {first + 1} to {first + len(chosen[0])} of {len(norms)}")
        errors.append(_errors(settings, data, chosen, report))
    shape = (len(SCHEMES), settings.norms, settings.seeds)
    history = torch.cat(errors, 1)
    return {
        "source": data.source,
        "schemes": SCHEMES,
        "parameters": 4 * settings.channels**2 * (2 * settings.radius + 1) ** 2,
        "norms": plain(norms.view(shape)),
        "errors": plain(history.view(len(history), *shape)),
    }


def bank(settings: Denoise, weights: list[Tensor]) -> ConvBank:
    rule = backward(settings.relaxation, settings.tol, settings.max_steps)
    hidden, readout = (weights[0], weights[1]), (weights[2], weights[3])
    return ConvBank(hidden, readout, "relu", Picard(settings.relaxation), rule, settings.tol, settings.max_steps)


def _errors(settings: Denoise, data: Pictures, weights: list[Tensor], report: Callable[[str], None]) -> Tensor:
    steps = -(-len(data.train) // settings.batch)

    def say(epoch: int, losses: Tensor) -> None:
        finite = losses[losses.isfinite()]
        report(f"epoch {epoch}: median test MSE {finite.median().item():.4g}, failed {len(losses) - len(finite)}")

    # expand: every model has the same target
    models = bank(settings, weights)
    return train(
        models,
        lambda epoch: ((y, x.expand(models.models, *x.shape)) for y, x in data.training(epoch, settings.batch)),
        lambda: ((y, x.expand(models.models, *x.shape)) for y, x in data.testing(settings.batch)),
        epochs=settings.epochs,
        lr=settings.lr,
        anneal_steps=steps * (settings.epochs + 1),
        report=say,
    )
