"""Image denoising over a grid of spectral norms, kernel against random starts (Figures 3, 6, 9 to 12, Table 1)."""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from bank import ConvBank, train
from common import COLOURS, Experiment, Figures, Report, Result, main, plain, setting, silent, subplots
from matplotlib.figure import Figure
from pictures import NoisyPictures, Source, find_scenes, pictures
from torch import Tensor

from kerneq.kglm import spectral_norm
from kerneq.kglm.kernels import Truncated, random_lengthscales

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
        """The spectral norms, (norms,)."""
        return torch.logspace(math.log10(self.smallest), math.log10(self.largest), self.norms)


def starts(settings: Denoise, size: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W₁, W₂, V₁, V₂ of all models, ordered scheme, norm, seed: (models, c, c, k, k) each."""
    c, side = settings.channels, 2 * settings.radius + 1
    g = torch.Generator().manual_seed(0)
    grid = settings.grid()[:, None, None, None, None, None]
    lengths = random_lengthscales(c, g, batch=(settings.norms, settings.seeds))
    if settings.kernel == "scripts":
        lengths = lengths.square()
    filters = Truncated(lengths, settings.radius, definite=settings.kernel == "definite").filters()
    if settings.kernel == "scripts":
        same = torch.eye(c, dtype=torch.bool)[:, :, None, None]
        filters = torch.where(same, filters, 0.5 * filters)
    norm = norms_of(filters.flatten(0, 1), size).view(settings.norms, settings.seeds, 1, 1, 1, 1)
    kernel = (grid * filters / norm).flatten(0, 1)
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
    return torch.cat([spectral_norm(part, torus) for part in weights.split(64)])


def run(settings: Denoise, device: torch.device, report: Report = silent) -> Result:
    """Test errors (epoch, scheme, norm, seed), each model's average spectral norm at the start, and Table 1's rows."""
    data = pictures(
        settings.source, settings.train, settings.test, settings.channels, settings.size, settings.noise, device
    )
    size = (data.train.shape[-2], data.train.shape[-1])
    weights = starts(settings, size)
    norms = torch.stack([norms_of(weight, size) for weight in weights]).mean(0)
    errors = []
    for first in range(0, len(norms), settings.models_together):
        chosen = [weight[first : first + settings.models_together].to(device) for weight in weights]
        last = first + len(chosen[0])
        report(first / len(norms), f"models {first + 1} to {last} of {len(norms)}")

        def say(epoch: int, losses: Tensor, first: int = first, last: int = last) -> None:
            finite = losses[losses.isfinite()]
            words = f"epoch {epoch}: median test MSE {finite.median().item():.4g}, failed {len(losses) - len(finite)}"
            done = (epoch + 1) / (settings.epochs + 1)
            report((first + (last - first) * done) / len(norms), words)

        errors.append(_errors(settings, data, chosen, say))
    shape = (len(SCHEMES), settings.norms, settings.seeds)
    history = torch.cat(errors, 1)
    result = {
        "source": data.source,
        "schemes": SCHEMES,
        "parameters": 4 * settings.channels**2 * (2 * settings.radius + 1) ** 2,
        "norms": plain(norms.view(shape)),
        "errors": plain(history.view(len(history), *shape)),
    }
    rows = table(result, sorted({0, min(3, settings.epochs), settings.epochs}))
    return {**result, "table": [dataclasses.asdict(row) for row in rows]}


def bank(settings: Denoise, weights: list[Tensor]) -> ConvBank:
    """The models with weights W₁, W₂, V₁, V₂."""
    W1, W2, V1, V2 = weights
    return ConvBank(
        (W1, W2),
        (V1, V2),
        torch.relu,
        relaxation=settings.relaxation,
        tol=settings.tol,
        max_steps=settings.max_steps,
    )


def _errors(
    settings: Denoise, data: NoisyPictures, weights: list[Tensor], say: Callable[[int, Tensor], None]
) -> Tensor:
    """Test errors (epochs + 1, models) of some of the models, trained side by side."""
    steps = -(-len(data.train) // settings.batch)
    models = bank(settings, weights)
    # expand: every model has the same target
    return train(
        models,
        lambda epoch: ((y, x.expand(models.models, *x.shape)) for y, x in data.training(epoch, settings.batch)),
        lambda: ((y, x.expand(models.models, *x.shape)) for y, x in data.testing(settings.batch)),
        epochs=settings.epochs,
        lr=settings.lr,
        anneal_steps=steps * (settings.epochs + 1),
        report=say,
    )


@dataclasses.dataclass(frozen=True)
class Row:
    """One entry of Table 1: log test error at the best norm, and how many models failed."""

    epoch: int
    scheme: str
    mean: float  # of log MSE at the norm where it is least
    deviation: float
    norm: float  # that norm's average spectral norm
    failed: int  # models of the whole grid whose error is not finite


def table(result: Result, epochs: list[int]) -> list[Row]:
    """As the paper counts: a failed model takes the largest finite error of its epoch and scheme."""
    errors = np.array(result["errors"], dtype=float)  # (epoch, scheme, norm, seed); null is NaN
    norms = np.array(result["norms"], dtype=float)
    rows = []
    for epoch in epochs:
        for number, scheme in enumerate(result["schemes"]):
            values = errors[epoch, number]
            failed = ~np.isfinite(values)
            if failed.all():
                rows.append(Row(epoch, scheme, float("nan"), float("nan"), float("nan"), int(failed.sum())))
                continue
            logs = np.log(np.where(failed, values[~failed].max(), values))
            best = int(logs.mean(1).argmin())
            spread = logs[best].std(ddof=1) if logs.shape[1] > 1 else 0.0
            rows.append(
                Row(epoch, scheme, logs[best].mean(), float(spread), norms[number, best].mean(), int(failed.sum()))
            )
    return rows


def draw(settings: Denoise, result: Result, device: torch.device) -> Figures:
    """Test error against spectral norm per epoch, and pictures before any training."""
    return {"norms": _grid(result), "pictures": _examples(settings)}


def _grid(result: Result) -> Figure:
    """One panel per epoch; models that failed, or lie above the panel, sit on its upper edge."""
    errors, norms = np.array(result["errors"], dtype=float), np.array(result["norms"], dtype=float)
    epochs = len(errors)
    columns = min(3, epochs)
    rows = -(-epochs // columns)
    figure, axes = subplots(rows, columns, width=3.2 * columns, height=2.5 * rows)
    for axis in axes.flat[epochs:]:
        axis.set_axis_off()
    for epoch, axis in zip(range(epochs), axes.flat, strict=False):
        values = errors[epoch]
        finite = values[np.isfinite(values)]
        low, high = finite.min() * 0.98, min(finite.max(), np.median(finite) * (4 if epoch else 100))
        for number, scheme in enumerate(SCHEMES):
            shown = np.where(np.isfinite(values[number]), values[number], np.inf).clip(max=high)
            axis.scatter(norms[number], shown, s=5, alpha=0.6, color=COLOURS[scheme], label=scheme)
        axis.set(xscale="log", yscale="log", ylim=(low, high * 1.02), xlabel="average spectral norm")
        axis.set_title(f"epoch {epoch}", fontsize=9)
    axes[0, 0].set_ylabel("test MSE")
    axes[0, 0].legend(frameon=False, fontsize=7)
    figure.suptitle(result["source"], fontsize=9)
    return figure


@torch.no_grad()
def _examples(settings: Denoise, count: int = 4) -> Figure:
    """Figure 3: clean, noisy, random start, kernel start, at the grid's norm nearest to 0.9."""
    data = pictures(settings.source, 1, count, settings.channels, settings.size, settings.noise, torch.device("cpu"))
    size = (data.test.shape[-2], data.test.shape[-1])
    near = int((settings.grid().log() - np.log(0.9)).abs().argmin()) * settings.seeds
    half = settings.norms * settings.seeds
    models = bank(settings, [weight[[half + near, near]] for weight in starts(settings, size)])
    noisy, clean = next(data.testing(count))
    random, kernel = models(noisy)[0]
    figure, axes = subplots(count, 4, width=5, height=1.3 * count)
    for row, shown in enumerate(zip(clean, noisy, random, kernel, strict=True)):
        for axis, picture in zip(axes[row], shown, strict=True):
            three = picture[[0, picture.shape[0] // 2, -1]] if picture.shape[0] != 3 else picture
            axis.imshow(three.clamp(0, 1).permute(1, 2, 0).numpy(), interpolation="nearest")
            axis.set_axis_off()
    for axis, title in zip(axes[0], ("clean", "noisy", "random start", "kernel start"), strict=True):
        axis.set_title(title, fontsize=8)
    figure.suptitle(data.source, fontsize=8)
    return figure


def summarise(settings: Denoise, result: Result) -> list[str]:
    """Table 1."""
    models = 2 * settings.norms * settings.seeds
    lines = [f"{result['source']}: {models} models of {result['parameters']} parameters"]
    for row in result["table"]:
        lines.append(
            f"epoch {row['epoch']}, {row['scheme']}: log MSE {row['mean']:.2f} ± {row['deviation']:.2f} "
            f"at norm {row['norm']:.2g}, {row['failed']} failed"
        )
    return lines


def label(settings: Denoise) -> str:
    """cifar10, cifar10-definite, hsi-4 …, or hsi-stand-in."""
    kind = "-definite" if settings.kernel == "definite" else ""
    if settings.source == "cifar10":
        return f"cifar10{kind}"
    return f"hsi-{settings.channels}{kind}" if settings.source == "hsi" and find_scenes() else f"hsi-stand-in{kind}"


EXPERIMENT = Experiment("denoise", Denoise, run, draw, summarise, label)

if __name__ == "__main__":
    main(EXPERIMENT)
