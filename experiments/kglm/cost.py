"""What initialisation costs (Figure 8): seconds per layer, kernel against random, dense and convolutional."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from common import COLOURS, Experiment, Figures, Job, Record, Result, main, subplots
from torch import nn

from kerneq.kglm import initialise
from kerneq.settings import ConfigError, setting


@dataclasses.dataclass(frozen=True)
class Cost:
    """Defaults are the paper's ranges; it averages over 100 runs. Its released timer.py has points = 50."""

    widths: tuple[int, ...] = setting((50, 100, 200, 300, 400, 500, 600, 700, 800), "of dense layers", low=1)
    channels: tuple[int, ...] = setting((1, 2, 4, 8, 16, 32, 64), "of convolutional layers", low=1)
    points: int = setting(0, "of a dense layer's kernel matrix whatever its width; 0: as many as the width", low=0)
    size: int = setting(32, "side of the pictures a convolution's norm is measured on", low=5)
    runs: int = setting(20, "repetitions; the median counts", low=1)
    device: str = setting("cpu", "auto, cpu, cuda or cuda:N")


def run(settings: Cost, job: Job) -> Result:
    """Median seconds to start W₁ and W₂ of each layer; a kernel layer needs one matrix for both."""
    if not settings.widths or not settings.channels:
        raise ConfigError("`widths` and `channels` need an entry each.")
    seconds = {kind: {"kernel": [], "random": []} for kind in ("dense", "convolutional")}
    dense = functools.partial(nn.Linear, bias=False, device=job.device)
    conv = functools.partial(nn.Conv2d, kernel_size=5, bias=False, device=job.device)
    jobs = [("dense", dense(settings.points or n, settings.points or n), dense(n, n)) for n in settings.widths]
    jobs += [("convolutional", layer, layer) for layer in (conv(n, n) for n in settings.channels)]
    for done, (kind, kernel, random) in enumerate(jobs, start=1):
        start = functools.partial(initialise, kernel, "naive", size=(settings.size, settings.size))
        seconds[kind]["kernel"].append(_median(start, settings.runs, job.device))
        seconds[kind]["random"].append(_median(functools.partial(_random, random), settings.runs, job.device))
        job.report(done / len(jobs), "")
    return {"widths": settings.widths, "channels": settings.channels, **seconds}


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


def draw(records: Sequence[Record[Cost]]) -> Figures:
    """Seconds against size, dense and convolutional, on one vertical axis; variants in one panel."""
    figure, axes = subplots(1, 2, width=8, height=3.2, sharey=True)
    panels = (("dense", "widths", "width"), ("convolutional", "channels", "channels"))
    for axis, (kind, key, label) in zip(axes[0], panels, strict=True):
        for record, style in zip(records, ("o-", "s--", "^:"), strict=False):
            for scheme, seconds in record.result[kind].items():
                if kind == "dense" and scheme == "kernel":
                    points = record.settings.points
                    words = (
                        f"kernel, {points} points (as released)" if points else "kernel, as many points as the width"
                    )
                elif record is records[0]:
                    words = scheme
                else:
                    continue  # the variants differ in the dense kernel only
                axis.plot(record.result[key], seconds, style, markersize=3, color=COLOURS[scheme], label=words)
        axis.set(xlabel=label, yscale="log")
        axis.set_title(kind, fontsize=9)
        axis.legend(frameon=False, fontsize=7)
    axes[0, 0].set_ylabel("seconds")
    figure.suptitle(f"median of {records[0].settings.runs} runs on a {records[0].settings.device.upper()}", fontsize=8)
    return {"cost": figure}


def summarise(settings: Cost, result: Result) -> list[str]:
    """The largest layer of each kind."""
    lines = []
    for kind, key in (("dense", "widths"), ("convolutional", "channels")):
        kernel, random = (result[kind][scheme][-1] for scheme in ("kernel", "random"))
        lines.append(f"{kind}, {result[key][-1]} {key}: kernel {kernel:.2g} s, random {random:.2g} s")
    return lines


EXPERIMENT = Experiment("cost", Cost, run, draw, summarise, label=lambda settings: "")

if __name__ == "__main__":
    main(EXPERIMENT)
