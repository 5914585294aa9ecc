"""What initialisation costs (Figure 8): seconds per layer, kernel against random, dense and convolutional."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kerneq.kglm.experiments.plots import COLOURS, save, subplots
from kerneq.kglm.initialisation import initialise
from kerneq.settings import setting


@dataclasses.dataclass(frozen=True)
class Cost:
    """Defaults are the paper's ranges; it averages over 100 runs."""

    widths: tuple[int, ...] = setting((50, 100, 200, 300, 400, 500, 600, 700, 800), "of dense layers")
    channels: tuple[int, ...] = setting((1, 2, 4, 8, 16, 32, 64), "of convolutional layers")
    size: int = setting(32, "side of the pictures a convolution's norm is measured on", low=5)
    runs: int = setting(20, "repetitions; the median counts", low=1)
    device: str = setting("cpu", "auto, cpu, cuda or cuda:N")


def run(settings: Cost, device: torch.device) -> dict[str, Any]:
    """Median seconds to start W₁ and W₂ of each layer; a kernel layer needs one matrix for both."""
    dense: dict[str, list[float]] = {"kernel": [], "random": []}
    conv: dict[str, list[float]] = {"kernel": [], "random": []}
    size = (settings.size, settings.size)
    for width in settings.widths:
        matrix = nn.Linear(width, width, bias=False, device=device)
        dense["kernel"].append(_median(functools.partial(initialise, matrix, "naive"), settings.runs, device))
        dense["random"].append(_median(functools.partial(_random, matrix), settings.runs, device))
    for channels in settings.channels:
        bank = nn.Conv2d(channels, channels, 5, bias=False, device=device)
        kernel = functools.partial(initialise, bank, "naive", size=size)
        conv["kernel"].append(_median(kernel, settings.runs, device))
        conv["random"].append(_median(functools.partial(_random, bank), settings.runs, device))
    return {"widths": settings.widths, "channels": settings.channels, "dense": dense, "convolutional": conv}


def _random(layer: nn.Module) -> None:
    """Gaussian, as the paper times it; twice, as W₁ and W₂ are drawn apart."""
    for weight in (*layer.parameters(), *layer.parameters()):
        nn.init.normal_(weight)


def _median(action: Callable[[], object], runs: int, device: torch.device) -> float:
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def draw(result: dict[str, Any], path: Path) -> None:
    figure, axes = subplots(1, 2, width=7, height=2.8)
    panels = (("dense", "widths", "width"), ("convolutional", "channels", "channels"))
    for axis, (kind, key, label) in zip(axes[0], panels, strict=True):
        for scheme, seconds in result[kind].items():
            axis.plot(result[key], seconds, "o-", markersize=3, color=COLOURS[scheme], label=scheme)
        axis.set(xlabel=label, ylabel="seconds", yscale="log")
        axis.set_title(kind, fontsize=9)
    axes[0, 0].legend(frameon=False)
    save(figure, path)
