"""A checkpoint: one safetensors file whose header carries the rest as JSON and a SHA-256 of both.

One file and one rename, so tensors and facts cannot come from two different moments; no pickles. The tensors of a
training state are named `model.…`, `average.…`, `momentum.…`, `random.…` and `meter`; a checkpoint of weights has
`model.…` only.
"""

import hashlib
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
from torch import Tensor, nn

FORMAT = "kerneq checkpoint 1"


class TrainingError(RuntimeError):
    """The run cannot start or go on; nothing already saved is lost. The message is the sentence shown to people."""


@final
class CheckpointError(TrainingError):
    """A checkpoint that is damaged, or that does not belong to this run."""


@final
class Stopped(TrainingError):
    """The user asked the run to stop; everything is saved."""


def save(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write tensors, as `copied` makes them, and JSON-able facts to `path`, atomically."""
    text = json.dumps(dict(facts))
    header = {"format": FORMAT, "facts": text, "sha256": digest(tensors, text)}
    write_atomically(path, serialise(dict(tensors), metadata=header))


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as they are now, on the host; each its own and contiguous, as safetensors wants them."""
    return {name: torch.empty(t.shape, dtype=t.dtype).copy_(t.detach()) for name, t in tensors.items()}


@final
class Writer:
    """Writes files while the run goes on: what is submitted together in that order, and all before the next comes.

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


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and facts in `path`; a damaged or foreign file is a `CheckpointError`."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise CheckpointError(f"{path} is a folder or a device, not a checkpoint.")
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        if header.get("format") != FORMAT:
            raise CheckpointError(f"{path} is a safetensors file, but not a checkpoint that kerneq wrote.")
        if digest(tensors, header["facts"]) != header["sha256"]:
            raise CheckpointError(f"{path} is damaged: its contents do not match its own SHA-256.")
        facts = json.loads(header["facts"])
    except FileNotFoundError:
        raise CheckpointError(f"There is no checkpoint {path}.") from None
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged or is no checkpoint ({error}).") from None
    return tensors, facts


def read_facts(path: Path) -> dict[str, Any]:
    """The facts in `path` alone, its tensors unread and unchecked; empty where there is no readable checkpoint."""
    with suppress(SafetensorError, OSError, KeyError, ValueError):
        if path.is_file():
            with safe_open(path, framework="pt") as file:
                return dict(json.loads((file.metadata() or {})["facts"]))
    return {}


def digest(tensors: Mapping[str, Tensor], facts: str) -> str:
    """SHA-256 over the facts and every tensor's name, shape, type and bytes, in the order of the names."""
    hasher = hashlib.sha256(facts.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        hasher.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors under a prefix such as `model.`, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def trained_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights to use of a checkpoint (their average, where there is one) by name, and its facts."""
    tensors, facts = load(path)
    weights = part(tensors, "average.") or part(tensors, "model.")
    for name, value in weights.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise CheckpointError(f"{path} is of no use: its `{name}` has infinite or NaN entries. Train it anew.")
    return weights, facts


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Put the weights found in `path` into a model; other names or shapes than the model's are a `CheckpointError`."""
    try:
        found = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:  # PyTorch lists every mismatch on a line of its own
        raise CheckpointError(f"{path} belongs to another run: {str(error).splitlines()[-1].strip()}") from None
    strange = sorted([*found.missing_keys, *found.unexpected_keys])
    if strange:
        raise CheckpointError(f"{path} belongs to another run: only one of the two has `{strange[0]}`.")


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
