"""A checkpoint: one safetensors file whose header carries the rest as JSON and a SHA-256 of both.

One file and one rename, so tensors and facts cannot come from two different moments; no pickles.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise
from torch import Tensor

from kerneq.training.errors import CheckpointError
from kerneq.training.files import write_atomically

FORMAT = "kerneq checkpoint 1"


def save(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write tensors and JSON-able facts to `path`, atomically."""
    # Clones, since safetensors refuses tied weights that share memory.
    copies = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    text = json.dumps(dict(facts))
    header = {"format": FORMAT, "facts": text, "sha256": digest(copies, text)}
    write_atomically(path, serialise(copies, metadata=header))


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and facts in `path`; a damaged or foreign file is a `CheckpointError`."""
    try:
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


def digest(tensors: Mapping[str, Tensor], facts: str) -> str:
    """SHA-256 over the facts and every tensor's name, shape, type and bytes, in the order of the names."""
    hasher = hashlib.sha256(facts.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        hasher.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()
