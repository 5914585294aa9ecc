"""Trained models from run folders, and those that ship with kerneq.

A run folder has a config.toml, whose `[model]` table says what the weights are of, and
checkpoints/{best,last}.safetensors. Weights that ship are run folders in the installation.
"""

import errno
import hashlib
import json
import math
import os
import re
import shlex
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from .models import AbstractModel, ModelConfig, find, from_config
from .settings import ConfigError, build, convert, suggestion, values

SHIPPED = Path(__file__).parent / "weights"
FORMAT = "kerneq checkpoint 1"
FACTS = {"epoch": int, "config": str, "step": int | None}  # of every checkpoint; exports of old have no step
DEVICE = re.compile(r"auto|cpu|cuda(?::(\d{1,3}))?")  # what names one
LARGEST = 100_000_000  # bytes of a file of settings or records
_OTHER = {"best": "last", "last": "best"}  # the checkpoints of a run
FREE = ("device", "training.checkpoint_epochs", "training.checkpoint_steps")  # may change between two starts of a run


class TrainingError(RuntimeError):
    """A run that cannot start, go on or be used; nothing already saved is lost. The message is shown to people."""


@final
class CheckpointError(TrainingError):
    """A checkpoint that is damaged, or that does not belong to this run."""


def load(
    run: Path | str, checkpoint: str = "best", device: str | torch.device = "cpu", classes: int | None = None
) -> AbstractModel:
    """Return the trained model of a run folder, or one that ships with kerneq by its name, in `eval()`.

    `kerneq.load("geq-5m-cifar10")` takes normalised pictures (batch, 3, 32, 32) and gives logits (batch, 10): pixels in
    [0, 1], less `model.mean` and divided by `model.std`, of `model.size` pixels a side, for `model.classes`.
    `kerneq.predict` takes picture files and gives classes. With `classes` the model gets a new head, not yet trained,
    for so many classes of your own.
    """
    folder, target = find_folder(run), choose_device(str(device))
    config = read_config(config_file(folder))
    model_config = _read_model(config)
    path, weights, facts = read_weights(folder, checkpoint)
    check_settings(path, facts, config)
    outputs = len(weights["head.bias"]) if classes is None else classes
    pictures = _read_pictures(folder)
    for channels in (
        (len(pictures["mean"]),) if "mean" in pictures else (3, 1)
    ):  # coloured or grey: the weights say which
        model = from_config(model_config, outputs, channels)
        kept = weights if classes is None else weights | select_head(model)
        if all(name not in kept or kept[name].shape == p.shape for name, p in model.named_parameters()):
            break
    if config.get("training", {}).get("channels_last", True):  # a layout that a GPU computes convolutions faster in
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = model.to(target)
    load_weights(model, kept, path)
    for name, value in pictures.items():
        setattr(model, name, value)
    if classes is not None:
        model.classes = ()
    return model.eval()


def select_head(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the head of a model, by their names in it."""
    return {name: value for name, value in model.state_dict().items() if name.startswith("head.")}


def _read_pictures(folder: Path) -> dict[str, Any]:
    """Return what a run says of the pictures it was trained on; earlier versions wrote the classes alone."""
    try:
        told = json.loads(read_small(folder / "classes.json"))
        classes = {"classes": tuple(map(str, told["classes"]))}
        if "mean" not in told:
            return classes
        mean, std = (tuple(map(float, told[name])) for name in ("mean", "std"))
        return classes | {"mean": mean, "std": std, "size": int(told["size"])}
    except (OSError, LookupError, RecursionError, TypeError, ValueError):
        return {}


def names() -> tuple[str, ...]:
    """Return the names of the models whose weights are part of the installation."""
    return tuple(sorted(path.parent.name for path in SHIPPED.glob("*/config.toml")))


def find_folder(run: Path | str) -> Path:
    """Return the folder of a run, or of the weights that ship under this name; a folder of one's own goes first."""
    if not isinstance(run, Path | str):
        raise TypeError(f"A run is a folder, or the name of weights that ship, got {run!r}.")
    path = Path(run)
    if path.exists() or len(path.parts) != 1:
        return path
    if str(run) not in names():
        hint = suggestion(str(run), names())
        raise TrainingError(
            f"There is no run folder {path}, and no weights of that name ship with kerneq.{hint} There are: "
            f"{', '.join(names())}."
        )
    return SHIPPED / str(run)


def config_file(folder: Path) -> Path:
    """Return the config.toml of a run folder; a folder without one is a `TrainingError`."""
    path = folder / "config.toml"
    if not path.exists():
        raise TrainingError(f"{folder} is not a run folder: it has no config.toml. kerneq train makes one.")
    return path


def read_small(path: Path) -> bytes:
    """Return the content of a file; one that is no regular file, or larger than records are, is an `OSError`.

    A pipe would wait for its writer, and a device fill the memory.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "a folder, a pipe or a device, not a file")
        if found.st_size > LARGEST:
            raise OSError(errno.EFBIG, f"{found.st_size:,} bytes, and at most {LARGEST:,} are read")
        return file.read(LARGEST)


def choose_device(device: str, local_rank: int = 0) -> torch.device:
    """Return the device named by a setting; `auto` and `cuda` take the GPU of this process's local rank."""
    named = DEVICE.fullmatch(device)
    if named is not None and device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if named is None:
        raise TrainingError(f"`device` must be auto, cpu, cuda or cuda:N, got `{device}`.")
    if device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise TrainingError(f"`device` is {device}, but PyTorch sees no GPU here; use device=cpu.")
    index = local_rank if named[1] is None else int(named[1])
    if index >= torch.cuda.device_count():
        raise TrainingError(f"`device` asks for GPU {index}, but there are {torch.cuda.device_count()}.")
    return torch.device("cuda", index)


def read_weights(folder: Path, which: str) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
    """Read the best or last checkpoint of a run: its file, its weights by name, its facts.

    The weights are their running average, where there is one.
    """
    if which not in _OTHER:
        raise ConfigError(f"`checkpoint` must be 'best' or 'last', got {which!r}.")
    path, other = (folder / "checkpoints" / f"{name}.safetensors" for name in (which, _OTHER[which]))
    if not path.exists():
        command = shlex.join(["kerneq", "train", str(folder), "--resume"])
        remedy = f"ask for the {other.stem} one" if other.exists() else f"{command} makes it"
        raise CheckpointError(f"There is no checkpoint {path}: {remedy}.")
    tensors, facts = read_checkpoint(path)
    check_facts(path, facts, FACTS)
    weights = select(tensors, "average.") or select(tensors, "model.")
    if "head.bias" not in weights or weights["head.bias"].dim() != 1:
        raise CheckpointError(f"{path} belongs to another run: it has no `head.bias`.")
    return path, weights, facts


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors and facts in `path`; a damaged or foreign file is a `CheckpointError`."""
    try:
        if path.exists() and not path.is_file():  # reading from a pipe would wait for its writer
            raise CheckpointError(f"{path} is a folder or a device, not a checkpoint.")
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        if header.get("format") != FORMAT:
            raise CheckpointError(f"{path} is a safetensors file, but not a checkpoint that kerneq wrote.")
        if compute_digest(tensors, header["facts"]) != header["sha256"]:
            raise CheckpointError(f"{path} is damaged: its contents do not match its own SHA-256.")
        facts = parse_facts(header["facts"])
    except FileNotFoundError:
        raise CheckpointError(f"There is no checkpoint {path}.") from None
    except (SafetensorError, OSError, KeyError, RecursionError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged or is no checkpoint ({error}).") from None
    return tensors, facts


def parse_facts(text: str) -> dict[str, Any]:
    """Return the facts in a header of a checkpoint."""
    facts = json.loads(text)
    if not isinstance(facts, dict):
        raise ValueError("its facts are no table")
    return facts


def check_facts(path: Path, facts: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """Refuse the facts of the checkpoint at `path` unless each is of its kind, and no number negative or infinite."""
    for name, kind in kinds.items():
        value = facts.get(name)
        number = isinstance(value, int | float)
        if not isinstance(value, kind) or isinstance(value, bool) or (number and not 0 <= value < math.inf):
            raise CheckpointError(f"{path} is damaged or belongs to another version: its `{name}` is {value!r:.60}.")


def compute_digest(tensors: Mapping[str, Tensor], facts: str) -> str:
    """Return SHA-256 of the facts and every tensor's name, shape, type and bytes, in the order of the names."""
    hasher = hashlib.sha256(facts.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        hasher.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def select(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors under a prefix such as `model.`, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Put the weights found in `path` into a model.

    Other names, shapes or kinds of numbers than the model's, and infinite or NaN entries, are a `CheckpointError`.
    """
    for name, own in model.state_dict().items():
        value = weights.get(name, own)
        if value.is_complex() or (value.is_floating_point(), value.dtype == torch.bool) != (
            own.is_floating_point(),
            own.dtype == torch.bool,
        ):
            raise CheckpointError(f"{path} belongs to another run: its `{name}` is {value.dtype}, not {own.dtype}.")
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise CheckpointError(f"{path} is of no use: its `{name}` has infinite or NaN entries. Train it anew.")
    try:
        found = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:  # PyTorch lists every mismatch on a line of its own
        raise CheckpointError(f"{path} belongs to another run: {str(error).splitlines()[-1].strip()}") from None
    unmatched = sorted([*found.missing_keys, *found.unexpected_keys])
    if unmatched:
        raise CheckpointError(f"{path} belongs to another run: only one of the two has `{unmatched[0]}`.")


def check_settings(path: Path, facts: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Refuse the checkpoint at `path` if it was saved with other settings than the tables of `config` state.

    Its weights might fit all the same, and give the answers of a model that nobody trained. Settings that only one of
    the two states are those of another version of kerneq; for those of the model there are defaults. A folder of
    pictures may have moved.
    """
    try:
        before, now = _list_settings(tomllib.loads(facts["config"])), _list_settings(config)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} does not say with which settings it was trained ({error!r:.80}).") from None
    moved = all(str(each.get("data.name")).startswith("folder:") for each in (before, now))
    free = (*FREE, "data.name") if moved else FREE
    shared = [key for key in before | now if key.startswith("model.") or (key in before and key in now)]
    pairs = [(key, before.get(key, "absent"), now.get(key, "absent")) for key in shared if key not in free]
    changed = [pair for pair in pairs if pair[1] != pair[2]]
    if changed:
        key, then, current = changed[0]
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise CheckpointError(
            f"{path} was trained with other settings than the run's config.toml has: `{key}` was {then!r} and "
            f"is {current!r}{more}. Put back the config.toml or the checkpoint that belongs there."
        )


def read_config(path: Path) -> dict[str, Any]:
    """Return the tables in a run's config.toml, which states every setting."""
    try:
        table = tomllib.loads(read_small(path).decode("utf-8-sig"))
    except (OSError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a configuration file: {error}.") from None
    if "base" in table or not isinstance(table.get("model"), dict):
        raise ConfigError(f"{path} is not as kerneq train writes it: with every setting, and no `base`.")
    return table


def _read_model(config: Mapping[str, Any]) -> ModelConfig:
    """Return the settings of the model in a run's configuration."""
    table = dict(config["model"])
    current = find(convert("model.name", table.pop("name", None), str)).config
    return build(type(current), table, "model.", current, named=True)


def _list_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return every setting by its dotted key; those of the model with its defaults."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if not isinstance(value, dict):
            found[name] = value
        elif name != "model":
            found |= {f"{name}.{key}": entry for key, entry in value.items()}
    found["model.name"] = config["model"].get("name")
    return found | {f"model.{key}": value for key, value in values(_read_model(config)).items()}
