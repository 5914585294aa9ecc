"""Pictures of a solve and of a run for notebooks and scripts, by matplotlib."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from ..solution import Solution, Trace

__all__ = ["curves", "solve"]
__dir__ = __all__.copy  # `dir` lists the public names only

LINES = 32  # samples that are drawn at most


def solve(found: Solution | Trace) -> list[Axes]:
    """Draw a solve that was traced, residual and energy step by step and how many steps samples took; return the axes.

        s = layer(x, trace=True)
        axes = kq.plot.solve(s)  # shown by `plt.show()`, or by itself in a notebook
        axes[0].figure.savefig("solve.png")

    Each line is a sample, of the first 32. The energy is that above the lowest of its sample, and left out where f has
    none. Of a `Trace` alone there is no tolerance, and no number of steps.
    """
    trace = found if isinstance(found, Trace) else found.trace
    if trace is None:
        raise ValueError("This solution has no trace: solve with `layer(x, trace=True)`.")
    solution = None if isinstance(found, Trace) else found
    panels = 1 + (trace.energy is not None) + (solution is not None)
    figure, grid = plt.subplots(1, panels, figsize=(4 * panels, 3), layout="constrained", squeeze=False)
    axes = [*grid[0]]
    rest = iter(axes)

    residual = next(rest)
    residual.semilogy(1 + np.arange(len(trace.residual)), trace.residual[:, :LINES].detach().cpu().numpy(), alpha=0.6)
    residual.set(title="relative residual ‖f(z) − z‖ / ‖f(z)‖", xlabel="step")
    if solution is not None:
        residual.axhline(solution.tol, color="black", linestyle="--", label="tolerance")
        residual.legend()
    if trace.energy is not None:
        energy = trace.energy[:, :LINES].detach().cpu().numpy()
        above = np.ma.masked_less_equal(energy - energy.min(0), 0)
        axis = next(rest)
        axis.semilogy(1 + np.arange(len(energy)), above, alpha=0.6)
        axis.set(title="energy above its lowest", xlabel="step")
    if solution is not None:
        steps = solution.steps.flatten().cpu().numpy()
        axis = next(rest)
        axis.hist(steps, bins=np.arange(steps.min(), steps.max() + 2) - 0.5)
        missed = int((~solution.converged).sum())
        axis.set(title=f"{len(steps)} samples, {missed} not converged", xlabel="steps", ylabel="samples")
    return axes


def curves(rows: Sequence[Mapping[str, Any]]) -> list[Axes]:
    """Draw loss and accuracy of a run, epoch by epoch, in training and on held-out images; return the axes.

    run = kq.train("geq-tiny-digits", "runs/digits", quiet=True)
    kq.plot.curves(run.rows())
    """
    figure, grid = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained")
    for axis, name in zip(grid, ("loss", "accuracy"), strict=True):
        for split, words in (("train", "training"), ("validation", "held-out images")):
            points = [(row["epoch"], row[split][name]) for row in rows if (row[split] or {}).get(name) is not None]
            if points:
                axis.plot(*zip(*points, strict=True), ".-", label=words)
                axis.legend()
        axis.set(xlabel="epoch", ylabel=name)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return [*grid]
