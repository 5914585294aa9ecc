"""The smooth sequence-to-sequence task (Figure 5): one half of a Gaussian process sample from the other."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kerneq.kglm.bank import DenseBank, uniform
from kerneq.kglm.experiments.training import backward, plain, train
from kerneq.kglm.kernels import AbstractKernel, Periodic, SquaredExponential
from kerneq.kglm.spectral import matrix_norm
from kerneq.settings import setting
from kerneq.solvers import Picard

SCHEMES = ("informed", "naive", "random")
TRUE: AbstractKernel = 0.1 * (SquaredExponential() * Periodic())


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
    X: Tensor  # (n, 1)
    X2: Tensor

    @classmethod
    def of(cls, n: int) -> "Coordinates":
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
        drawn = [uniform((n, n), n, g) for _ in range(8)]
        scale = settings.norm / matrix_norm(true)
        informed, readout = (scale * true).float(), (scale * TRUE(at.X2, at.X)).float()
        naive = (settings.norm / matrix_norm(plain_kernel) * plain_kernel).float()
        W1 += [-informed, -naive, drawn[0]]
        W2 += [informed, naive, drawn[1]]
        V1 += [-readout, drawn[2], drawn[4]]
        V2 += [readout, drawn[3], drawn[5]]
    rule = backward(settings.relaxation, settings.tol, settings.max_steps)
    weights = (torch.stack(W1), torch.stack(W2)), (torch.stack(V1), torch.stack(V2))
    return DenseBank(*weights, "tanh", Picard(settings.relaxation), rule, settings.tol, settings.max_steps)


def run(settings: Smooth, device: torch.device, report: Callable[[str], None] = lambda words: None) -> dict[str, Any]:
    """Test errors (epoch, seed, scheme), and samples of the models' outputs for the figure."""
    per = max(1, settings.models_together // len(SCHEMES))
    parts = [range(s, min(s + per, settings.seeds)) for s in range(0, settings.seeds, per)]
    errors = [_errors(settings, seeds, device, report) for seeds in parts]
    return {"schemes": SCHEMES, "errors": plain(torch.cat(errors, 1))}


def _errors(settings: Smooth, seeds: range, device: torch.device, report: Callable[[str], None]) -> Tensor:
    at, bank = Coordinates.of(settings.points), start(settings, seeds).to(device)
    draws = [torch.Generator().manual_seed(10_000 + seed) for seed in seeds]
    training = [_repeat([sample(settings.train, at, g) for g in draws], device)]
    testing = [_repeat([sample(settings.test, at, g) for g in draws], device)]
    naive = torch.arange(bank.models, device=device) % len(SCHEMES) == SCHEMES.index("naive")

    def say(epoch: int, losses: Tensor) -> None:
        if epoch % max(1, settings.epochs // 10) == 0:
            means = losses.view(-1, len(SCHEMES)).mean(0).tolist()
            report(f"epoch {epoch}: " + ", ".join(f"{s} {m:.4f}" for s, m in zip(SCHEMES, means, strict=True)))

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
