"""Fine-tuning the MNIST equilibrium from kernel and from random weights (Figure 14)."""

import dataclasses

import numpy as np
import torch
from bank import DenseBank
from common import COLOURS, Experiment, Figures, Report, Result, main, setting, silent, subplots
from mnist import Mnist, binarised, corrupt, kernel_matrix
from torch import Tensor

from kerneq.kglm.equilibrium import uniform

SCHEMES = ("kernel", "random")


@dataclasses.dataclass(frozen=True)
class MnistTrain:
    """Defaults are the paper's: 5 epochs of 600 steps."""

    images: int = setting(60000, "training images", low=1, high=60000)
    test: int = setting(10000, "test images", low=1, high=10000)
    steps: int = setting(3000, "gradient steps", low=0)
    batch: int = setting(100, "images per step", low=1)
    lr: float = setting(1e-3, "Adam's", above=0)
    flips: float = setting(0.3, "share of the pixels that are flipped", low=0, high=1)
    seeds: int = setting(1, "random starts; the kernel start has none", low=1)
    measure: int = setting(25, "steps between two looks at the test images, every one up to 10 and at the end", low=1)
    tol: float = setting(1e-4, "relative residual, forward and backward", above=0)
    max_steps: int = setting(30, "evaluations per solve, forward and backward", low=1)
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")


def start(settings: MnistTrain) -> DenseBank:
    """The kernel model first, then the random ones."""
    K = kernel_matrix(Mnist())
    scaled = (K / (2 * torch.linalg.matrix_norm(K, 2))).float()
    generators = [torch.Generator().manual_seed(seed) for seed in range(settings.seeds)]

    def stack(sign: float) -> Tensor:
        return torch.stack([sign * scaled] + [uniform(torch.empty(784, 784), g) for g in generators])

    W1, W2, V1, V2 = (stack(sign) for sign in (-1.0, 1.0, -1.0, 1.0))
    return DenseBank((W1, W2), (V1, V2), torch.sigmoid, tol=settings.tol, max_steps=settings.max_steps)


def run(settings: MnistTrain, device: torch.device, report: Report = silent) -> Result:
    """Per step the training error of the grey prediction, per look the test error of the binarised one."""
    bank = start(settings).to(device)
    clean = binarised("train", settings.images).float()
    target = binarised("test", settings.test).float()
    noisy = corrupt(clean, settings.flips, seed=0).to(device)
    held_out = corrupt(target, settings.flips, seed=1).to(device)
    clean, target = clean.to(device), target.to(device)
    optimizer = torch.optim.Adam(bank.parameters(), lr=settings.lr)
    g = torch.Generator().manual_seed(0)
    looks: list[int] = []
    test: list[list[float]] = []
    training: list[list[float]] = []
    for step in range(settings.steps + 1):
        if step <= 10 or step % settings.measure == 0 or step == settings.steps:
            looks.append(step)
            test.append(_binarised_error(bank, held_out, target).tolist())
            loud = step % (10 * settings.measure) == 0
            words = f"step {step}: test error kernel {test[-1][0]:.4f}, random {test[-1][1]:.4f}" if loud else ""
            report(step / max(1, settings.steps), words)
        if step == settings.steps:
            break
        index = torch.randint(len(noisy), (settings.batch,), generator=g).to(device)
        optimizer.zero_grad(set_to_none=True)
        loss = (predict(bank, noisy[index]) - clean[index]).square().flatten(1).mean(1)
        loss.sum().backward()
        optimizer.step()
        training.append(loss.detach().tolist())
    return {"schemes": SCHEMES, "looks": looks, "test": test, "training": training}


def predict(bank: DenseBank, y: Tensor) -> Tensor:
    """σ(f*), the grey prediction (models, batch, 784)."""
    prediction, _ = bank(y.expand(bank.models, *y.shape))
    return torch.sigmoid(prediction)


@torch.no_grad()
def _binarised_error(bank: DenseBank, y: Tensor, target: Tensor) -> Tensor:
    """Share of wrong pixels of each model."""
    wrong = torch.zeros(bank.models, device=y.device)
    for first in range(0, len(y), 1000):
        part = slice(first, first + 1000)
        wrong += ((predict(bank, y[part]) > 0.5) != (target[part] > 0.5)).float().flatten(1).sum(1)
    return (wrong / target.numel()).cpu()


def draw(settings: MnistTrain, result: Result, device: torch.device) -> Figures:
    """Figure 14: test and training error over the gradient steps, the first hundred and all."""
    looks, test = np.array(result["looks"]), np.array(result["test"])
    training = np.array(result["training"])
    figure, axes = subplots(2, 2, width=7.5, height=4.6)
    for column, limit in enumerate((100, looks.max())):
        for scheme, models in (("kernel", slice(0, 1)), ("random", slice(1, None))):
            shown = looks <= limit
            axes[0, column].plot(looks[shown], test[shown, models].mean(1), color=COLOURS[scheme], label=scheme)
            axes[1, column].plot(training[:limit, models].mean(1), color=COLOURS[scheme], linewidth=0.8)
        for row in (0, 1):
            axes[row, column].set(yscale="log")
        axes[1, column].set(xlabel="training step")
    axes[0, 0].set_ylabel("test error, binarised")
    axes[1, 0].set_ylabel("training error, grey")
    axes[0, 0].legend(frameon=False)
    return {"training": figure}


def summarise(settings: MnistTrain, result: Result) -> list[str]:
    """Test error before and after."""
    first, last = result["test"][0], result["test"][-1]
    return [
        f"test error before training: kernel {first[0]:.4f}, random {first[1]:.4f}; after {settings.steps} steps: "
        f"{last[0]:.4f}, {last[1]:.4f}."
    ]


EXPERIMENT = Experiment("mnist_train", MnistTrain, run, draw, summarise, label=lambda settings: "mnist")

if __name__ == "__main__":
    main(EXPERIMENT)
