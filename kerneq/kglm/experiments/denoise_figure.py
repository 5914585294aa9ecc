"""Figures 3, 6 and 9 to 12: test error against spectral norm per epoch, and pictures before any training."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from kerneq.kglm.experiments.denoise import SCHEMES, Denoise, bank, starts
from kerneq.kglm.experiments.pictures import pictures
from kerneq.kglm.experiments.plots import COLOURS, save, subplots


def draw(settings: Denoise, result: dict[str, Any], folder: Path) -> None:
    _grid(result, folder / "norms.png")
    _pictures(settings, folder / "pictures.png")


def _grid(result: dict[str, Any], path: Path) -> None:
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
    save(figure, path)


@torch.no_grad()
def _pictures(settings: Denoise, path: Path, count: int = 4) -> None:
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
    save(figure, path)
