"""Figures without a display: matplotlib's objects, never its global state."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

COLOURS = {"informed": "C0", "naive": "C2", "random": "C3", "kernel": "C0"}


def subplots(rows: int, columns: int, width: float, height: float) -> tuple[Figure, Any]:
    """A figure and its axes as an array (rows, columns)."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, np.asarray(figure.subplots(rows, columns, squeeze=False))


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
