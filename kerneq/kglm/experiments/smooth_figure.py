"""Figure 5: test error over training, and sample outputs."""

from pathlib import Path
from typing import Any

import numpy as np

from kerneq.kglm.experiments.plots import COLOURS, save, subplots
from kerneq.kglm.experiments.smooth import SCHEMES, Coordinates, Smooth, mean, outputs


def draw(settings: Smooth, result: dict[str, Any], folder: Path) -> None:
    _curves(np.array(result["errors"], dtype=float), folder / "errors.png")
    _samples(settings, folder / "samples.png")


def _curves(errors: np.ndarray, path: Path) -> None:
    """(a): every seed thin, the mean thick."""
    figure, axes = subplots(1, 1, width=5, height=3.2)
    axis = axes[0, 0]
    for column, scheme in enumerate(SCHEMES):
        runs = errors[:, :, column]
        axis.plot(runs, color=COLOURS[scheme], alpha=0.15, linewidth=0.6)
        axis.plot(runs.mean(1), color=COLOURS[scheme], linewidth=1.8, label=scheme)
    axis.set(xlabel="epoch", ylabel="test MSE", yscale="log")
    axis.legend(frameon=False)
    save(figure, path)


def _samples(settings: Smooth, path: Path) -> None:
    """(b)."""
    figure, axes = subplots(2, 2, width=7, height=4.2)
    x = Coordinates.of(settings.points).X2[:, 0]
    for axis, (title, values) in zip(axes.flat, outputs(settings, epochs=20), strict=True):
        axis.plot(x, mean(x), color="black", linewidth=1.5)
        axis.plot(x, values.mT.numpy(), linewidth=0.8)
        axis.set(ylim=(-2, 2))
        axis.set_title(title, fontsize=9)
    save(figure, path)
