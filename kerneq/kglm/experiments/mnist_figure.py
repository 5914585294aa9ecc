"""Figure 13: the images whose prediction is nearest to a tie, predicted three ways."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kerneq
from kerneq.kglm.experiments.mnist import Mnist, binarised, corrupt, equilibrium, kernel_logistic_regression
from kerneq.kglm.experiments.mnist import kernel_matrix as matrix
from kerneq.kglm.experiments.plots import save, subplots
from kerneq.kglm.families import Bernoulli
from kerneq.kglm.initialisation import uniform
from kerneq.kglm.problem import Problem
from kerneq.kglm.system import ConjugateGradient
from kerneq.solvers import Picard


@torch.no_grad()
def draw(settings: Mnist, result: dict[str, Any], device: torch.device, path: Path) -> None:
    """Rows: corrupted input, Newton, kernel equilibrium (the nearest pixel in red), random equilibrium."""
    rows = [entry["image"] for entry in result["closest"]]
    noisy = corrupt(binarised("train", settings.images), settings.flips, settings.seed)[rows].to(device)
    K = matrix(settings).to(device)
    norm = torch.linalg.matrix_norm(K, 2).item()
    problem = Problem(K, noisy, Bernoulli(), settings.ratio * norm)
    newton = kernel_logistic_regression(problem, norm, ConjugateGradient()).eta > 0
    kernel = equilibrium(problem, norm).eta > 0
    pictures = [noisy > 0.5, newton, kernel, _random(noisy)]
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
    save(figure, path)


def _random(y: Tensor) -> Tensor:
    """The same architecture with PyTorch's default weights."""
    g = torch.Generator().manual_seed(0)
    W1, W2, V1, V2 = (uniform(y.new_zeros(784, 784), g) for _ in range(4))
    f = lambda z: torch.sigmoid(z @ W1.mT + y @ W2.mT)  # noqa: E731
    z = kerneq.solve(f, torch.full_like(y, 0.5), Picard(), tol=1e-6, max_steps=200).value
    return z @ V1.mT + y @ V2.mT > 0
