"""A checkpoint: one safetensors file whose header carries the rest as JSON and a SHA-256 of both.

One file and one rename, so tensors and facts cannot come from two different moments; no pickles. The tensors of a
training state are named `model.…`, `average.…`, `momentum.…`, `random.…` and `meter`; a checkpoint of weights has
`model.…` only.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise
from torch import Tensor

from ...loading import FORMAT, TrainingError, compute_digest, parse_facts
from .files import write_atomically


@final
class Stopped(TrainingError):
    """The user asked the run to stop; everything is saved."""


def save(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write tensors, as `copy_tensors` makes them, and JSON-able facts to `path`, atomically."""
    text = json.dumps(dict(facts))
    header = {"format": FORMAT, "facts": text, "sha256": compute_digest(tensors, text)}
    write_atomically(path, serialise(dict(tensors), metadata=header))


def copy_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as they are now, on the host; each its own and contiguous, as safetensors wants them."""
    return {name: torch.empty(t.shape, dtype=t.dtype).copy_(t.detach()) for name, t in tensors.items()}


@final
class Writer:
    """Writes files in a thread while the run continues: those submitted together in that order, before the next ones.

    So a kill at any time leaves what one without the thread could have left. A write that fails ends the run at the
    next `submit`, or when the `with` is left.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._pending: Future[list[None]] | None = None

    def submit(self, writes: Sequence[Callable[[], None]]) -> None:
        """Begin to write these; waits for those before."""
        self._wait()
        self._pending = self._pool.submit(lambda: [write() for write in writes])

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()
        self._wait()


def read_facts(path: Path) -> dict[str, Any]:
    """The facts in `path` alone, its tensors unread and unchecked; empty where there is no readable checkpoint."""
    with suppress(SafetensorError, OSError, KeyError, RecursionError, ValueError):
        if path.is_file():
            with safe_open(path, framework="pt") as file:
                return parse_facts((file.metadata() or {})["facts"])
    return {}
