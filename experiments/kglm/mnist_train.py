"""Fine-tuning the MNIST equilibrium from kernel and from random weights (Figure 14).

On a GPU a step is hundreds of small launches, and to wait for a residual between them costs more than they do. There
every solve has its `max_steps` evaluations, nothing waits, and a step is one CUDA graph; the record has the residuals.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from bank import DenseBank, Iteration, plain, squared_error
from common import COLOURS, Experiment, Figures, Job, Record, Result, main, subplots
from mnist import Mnist, binarised, corrupt, kernel_matrix
from torch import Tensor

from kerneq.kglm.initialisation import uniform
from kerneq.lab.training.loop import GraphedStep
from kerneq.settings import setting

SCHEMES = ("kernel", "random")


@dataclasses.dataclass(frozen=True)
class MnistTrain:
    """Defaults are the paper's: as many steps as 5 epochs have, though of images drawn with replacement."""

    images: int = setting(60000, "training images", low=1, high=60000)
    test: int = setting(10000, "test images", low=1, high=10000)
    steps: int = setting(3000, "gradient steps", low=1)
    batch: int = setting(100, "images per step", low=1)
    lr: float = setting(1e-3, "Adam's", above=0)
    flips: float = setting(0.3, "share of the pixels that are flipped", low=0, high=1)
    seeds: int = setting(1, "random starts; the kernel start has none", low=1)
    measure: int = setting(
        25, "steps between two measurements on the test images; also each of the first 10 and the last", low=1
    )
    tol: float = setting(1e-4, "relative residual, forward and backward", above=0)
    max_steps: int = setting(20, "evaluations per solve, forward and backward; on a GPU always all", low=1)
    graph: bool = setting(True, "on a GPU: a step as one CUDA graph")
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")


def start(settings: MnistTrain, rescue: bool = True) -> DenseBank:
    """Make the kernel model, then the random ones; without `rescue` no solve checks its residual."""
    K = kernel_matrix(Mnist())
    scaled = (K / (2 * torch.linalg.matrix_norm(K, 2))).float()
    generators = [torch.Generator().manual_seed(seed) for seed in range(settings.seeds)]

    def stack(sign: float) -> Tensor:
        return torch.stack([sign * scaled] + [uniform(torch.empty(784, 784), g) for g in generators])

    weights = [stack(sign) for sign in (-1.0, 1.0, -1.0, 1.0)]
    return DenseBank(weights, torch.sigmoid, Iteration(settings.tol, settings.max_steps, rescue=rescue))


def run(settings: MnistTrain, job: Job) -> Result:
    """Train: per step the training error of the grey prediction, at times the test error of the binarised one."""
    device, saved = job.device, job.saved
    on_gpu = device.type == "cuda"
    bank = start(settings, rescue=not on_gpu).to(device)
    clean = binarised("train", settings.images).float()
    target = binarised("test", settings.test).float()
    noisy = corrupt(clean, settings.flips, seed=0).to(device)
    held_out = corrupt(target, settings.flips, seed=1).to(device)
    clean, target = clean.to(device), target.to(device)
    optimizer = torch.optim.Adam(bank.parameters(), lr=settings.lr, fused=on_gpu, capturable=on_gpu)
    batches = torch.randint(len(noisy), (settings.steps, settings.batch), generator=torch.Generator().manual_seed(0))
    batches = batches.to(device)
    latest = torch.zeros(bank.models, device=device)

    def descend(y: Tensor, x: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = squared_error(predict(bank, y)[0], x)
        loss.sum().backward()
        optimizer.step()
        latest.copy_(loss.detach())

    update = GraphedStep(descend) if on_gpu and settings.graph else descend
    seen: dict[str, list[Any]] = {"looks": [], "test": [], "residuals": []}
    training = torch.zeros(settings.steps, bank.models, device=device)
    name, first, began = f"seeds-{settings.seeds}", 0, time.perf_counter()
    kept = saved.load(name)
    if kept is not None:
        bank.load_state_dict(kept["bank"])
        optimizer.load_state_dict(kept["optimizer"])
        first, seen = kept["step"], {key: kept[key] for key in seen}
        training[:first] = kept["training"].to(device)
    for step in range(first, settings.steps + 1):
        if step > first and saved.due():
            state = {"bank": bank.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            saved.save(name, {**state, **seen, "training": training[:step].clone()})
        if step <= 10 or step % settings.measure == 0 or step == settings.steps:
            wrong, residual = _binarised_error(bank, held_out, target)
            seen["looks"].append(step)
            seen["test"].append(wrong)
            seen["residuals"].append(residual)
            words = (
                f"step {step}, {time.perf_counter() - began:.1f} s: test error kernel {wrong[0]:.4f}, "
                f"random {wrong[1:].mean():.4f}; residual at most {residual.max():.1e}"
            )
            job.report(step / settings.steps, words if step % (10 * settings.measure) == 0 else "")
        if step == settings.steps:
            break
        update(noisy[batches[step]], clean[batches[step]])
        training[step] = latest
    saved.drop(name)
    return {
        "schemes": SCHEMES,
        "looks": seen["looks"],
        **{key: plain(torch.stack(seen[key])) for key in ("test", "residuals")},
        "training": plain(training.cpu()),
    }


def predict(bank: DenseBank, y: Tensor) -> tuple[Tensor, Tensor]:
    """σ(f*), the grey prediction (models, batch, 784), and the relative residual of each model's solve."""
    prediction, solution = bank(y.expand(bank.models, *y.shape))
    return torch.sigmoid(prediction), solution.residual


@torch.no_grad()
def _binarised_error(bank: DenseBank, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Share of wrong pixels of each model, and its largest residual."""
    wrong, worst = torch.zeros(2, bank.models, device=y.device)
    for first in range(0, len(y), 1000):
        part = slice(first, first + 1000)
        grey, residual = predict(bank, y[part])
        wrong += ((grey > 0.5) != (target[part] > 0.5)).float().flatten(1).sum(1)
        worst = torch.maximum(worst, residual)
    return (wrong / target.numel()).cpu(), worst.cpu()


def draw(records: Sequence[Record[MnistTrain]]) -> Figures:
    """Figure 14: test and training error over the gradient steps, the first hundred and all; a row has one axis."""
    settings, result = records[0].settings, records[0].result
    looks, test = np.array(result["looks"]), np.array(result["test"], dtype=float)
    training = np.array(result["training"], dtype=float).reshape(-1, test.shape[1])
    figure, axes = subplots(2, 2, width=8, height=5, sharex="col", sharey="row")
    for column, limit in enumerate((min(100, looks.max()), looks.max())):
        for scheme, models in (("kernel", slice(0, 1)), ("random", slice(1, None))):
            shown = looks <= limit
            panels = ((axes[0, column], looks[shown], test[shown, models]),
                      (axes[1, column], np.arange(len(training))[:limit], training[:limit, models]))  # fmt: skip
            for axis, steps, values in panels:
                axis.plot(steps, values, color=COLOURS[scheme], linewidth=0.5, alpha=0.3)
                axis.plot(steps, values.mean(1), color=COLOURS[scheme], linewidth=1.2, label=scheme)
        axes[1, column].set(xlabel=f"training step, first {limit}" if column == 0 else "training step, all")
        for axis in axes[:, column]:
            axis.set(yscale="log")
    axes[0, 0].set_ylabel(f"test error, binarised\n{settings.test} images")
    axes[1, 0].set_ylabel("training error, grey")
    axes[0, 0].legend(frameon=False)
    worst = max(value for row in result["residuals"] for value in row)
    figure.suptitle(
        f"random starts: {settings.seeds}, each thin, their mean thick; the kernel start is one; nothing is cut\n"
        f"solves of up to {settings.max_steps} evaluations; relative residual on the test images at most {worst:.1e}",
        fontsize=8,
    )
    return {"training": figure}


def summarise(settings: MnistTrain, result: Result) -> list[str]:
    """Test error before and after."""
    (kernel, random), (later, after) = ((row[0], np.mean(row[1:])) for row in (result["test"][0], result["test"][-1]))
    return [
        f"test error before training: kernel {kernel:.4f}, random {random:.4f}; after {settings.steps} steps: "
        f"{later:.4f}, {after:.4f} (random: mean of {settings.seeds})."
    ]


EXPERIMENT = Experiment("mnist_train", MnistTrain, run, draw, summarise, label=lambda settings: "mnist")

if __name__ == "__main__":
    main(EXPERIMENT)
