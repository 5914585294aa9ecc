"""Carving a validation set out of the training data."""

from typing import TypeVar

import numpy as np
import torch

from .folder import Folder
from .images import Images
from .randomness import Purpose, stream

Pictures = TypeVar("Pictures", Images, Folder)


def split_validation(images: Pictures, count: int, seed: int) -> tuple[Pictures, Pictures]:
    """The training and the validation part, the latter of `count` pictures, class by class in proportion.

    Which pictures go where depends on the labels, `count` and `seed` alone. Both parts keep the order
    of the original."""
    labels = images.labels.cpu().numpy()
    if not 0 < count < len(labels):
        raise ValueError(f"`count` must lie between 1 and {len(labels) - 1} for this data set, got {count}.")
    rng = stream(Purpose.VALIDATION, seed)
    held = np.zeros(len(labels), dtype=bool)
    for label, quota in enumerate(_quotas(np.bincount(labels), count)):
        held[rng.permutation(np.flatnonzero(labels == label))[:quota]] = True
    train, validation = (torch.from_numpy(np.flatnonzero(mask)) for mask in (~held, held))
    return images.select(train), images.select(validation)


def _quotas(sizes: np.ndarray, count: int) -> np.ndarray:
    """Pictures to take of each class: proportional, whole, summing to `count` (largest remainders)."""
    exact = sizes * (count / sizes.sum())
    quotas = np.floor(exact).astype(np.int64)
    order = np.argsort(quotas - exact, kind="stable")  # largest remainder first, the lower label on a tie
    quotas[order[: count - quotas.sum()]] += 1
    return quotas
