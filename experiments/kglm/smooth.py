"""The smooth sequence-to-sequence task (Figure 5): one half of a Gaussian process sample from the other.

Informed, naive and random starts: test error over training, and sample outputs.
"""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import torch
from bank import DenseBank, train
from common import COLOURS, Experiment, Figures, Report, Result, main, plain, setting, silent, subplots
from matplotlib.figure import Figure
from torch import Tensor

from kerneq.kglm import AbstractCovariance, Periodic, SquaredExponential, spectral_norm
from kerneq.kglm.equilibrium import uniform

SCHEMES = ("informed", "naive", "random")
TRUE: AbstractCovariance = 0.1 * (SquaredExponential() * Periodic())


@dataclasses.dataclass(frozen=True)
class Smooth:
    """Defaults are the paper's, but for `norm` (λ = ‖K‖/norm), which it does not give."""

    seeds: int = setting(100, "repetitions, each with its own data and weights", low=1)
    train: int = setting(20000, "training sequences per seed", low=1)
    test: int = setting(2000, "test sequences per seed", low=1)
    points: int = setting(100, "points per sequence", low=2)
    epochs: int = setting(400, "one full-batch step each", low=0)
    freeze: int = setting(10, "epochs in which naive models train their readout only", low=0)
    lr: float = setting(1e-3, "Adam's", above=0)
    norm: float = setting(0.9, "spectral norm of the kernel-initialised hidden weights", above=0)
    relaxation: float = setting(0.7, "of Picard iteration", above=0, high=1)
    tol: float = setting(1e-4, "relative residual, forward and backward", above=0)
    max_steps: int = setting(50, "evaluations per solve, forward and backward", low=1)
    models_together: int = setting(300, "models trained side by side; less needs less memory", low=3)
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")


@dataclasses.dataclass(frozen=True)
class Coordinates:
    """Where the two halves of a sample are observed."""

    X: Tensor  # (n, 1)
    X2: Tensor

    @classmethod
    def of(cls, n: int) -> "Coordinates":
        """n points from −2π to 2π, and the same moved by −2."""
        X = torch.linspace(-2 * math.pi, 2 * math.pi, n, dtype=torch.float64)[:, None]
        return cls(X, X - 2)


def mean(x: Tensor) -> Tensor:
    """h(x) = e^{−x²/10} sin x + e^{−(x+9)²}."""
    return torch.exp(-x.square() / 10) * torch.sin(x) + torch.exp(-(x + 9).square())


def sample(count: int, at: Coordinates, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`count` joint draws of the process at X and X2, float32 (count, n) each."""
    Z = torch.cat([at.X, at.X2])
    values, vectors = torch.linalg.eigh(TRUE(Z, Z))  # singular where the two grids meet: no Cholesky
    root = vectors * values.clamp(min=0).sqrt()
    noise = torch.randn(count, len(Z), generator=generator, dtype=torch.float64) @ root.mT
    Y = (mean(Z[:, 0]) + noise).float()
    return Y[:, : len(at.X)].contiguous(), Y[:, len(at.X) :].contiguous()


def start(settings: Smooth, seeds: range) -> DenseBank:
    """Seeds × (informed, naive, random), in that order of nesting."""
    at, n = Coordinates.of(settings.points), settings.points
    true, plain_kernel = TRUE(at.X, at.X), SquaredExponential()(at.X, at.X)
    W1, W2, V1, V2 = [], [], [], []
    for seed in seeds:
        g = torch.Generator().manual_seed(seed)
        drawn = [uniform(torch.empty(n, n), g) for _ in range(8)]
        scale = settings.norm / spectral_norm(true)
        informed, readout = (scale * true).float(), (scale * TRUE(at.X2, at.X)).float()
        naive = (settings.norm / spectral_norm(plain_kernel) * plain_kernel).float()
        W1 += [-informed, -naive, drawn[0]]
        W2 += [informed, naive, drawn[1]]
        V1 += [-readout, drawn[2], drawn[4]]
        V2 += [readout, drawn[3], drawn[5]]
    return DenseBank(
        (torch.stack(W1), torch.stack(W2)),
        (torch.stack(V1), torch.stack(V2)),
        torch.tanh,
        relaxation=settings.relaxation,
        tol=settings.tol,
        max_steps=settings.max_steps,
    )


def run(settings: Smooth, device: torch.device, report: Report = silent) -> Result:
    """Test errors (epoch, seed, scheme)."""
    per = max(1, settings.models_together // len(SCHEMES))
    parts = [range(s, min(s + per, settings.seeds)) for s in range(0, settings.seeds, per)]
    errors = [_errors(settings, seeds, device, report) for seeds in parts]
    return {"schemes": SCHEMES, "errors": plain(torch.cat(errors, 1))}


def _errors(settings: Smooth, seeds: range, device: torch.device, report: Report) -> Tensor:
    """Test errors of some of the seeds, trained side by side."""
    at, bank = Coordinates.of(settings.points), start(settings, seeds).to(device)
    draws = [torch.Generator().manual_seed(10_000 + seed) for seed in seeds]
    training = [_repeat([sample(settings.train, at, g) for g in draws], device)]
    testing = [_repeat([sample(settings.test, at, g) for g in draws], device)]
    naive = torch.arange(bank.models, device=device) % len(SCHEMES) == SCHEMES.index("naive")

    def say(epoch: int, losses: Tensor) -> None:
        words = ""
        if epoch % max(1, settings.epochs // 10) == 0:
            means = losses.view(-1, len(SCHEMES)).mean(0).tolist()
            words = f"epoch {epoch}: " + ", ".join(f"{s} {m:.4f}" for s, m in zip(SCHEMES, means, strict=True))
        done = epoch / settings.epochs if settings.epochs else 1.0
        report((seeds.start + len(seeds) * done) / settings.seeds, words)

    history = train(
        bank,
        lambda epoch: iter(training),
        lambda: iter(testing),
        epochs=settings.epochs,
        lr=settings.lr,
        frozen=naive,
        freeze=settings.freeze,
        report=say,
    )
    return history.view(len(history), len(seeds), len(SCHEMES))


def _repeat(pairs: list[tuple[Tensor, Tensor]], device: torch.device) -> tuple[Tensor, Tensor]:
    """The data of each seed, once per scheme: (models, count, n) each."""
    first, second = (torch.stack(list(half)).to(device) for half in zip(*pairs, strict=True))
    times = len(SCHEMES)
    return first.repeat_interleave(times, 0), second.repeat_interleave(times, 0)


def outputs(settings: Smooth, epochs: int, count: int = 6) -> Iterator[tuple[str, Tensor]]:
    """Figure 5(b): targets; random and naive after `epochs` epochs; informed before any training."""
    one = dataclasses.replace(settings, seeds=1, epochs=epochs, train=min(settings.train, 1000), test=count)
    at, bank = Coordinates.of(one.points), start(one, range(1))
    g = torch.Generator().manual_seed(10_000)
    training = [_repeat([sample(one.train, at, g)], torch.device("cpu"))]
    testing = [_repeat([sample(count, at, g)], torch.device("cpu"))]
    y, target = testing[0]
    with torch.no_grad():
        informed = bank(y)[0][0]
    naive = torch.tensor([False, True, False])
    train(
        bank,
        lambda epoch: iter(training),
        lambda: iter(testing),
        epochs=epochs,
        lr=one.lr,
        frozen=naive,
        freeze=one.freeze,
    )
    with torch.no_grad():
        trained = bank(y)[0]
    yield "target", target[0]
    yield f"random, {epochs} epochs", trained[2]
    yield f"naive, {epochs} epochs", trained[1]
    yield "informed, no training", informed


def draw(settings: Smooth, result: Result, device: torch.device) -> Figures:
    """Figure 5: (a) the errors, (b) sample outputs."""
    return {"errors": _curves(np.array(result["errors"], dtype=float)), "samples": _samples(settings)}


def _curves(errors: np.ndarray) -> Figure:
    """Every seed thin, the mean thick."""
    figure, axes = subplots(1, 1, width=5, height=3.2)
    axis = axes[0, 0]
    for column, scheme in enumerate(SCHEMES):
        runs = errors[:, :, column]
        axis.plot(runs, color=COLOURS[scheme], alpha=0.15, linewidth=0.6)
        axis.plot(runs.mean(1), color=COLOURS[scheme], linewidth=1.8, label=scheme)
    axis.set(xlabel="epoch", ylabel="test MSE", yscale="log")
    axis.legend(frameon=False)
    return figure


def _samples(settings: Smooth) -> Figure:
    """Targets and outputs of one model a scheme, and the mean of the process."""
    figure, axes = subplots(2, 2, width=7, height=4.2)
    x = Coordinates.of(settings.points).X2[:, 0]
    for axis, (title, values) in zip(axes.flat, outputs(settings, epochs=20), strict=True):
        axis.plot(x, mean(x), color="black", linewidth=1.5)
        axis.plot(x, values.mT.numpy(), linewidth=0.8)
        axis.set(ylim=(-2, 2))
        axis.set_title(title, fontsize=9)
    return figure


def summarise(settings: Smooth, result: Result) -> list[str]:
    """Test error of each scheme before and after training."""
    errors = torch.tensor(result["errors"])
    lines = []
    for column, scheme in enumerate(SCHEMES):
        first, last = errors[0, :, column], errors[-1, :, column]
        lines.append(
            f"{scheme}: test MSE {first.mean():.4f} ± {first.std():.4f} before training, "
            f"{last.mean():.4f} ± {last.std():.4f} after {settings.epochs} epochs ({settings.seeds} seeds)"
        )
    return lines


EXPERIMENT = Experiment("smooth", Smooth, run, draw, summarise, label=lambda settings: "smooth")

if __name__ == "__main__":
    main(EXPERIMENT)
