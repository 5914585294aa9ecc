"""The smooth sequence-to-sequence task (Figure 5): one half of a Gaussian process sample from the other.

Informed, naive and random starts: test error over training, and sample outputs.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from bank import DenseBank, Held, Iteration, in_parts, plain, train
from common import COLOURS, Experiment, Figures, Job, Record, Result, main, subplots
from matplotlib.figure import Figure
from torch import Tensor

from kerneq.kglm import AbstractCovariance, Periodic, SquaredExponential, spectral_norm
from kerneq.kglm.initialisation import uniform
from kerneq.settings import setting

SCHEMES = ("informed", "naive", "random")
SAMPLES = 1000  # training sequences of Figure 5(b), which is drawn on a CPU
SHOWN = 6  # sequences in each of its panels
LIMIT = 2.0  # of their vertical axes
TRUE: AbstractCovariance = 0.1 * (SquaredExponential() * Periodic())


@dataclasses.dataclass(frozen=True)
class Smooth:
    """Defaults are the paper's text, but for `norm` (λ = ‖K‖/norm), which it does not give.

    The released scripts have freeze = 0 and skip = "zero".
    """

    seeds: int = setting(100, "repetitions, each with its own data and weights", low=1)
    train: int = setting(20000, "training sequences per seed", low=1)
    test: int = setting(2000, "test sequences per seed", low=1)
    points: int = setting(100, "points per sequence", low=2)
    epochs: int = setting(400, "one full-batch step each", low=0)
    freeze: int = setting(10, "epochs in which naive models train their readout only", low=0)
    skip: Literal["drawn", "zero"] = setting(
        "drawn", "V₂ of naive and random models; zero: both start at 0, and random models keep it, as in the scripts"
    )
    lr: float = setting(1e-3, "Adam's", above=0)
    norm: float = setting(0.9, "spectral norm of the kernel-initialised hidden weights", above=0)
    relaxation: float = setting(0.7, "of Picard iteration", above=0, high=1)
    tol: float = setting(1e-4, "relative residual, forward and backward", above=0)
    max_steps: int = setting(50, "evaluations per solve, forward and backward", low=1)
    models_together: int = setting(300, "models trained side by side; less needs less memory", low=3)
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")


def coordinates(n: int) -> tuple[Tensor, Tensor]:
    """Where the two halves of a sample are observed, (n, 1): n points from −2π to 2π, and the same moved by −2."""
    X = torch.linspace(-2 * math.pi, 2 * math.pi, n, dtype=torch.float64)[:, None]
    return X, X - 2


def mean(x: Tensor) -> Tensor:
    """h(x) = e^{−x²/10} sin x + e^{−(x+9)²}."""
    return torch.exp(-x.square() / 10) * torch.sin(x) + torch.exp(-(x + 9).square())


def sample(count: int, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`count` joint draws of both halves of the process, float32 (count, n) each."""
    Z = torch.cat(coordinates(n))
    values, vectors = torch.linalg.eigh(TRUE(Z, Z))  # singular where the two grids meet: no Cholesky
    root = vectors * values.clamp(min=0).sqrt()
    noise = torch.randn(count, len(Z), generator=generator).double() @ root.mT
    Y = (mean(Z[:, 0]) + noise).float()
    return Y[:, :n].contiguous(), Y[:, n:].contiguous()


def start(settings: Smooth, seeds: range) -> DenseBank:
    """Seeds × (informed, naive, random), in that order of nesting."""
    (X, X2), n = coordinates(settings.points), settings.points
    true, smooth = TRUE(X, X), SquaredExponential()(X, X)
    scale = settings.norm / spectral_norm(true)
    informed, readout = (scale * true).float(), (scale * TRUE(X2, X)).float()
    naive = (settings.norm / spectral_norm(smooth) * smooth).float()
    W1, W2, V1, V2 = [], [], [], []
    for seed in seeds:
        g = torch.Generator().manual_seed(seed)
        drawn = [uniform(torch.empty(n, n), g) for _ in range(6)]
        W1 += [-informed, -naive, drawn[0]]
        W2 += [informed, naive, drawn[1]]
        V1 += [-readout, drawn[2], drawn[4]]
        V2 += [readout, *((drawn[3], drawn[5]) if settings.skip == "drawn" else [torch.zeros(n, n)] * 2)]
    iteration = Iteration(settings.tol, settings.max_steps, settings.relaxation)
    # warm: every epoch is one step on the same batch
    return DenseBank([torch.stack(weight) for weight in (W1, W2, V1, V2)], torch.tanh, iteration, warm=True)


def run(settings: Smooth, job: Job) -> Result:
    """Measure test errors (measurement, seed, scheme); `looks` are the epochs of the measurements."""
    per = max(1, settings.models_together // len(SCHEMES))
    parts = in_parts(settings.seeds, per, job.saved, functools.partial(_part, settings, job))
    errors = plain(torch.cat([part["errors"] for part in parts], 1))
    return {"schemes": SCHEMES, "looks": looks(settings.epochs), "errors": errors}


def looks(epochs: int) -> list[int]:
    """The epochs after which test errors are measured: all of the first 20, then every tenth, and the last."""
    return sorted({*range(min(20, epochs) + 1), *range(0, epochs + 1, 10), epochs})


def held(settings: Smooth, bank: DenseBank) -> list[Held]:
    """Naive models train their readout only, for a while; as released, random ones keep their skip for ever."""
    start = torch.arange(bank.models, device=bank.W1.device) % len(SCHEMES)
    found = [Held(start == SCHEMES.index("naive"), ("W1", "W2", "b"), settings.freeze)]
    return [*found, Held(start == SCHEMES.index("random"), ("V2",))] if settings.skip == "zero" else found


def _part(settings: Smooth, job: Job, seeds: range, name: str) -> dict[str, Tensor]:
    """Test errors (measurement, seed, scheme) of some of the seeds, trained side by side."""
    bank = start(settings, seeds).to(job.device)
    draws = [torch.Generator().manual_seed(10_000 + seed) for seed in seeds]
    training, testing = (
        [_repeat([sample(count, settings.points, g) for g in draws], job.device)]
        for count in (settings.train, settings.test)
    )

    def report_epoch(epoch: int, losses: Tensor | None) -> None:
        words = ""
        if losses is not None and epoch % max(1, settings.epochs // 10) == 0:
            means = losses.view(-1, len(SCHEMES)).mean(0).tolist()
            words = f"epoch {epoch}: " + ", ".join(f"{s} {m:.4f}" for s, m in zip(SCHEMES, means, strict=True))
        done = epoch / settings.epochs if settings.epochs else 1.0
        job.report((seeds.start + len(seeds) * done) / settings.seeds, words)

    history = train(
        bank,
        lambda epoch: training,
        lambda: testing,
        looks=looks(settings.epochs),
        lr=settings.lr,
        held=held(settings, bank),
        report=report_epoch,
        saved=job.saved,
        name=name,
    )
    return {"errors": history.view(len(history), len(seeds), len(SCHEMES))}


def _repeat(pairs: list[tuple[Tensor, Tensor]], device: torch.device) -> tuple[Tensor, Tensor]:
    """The data of each seed, once per scheme: (models, count, n) each."""
    first, second = (torch.stack(list(half)).to(device) for half in zip(*pairs, strict=True))
    times = len(SCHEMES)
    return first.repeat_interleave(times, 0), second.repeat_interleave(times, 0)


def outputs(settings: Smooth, epochs: int) -> Iterator[tuple[str, Tensor]]:
    """Figure 5(b): targets; random and naive after `epochs` epochs; informed before any training."""
    bank, g = start(settings, range(1)), torch.Generator().manual_seed(10_000)
    training, testing = (
        [_repeat([sample(size, settings.points, g)], torch.device("cpu"))] for size in (SAMPLES, SHOWN)
    )
    y, target = testing[0]
    with torch.no_grad():
        informed = bank(y)[0][0]
    train(bank, lambda epoch: training, lambda: testing, looks=[epochs], lr=settings.lr, held=held(settings, bank))
    with torch.no_grad():
        trained = bank(y)[0]
    yield "target", target[0]
    yield f"random, {epochs} epochs", trained[2]
    yield f"naive, {epochs} epochs", trained[1]
    yield "informed, no training", informed


def variant(settings: Smooth) -> str:
    """The choices in words."""
    skip = "drawn" if settings.skip == "drawn" else "zero (random: for ever)"
    frozen = f"naive frozen for {settings.freeze} epochs" if settings.freeze else "nothing frozen"
    whose = "as released" if settings.skip == "zero" and not settings.freeze else "the paper's text"
    return f"{whose}: skip {skip}, {frozen}"


def draw(records: Sequence[Record[Smooth]]) -> Figures:
    """Figure 5: (a) the errors, (b) sample outputs."""
    return {"errors": _curves(records), "samples": _samples(records)}


def _curves(records: Sequence[Record[Smooth]]) -> Figure:
    """Errors, and below their ratio to the informed start's; every seed thin, the mean thick; a variant a column."""
    figure, axes = subplots(2, len(records), width=1 + 4.4 * len(records), height=5.6, sharex=True, sharey="row")
    for (upper, lower), record in zip(axes.T, records, strict=True):
        settings, result = record.settings, record.result
        errors, epochs = np.array(result["errors"], dtype=float), result["looks"]
        for column, scheme in enumerate(SCHEMES):
            for axis, runs in ((upper, errors[:, :, column]), (lower, errors[:, :, column] / errors[:, :, 0])):
                axis.plot(epochs, runs, color=COLOURS[scheme], alpha=0.15, linewidth=0.6)
                axis.plot(epochs, runs.mean(1), color=COLOURS[scheme], linewidth=1.8, label=scheme)
        upper.set(yscale="log")
        upper.set_title(f"{variant(settings)}\n{settings.seeds} seeds, {settings.train} sequences", fontsize=8)
        lower.set(xlabel="epoch", yscale="log")
        lower.set_yticks(ticks := [1, 1.2, 1.5, 2, 3, 4], [f"{tick:g}" for tick in ticks])
        lower.minorticks_off()
    axes[0, 0].set_ylabel("test MSE")
    axes[1, 0].set_ylabel("test MSE / informed's, per seed")
    axes[0, 0].legend(frameon=False)
    return figure


def _samples(records: Sequence[Record[Smooth]]) -> Figure:
    """Targets, outputs of one model a scheme, the process's mean; a variant a row, one pair of axes for all."""
    figure, axes = subplots(len(records), 4, width=11, height=2.4 * len(records) + 0.3, sharex=True, sharey=True)
    cut = 0
    for row, record in zip(axes, records, strict=True):
        x = coordinates(record.settings.points)[1][:, 0]
        for axis, (title, values) in zip(row, outputs(record.settings, epochs=20), strict=True):
            axis.plot(x, mean(x), color="black", linewidth=1.5)
            axis.plot(x, values.mT.numpy(), linewidth=0.8)
            axis.set(ylim=(-LIMIT, LIMIT))
            axis.set_title(title, fontsize=9)
            cut += int((values.abs() > LIMIT).sum())
        row[0].set_ylabel(variant(record.settings).partition(":")[0])
    words = f"nothing lies outside ±{LIMIT:g}" if cut == 0 else f"{cut} values outside ±{LIMIT:g} are cut off"
    figure.suptitle(f"seed 0, trained on {SAMPLES} sequences; black: the process's mean; {words}", fontsize=8)
    return figure


def summarise(settings: Smooth, result: Result) -> list[str]:
    """Test error of each scheme before and after training."""
    errors = torch.from_numpy(np.array(result["errors"], dtype=float))  # null, a model that failed, is NaN
    means, deviations = errors.mean(1), errors.std(1, correction=int(settings.seeds > 1))
    lines = [variant(settings)]
    for column, scheme in enumerate(SCHEMES):
        first, last = (f"{means[look, column]:.4f} ± {deviations[look, column]:.4f}" for look in (0, -1))
        lines.append(
            f"{scheme}: test MSE {first} before training, {last} after {settings.epochs} epochs "
            f"({settings.seeds} seeds)"
        )
    return lines


EXPERIMENT = Experiment("smooth", Smooth, run, draw, summarise, label=lambda settings: "smooth")

if __name__ == "__main__":
    main(EXPERIMENT)
