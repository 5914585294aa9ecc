"""An experiment's settings from a TOML file and `key=value` changes, and the record of a run."""

import dataclasses
import json
import platform
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

import kerneq
from kerneq.settings import ConfigError, build, write

T = TypeVar("T")


def read(cls: type[T], file: str, changes: Sequence[str] = ()) -> T:
    """The dataclass `cls` from `file` (empty: its defaults), changed by `key=value`; unknown keys are
    refused.
    """
    table: dict[str, Any] = {}
    if file:
        try:
            table = tomllib.loads(Path(file).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"There is no file {file}; see experiments/kglm/ for ready ones.") from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{file} cannot be read as a configuration file: {error}.") from None
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals:
            raise ConfigError(f"A change of setting is written key=value, got `{change}`.")
        table[key.strip()] = _value(text.strip())
    return build(cls, table)


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # a bare word is a text


def device_of(name: str) -> torch.device:
    """`auto` takes a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def record(folder: Path, settings: Any, device: torch.device, result: dict[str, Any]) -> Path:
    """Write the settings, the machine and the numbers of a run under `folder`; return the file of numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.toml").write_text(write(settings), encoding="utf-8")
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
    facts = {
        "kerneq": kerneq.__version__,
        "torch": torch.__version__,
        "device": machine,
        "threads": torch.get_num_threads(),
    }
    path = folder / "result.json"
    content = {"settings": dataclasses.asdict(settings), "machine": facts, **result}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path
