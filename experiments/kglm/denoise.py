"""Image denoising over a grid of spectral norms, kernel against random starts (Figures 3, 6, 9 to 12, Table 1)."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from bank import ConvBank, Iteration, in_parts, plain, train
from common import COLOURS, Experiment, Figures, Job, Record, Result, main, subplots
from matplotlib.figure import Figure
from pictures import NoisyPictures, Source, find_scenes, pictures
from torch import Tensor
from torch.nn import functional as F

from kerneq.kglm import spectral_norm
from kerneq.kglm.kernels import Truncated, random_lengthscales
from kerneq.settings import setting

SCHEMES = ("kernel", "random")


@dataclasses.dataclass(frozen=True)
class Denoise:
    """Defaults are the paper's grid on CIFAR-10 with 5 × 5 filters, the size its parameter counts imply.

    The released scripts have kernel = "scripts", output = "relu", rescue = false and scaling = "min-max".
    """

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
    output: Literal["linear", "relu"] = setting("linear", "f = V₁z + V₂y, or its ReLU, as in the scripts")
    rescue: bool = setting(True, "what diverges keeps its best iterate; false: what overflows fails, as in the scripts")
    scaling: Literal["clipped", "min-max"] = setting("min-max", "of the pictures of Figure 3, as in the scripts")
    relaxation: float = setting(1.0, "of Picard iteration; 1 is the paper's plain iteration", above=0, high=1)
    tol: float = setting(1e-2, "relative residual, forward and backward", above=0)
    max_steps: int = setting(50, "evaluations per solve, forward and backward", low=1)
    models_together: int = setting(500, "models trained side by side: whole seeds, one at least", low=1)
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")

    def grid(self) -> Tensor:
        """The spectral norms, (norms,)."""
        return torch.logspace(math.log10(self.smallest), math.log10(self.largest), self.norms)

    def pictures(self, train: int, test: int, device: torch.device | None = None) -> NoisyPictures:
        """The first so many pictures to train and to test on."""
        return pictures(self.source, train, test, self.channels, self.size, self.noise, device or torch.device("cpu"))


def starts(
    settings: Denoise, size: tuple[int, int], seeds: range, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W₁, W₂, V₁, V₂ of some seeds' models, ordered scheme, norm, seed: (models, c, c, k, k) each.

    A seed's numbers do not depend on which others there are.
    """
    c, side = settings.channels, 2 * settings.radius + 1
    grid = settings.grid()[:, None, None, None, None, None]
    lengths, drawn = [], []
    for seed in seeds:
        g = torch.Generator().manual_seed(seed)
        lengths.append(random_lengthscales(c, g, batch=(settings.norms,)))
        drawn.append(torch.randn(4, settings.norms, c, c, side, side, generator=g))
    scales = torch.stack(lengths, 1)
    if settings.kernel == "scripts":
        scales = scales.square()
    filters = Truncated(scales, settings.radius, definite=settings.kernel == "definite").filters()
    if settings.kernel == "scripts":
        same = torch.eye(c, dtype=torch.bool)[:, :, None, None]
        filters = torch.where(same, filters, 0.5 * filters)
    norm = norms_of(filters.flatten(0, 1), size, device).view(settings.norms, len(seeds), 1, 1, 1, 1)
    kernel = (grid * filters / norm).flatten(0, 1)
    # entries N(0, ν²), with ν such that the norm is the grid's on average; the paper's ν is norm/19 at c = 3
    some = torch.randn(64, c, c, side, side, generator=torch.Generator().manual_seed(0))
    random = torch.stack(drawn, 2) * grid / norms_of(some, size, device).mean()  # (4, norms, seeds, …)
    signs = (-1, 1, -1, 1)
    W1, W2, V1, V2 = (torch.cat([sign * kernel, draw.flatten(0, 1)]) for sign, draw in zip(signs, random, strict=True))
    return W1, W2, V1, V2


def norms_of(weights: Tensor, size: tuple[int, int], device: torch.device) -> Tensor:
    """Spectral norms of filters (models, c, c, k, k), computed on `device`, a few at a time.

    On a torus of 32 × 32 at most: the symbol of a 5 × 5 filter is a polynomial of degree 2 in each frequency, whose
    maximum a finer grid can raise by 4 % at most.
    """
    torus = (min(size[0], 32), min(size[1], 32))
    return torch.cat([spectral_norm(part.to(device), torus).cpu() for part in weights.split(64)])


def run(settings: Denoise, job: Job) -> Result:
    """Test errors (epoch, scheme, norm, seed), each model's average spectral norm at the start, and Table 1's rows."""
    data = settings.pictures(settings.train, settings.test, job.device)
    per = max(1, settings.models_together // (len(SCHEMES) * settings.norms))
    parts = in_parts(settings.seeds, per, job.saved, functools.partial(_part, settings, data, job))
    errors, norms = (torch.cat([part[key] for part in parts], -1) for key in ("errors", "norms"))
    result = {
        "source": data.source,
        "schemes": SCHEMES,
        "parameters": parameters(settings),
        "norms": plain(norms),
        "errors": plain(errors),
    }
    return {**result, "table": table(result, sorted({0, min(3, settings.epochs), settings.epochs}))}


def parameters(settings: Denoise) -> int:
    """Of one model, as Table 1 counts them: four filter banks, no biases."""
    return 4 * settings.channels**2 * (2 * settings.radius + 1) ** 2


def _part(settings: Denoise, data: NoisyPictures, job: Job, seeds: range, name: str) -> dict[str, Tensor]:
    """Errors (epoch, scheme, norm, seed) and average norms (scheme, norm, seed) of some seeds, trained side by side."""
    size = (data.train.shape[-2], data.train.shape[-1])
    weights = starts(settings, size, seeds, job.device)
    shape = (len(SCHEMES), settings.norms, len(seeds))
    half = settings.norms * len(seeds)  # kernel models have the norms of the grid, in all four filter banks
    random = torch.stack([norms_of(weight[half:], size, job.device) for weight in weights]).mean(0)
    norms = torch.cat([settings.grid().repeat_interleave(len(seeds)), random]).view(shape)
    job.report(seeds.start / settings.seeds, f"seeds {seeds.start} to {seeds.stop - 1}: {2 * half} models")
    models = bank(settings, [weight.to(job.device) for weight in weights])

    def report_epoch(epoch: int, losses: Tensor | None) -> None:
        words = ""
        if losses is not None:
            finite = losses[losses.isfinite()]
            median = finite.median().item() if len(finite) else math.nan
            words = f"epoch {epoch}: median test MSE {median:.4g}, failed {len(losses) - len(finite)}"
        done = (epoch + 1) / (settings.epochs + 1)
        job.report((seeds.start + len(seeds) * done) / settings.seeds, words)

    def to_all(x: Tensor) -> Tensor:
        return x.expand(models.models, *x.shape)  # every model has the same target

    steps = -(-len(data.train) // settings.batch)
    history = train(
        models,
        lambda epoch: ((y, to_all(x)) for y, x in data.training(epoch, settings.batch)),
        lambda: ((y, to_all(x)) for y, x in data.testing(max(settings.batch, 100))),
        looks=range(settings.epochs + 1),
        lr=settings.lr,
        anneal_steps=steps * (settings.epochs + 1),
        report=report_epoch,
        saved=job.saved,
        name=name,
    )
    return {"errors": history.view(len(history), *shape), "norms": norms}


def bank(settings: Denoise, weights: Sequence[Tensor]) -> ConvBank:
    """The models with weights W₁, W₂, V₁, V₂."""
    iteration = Iteration(settings.tol, settings.max_steps, settings.relaxation, settings.rescue)
    return ConvBank(weights, torch.relu, iteration, rectified=settings.output == "relu")


def table(result: Result, epochs: list[int]) -> list[Result]:
    """Table 1: mean and deviation of log MSE at the norm where the mean is least, that norm, how many models failed.

    As the paper counts: a failed model takes the largest finite error of its epoch and scheme.
    """
    errors = np.array(result["errors"], dtype=float)  # (epoch, scheme, norm, seed); null is NaN
    norms = np.array(result["norms"], dtype=float)
    rows = []
    for epoch in epochs:
        for number, scheme in enumerate(result["schemes"]):
            values = errors[epoch, number]
            failed = ~np.isfinite(values)
            row = {"epoch": epoch, "scheme": scheme, **dict.fromkeys(("mean", "deviation", "norm"), math.nan)}
            if not failed.all():
                logs = np.log(np.where(failed, values[~failed].max(), values))
                best = int(logs.mean(1).argmin())
                row |= {"mean": logs[best].mean(), "norm": norms[number, best].mean()}
                row["deviation"] = logs[best].std(ddof=1) if logs.shape[1] > 1 else 0.0
            rows.append({**row, "failed": int(failed.sum())})
    return rows


def failures(result: Result, epoch: int) -> list[tuple[float, float, list[int], int]]:
    """Table 1's counts by range of norms: least and largest norm, failed models of each scheme, of how many each."""
    failed = ~np.isfinite(np.array(result["errors"], dtype=float)[epoch])  # (scheme, norm, seed)
    grid = np.array(result["norms"], dtype=float)[0, :, 0]  # the kernel models'
    rows = []
    for low, high in itertools.pairwise((0.0, 0.1, 1.0, 3.0, math.inf)):
        inside = (grid >= low) & (grid < high)
        if inside.any():
            part = failed[:, inside]
            rows.append((grid[inside].min(), grid[inside].max(), part.sum((1, 2)).tolist(), part[0].size))
    return rows


def linear_filter(settings: Denoise, count: int = 1000) -> float:
    """Test error of the best f = V₂y, by least squares on `count` pictures: all that is left where every unit is 0."""
    data = settings.pictures(settings.train, settings.test)  # all, so that the test pictures are those of the run
    data = dataclasses.replace(data, train=data.train[:count])

    def rows(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """A pixel a row: its neighbourhood in every channel, and the clean pixel."""
        around = F.unfold(pair[0], 2 * settings.radius + 1, padding=settings.radius)
        return around.mT.flatten(0, 1).double(), pair[1].flatten(2).mT.flatten(0, 1).double()

    parts = [(y.mT @ y, y.mT @ x) for y, x in map(rows, data.training(0, settings.batch))]
    gram, cross = (torch.stack(part).sum(0) for part in zip(*parts, strict=True))
    filters = torch.linalg.lstsq(gram, cross, driver="gelsd").solution
    squares = [(y @ filters - x).square().sum().item() for y, x in map(rows, data.testing(settings.batch))]
    return sum(squares) / data.test.numel()


def variant(settings: Denoise) -> str:
    """The choices in words."""
    kernels = {"paper": "the paper's kernel", "scripts": "the scripts' kernel", "definite": "definite kernel"}
    words = [kernels[settings.kernel], f"{settings.output} output"]
    if settings.relaxation != 1:
        words.append(f"relaxation {settings.relaxation:g}")
    words.append("divergence rescued" if settings.rescue else "divergence fails")
    whose = {"paper": "the paper's text: ", "scripts": "as released: ", "definite": "ours: "}
    return whose[settings.kernel] + ", ".join(words)


def draw(records: Sequence[Record[Denoise]]) -> Figures:
    """Test error against spectral norm per epoch, and pictures before any training; a variant a row."""
    return {"norms": _grid(records), "pictures": _examples(records)}


def _grid(records: Sequence[Record[Denoise]]) -> Figure:
    """A column an epoch, one vertical axis for all variants; what failed or lies above it sits on its upper edge."""
    errors = [np.array(record.result["errors"], dtype=float) for record in records]
    linear = [linear_filter(record.settings) for record in records]
    epochs = min(len(values) for values in errors)
    figure, axes = subplots(
        len(records), epochs, width=2.3 * epochs + 0.6, height=2.6 * len(records) + 0.3, sharex=True, sharey="col"
    )
    for epoch in range(epochs):
        pooled = np.concatenate([values[epoch].ravel() for values in errors])
        finite = pooled[np.isfinite(pooled)]
        low = 0.93 * min([finite.min(), *(linear if epoch else [])])
        high = min(finite.max(), np.median(finite) * (4 if epoch else 100))
        for axis, values, record, level in zip(axes[:, epoch], errors, records, linear, strict=True):
            norms = np.array(record.result["norms"], dtype=float)
            words = [f"epoch {epoch}, {values[epoch, 0].size} models each"]
            for number, scheme in enumerate(SCHEMES):
                found = np.where(np.isfinite(values[epoch, number]), values[epoch, number], np.inf)
                edge = high * (high / low) ** (0.03 * number)  # a line of its own for each scheme
                shown = np.where(found > high, edge, found)
                axis.scatter(norms[number], shown, s=4, alpha=0.5, color=COLOURS[scheme], label=scheme, clip_on=False)
                failed, above = int(np.isinf(found).sum()), int((np.isfinite(found) & (found > high)).sum())
                words.append(f"{scheme} {above} above, {failed} failed")
            if epoch:
                axis.axhline(level, color="0.7", linewidth=0.8, zorder=0)
            axis.set(xscale="log", yscale="log", ylim=(low, high))
            axis.set_title("\n".join(words), fontsize=7, pad=9)
            axis.tick_params(which="both", labelsize=7)
    for axis, record in zip(axes[:, 0], records, strict=True):
        axis.set_ylabel(f"test MSE, {variant(record.settings).partition(':')[0]}", fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("average spectral norm", fontsize=8)
    axes[0, 0].legend(frameon=False, fontsize=7)
    about = [
        f"{record.result['source']}, {variant(record.settings)}; {record.settings.seeds} seeds, "
        f"{record.settings.train} pictures"
        for record in records
    ]
    about.append(
        "failed or above the limit (100 times the median at epoch 0, then 4 times): on the edge, random over kernel\n"
        f"grey: the best linear filter, {', '.join(sorted({f'{level:.4f}' for level in linear}))}"
    )
    figure.suptitle("\n".join(about), fontsize=8)
    return figure


@torch.no_grad()
def _examples(records: Sequence[Record[Denoise]], count: int = 4) -> Figure:
    """Figure 3: clean, noisy, then random and kernel start of each variant, at the grid's norm nearest to 0.9."""
    first = records[0].settings
    data = first.pictures(1, count)
    size = (data.test.shape[-2], data.test.shape[-1])
    noisy, clean = next(data.testing(count))
    columns, titles, norms = [clean, noisy], ["clean", "noisy"], []
    for record in records:
        settings = record.settings
        near = int((settings.grid().log() - math.log(0.9)).abs().argmin())
        norms.append(f"{settings.grid()[near]:.2g}")
        weights = [
            weight[[settings.norms + near, near]] for weight in starts(settings, size, range(1), torch.device("cpu"))
        ]
        columns += list(bank(settings, weights)(noisy)[0])
        whose = variant(settings).partition(":")[0]
        titles += [f"random start\n{whose}", f"kernel start\n{whose}"]
    figure, axes = subplots(count, len(columns), width=1.35 * len(columns), height=1.5 * count + 0.5)
    for column, (images, title) in enumerate(zip(columns, titles, strict=True)):
        for axis, image in zip(axes[:, column], images, strict=True):
            three = image[[0, image.shape[0] // 2, -1]] if image.shape[0] != 3 else image
            low, high = three.min(), three.max()
            shown = (three - low) / (high - low).clamp_min(1e-12) if first.scaling == "min-max" else three.clamp(0, 1)
            axis.imshow(shown.permute(1, 2, 0).numpy(), interpolation="nearest")
            axis.set_axis_off()
            axis.set_title(f"{low:.2g} … {high:.2g}", fontsize=6)
        axes[0, column].set_title(f"{title}\n{images[0].min():.2g} … {images[0].max():.2g}", fontsize=7)
    scaled = (
        "each from its least to its largest value (numbers above it)" if first.scaling == "min-max" else "cut to [0, 1]"
    )
    grids = ", ".join(dict.fromkeys(norms))  # those of variants may differ
    figure.suptitle(f"{data.source}, before any training, norm {grids}\npictures {scaled}", fontsize=8)
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
    for low, high, counts, each in failures(result, settings.epochs):
        words = ", ".join(f"{scheme} {count}" for scheme, count in zip(SCHEMES, counts, strict=True))
        lines.append(f"failed after epoch {settings.epochs}, norms {low:.2g} to {high:.2g}: {words} of {each} each")
    return lines


def label(settings: Denoise) -> str:
    """cifar10, cifar10-definite, cifar10-scripts, hsi-4 …, or hsi-stand-in."""
    kind = "" if settings.kernel == "paper" else f"-{settings.kernel}"
    if settings.source == "cifar10":
        return f"cifar10{kind}"
    return f"hsi-{settings.channels}{kind}" if settings.source == "hsi" and find_scenes() else f"hsi-stand-in{kind}"


EXPERIMENT = Experiment("denoise", Denoise, run, draw, summarise, label)

if __name__ == "__main__":
    main(EXPERIMENT)
