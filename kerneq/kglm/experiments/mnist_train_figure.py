"""Figure 14: test and training error over the gradient steps, the first hundred and all."""

from pathlib import Path
from typing import Any

import numpy as np

from kerneq.kglm.experiments.plots import COLOURS, save, subplots


def draw(result: dict[str, Any], path: Path) -> None:
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
    save(figure, path)
