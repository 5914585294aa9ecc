"""A checkpoint: one safetensors file whose header carries the rest as JSON and a SHA-256 of both.

One file and one rename, so tensors and facts cannot come from two different moments; no pickles. The tensors of a
training state are named `model.…`, `average.…`, `momentum.…`, `random.…` and `meter`; a checkpoint of weights has
`model.…` only.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise
from torch import Tensor

from ...loading import FORMAT, TrainingError, compute_digest


@final
class Stopped(TrainingError):
    """The user asked the run to stop; everything is saved."""


def save(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write tensors, as `copied` makes them, and JSON-able facts to `path`, atomically."""
    text = json.dumps(dict(facts))
    header = {"format": FORMAT, "facts": text, "sha256": compute_digest(tensors, text)}
    write_atomically(path, serialise(dict(tensors), metadata=header))


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
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
    with suppress(SafetensorError, OSError, KeyError, ValueError):
        if path.is_file():
            with safe_open(path, framework="pt") as file:
                return dict(json.loads((file.metadata() or {})["facts"]))
    return {}


def write_atomically(path: Path, data: bytes) -> None:
    """Make `path` hold `data`, or what it held before, never half of each, even if the power fails.

    Written to a temporary file of this process, brought to the disk, and renamed over `path`; its folder is made if
    need be. Of two processes that write at once, the last one wins.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # or the rename might not survive a power cut
        finally:
            os.close(folder)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise TrainingError(
            f"{path} could not be written: {error.strerror}. What was there before is intact; make room or choose "
            "another folder and try again, a training with --resume."
        ) from error
