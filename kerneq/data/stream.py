"""Decoding a Folder's batches in worker processes while the model computes."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .area import boxes
from .decode import Box, decode
from .errors import DataError
from .folder import Folder
from .randomness import Place

_Request = list[tuple[int, Box | None]]  # a batch: which picture, which part of it


@final
class _Decoder(Dataset[Tensor | str]):
    """Runs inside the workers; item = a whole batch, so that nothing is collated twice."""

    def __init__(self, paths: tuple[Path, ...], size: int) -> None:
        self.paths = paths
        self.size = size

    def __getitem__(self, request: _Request) -> Tensor | str:
        pixels = torch.empty((len(request), 3, self.size, self.size), dtype=torch.uint8)
        for row, (index, box) in enumerate(request):
            found = decode(self.paths[index], self.size, box)
            if isinstance(found, str):
                return found
            pixels[row] = found
        return pixels


def open_stream(
    folder: Folder, indices: list[np.ndarray], places: list[Place], area: float, workers: int | None
) -> Iterator[Tensor]:
    """The batches at `indices`, in order, uint8 on the host; with area < 1 a random part of each picture."""
    loader = DataLoader(
        _Decoder(folder.paths, folder.size),
        batch_size=None,
        sampler=[
            list(zip(index.tolist(), _parts(place, area), strict=True))
            for index, place in zip(indices, places, strict=True)
        ],
        num_workers=default_workers() if workers is None else workers,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator().manual_seed(0),  # or it would take a number from torch's global one
    )
    for batch in loader:
        if isinstance(batch, str):
            raise DataError(batch)
        yield batch


def _parts(place: Place, area: float) -> list[Box] | list[None]:
    if area == 1:
        return [None] * (place.last - place.first)
    return [(left, top, right, bottom) for left, top, right, bottom in boxes(place, area).tolist()]


def default_workers() -> int:
    """One process for each core this process may use, eight at most."""
    return min(8, len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1)
