"""TOML files and `key=value` overrides → `Config`."""

import dataclasses
import tomllib
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kerneq.config.build import build, unknown
from kerneq.config.schema import Config
from kerneq.config.setting import ConfigError


def load(path: Path | str | None, overrides: Iterable[str] = ()) -> Config:
    """The configuration in the file at `path` (none: the defaults), changed by `key=value` overrides."""
    if path is None:
        return parse("", overrides)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"There is no file {path}; see experiments/ for ready ones.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a configuration file: {error}.") from None
    try:
        return parse(text, overrides)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse(text: str, overrides: Iterable[str] = ()) -> Config:
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise ConfigError(f"This is not valid TOML: {error}.") from None
    for override in overrides:
        _apply(table, override)
    return build(Config, table)


def differences(first: Config, second: Config) -> list[str]:
    """The dotted keys in which two configurations differ."""
    a, b = dict(_flat(first)), dict(_flat(second))
    return [key for key in {**a, **b} if key not in a or key not in b or a[key] != b[key]]


def _flat(section: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    items: Iterable[tuple[str, Any]] = (
        section.items()
        if isinstance(section, Mapping)
        else ((field.name, getattr(section, field.name)) for field in dataclasses.fields(section))
    )
    for name, value in items:
        if dataclasses.is_dataclass(value) or isinstance(value, Mapping):
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _apply(table: dict[str, Any], override: str) -> None:
    """Put one `section.key=value` into the table; the key must lead to a setting, not to a section."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"A change of setting is written key=value (for example optimizer.lr=0.2), got `{override}`.")
    kind = _kind(key)
    *sections, name = key.split(".")
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"`{key}` cannot be set: `{section}` is not a table in the file.")
    table[name] = _value(text.strip(), kind)


def _kind(key: str) -> Any:
    """The annotated type of a dotted key; `Any` below a free table such as `model.settings`."""
    kind: Any = Config
    path = ""
    for name in key.split("."):
        if typing.get_origin(kind) is Mapping:
            return Any
        if not dataclasses.is_dataclass(kind):
            raise ConfigError(f"`{path.rstrip('.')}` is a setting, so there is no `{key}`.")
        hints = typing.get_type_hints(kind)
        if name not in hints:
            raise ConfigError(unknown(key, name, hints, path))
        kind, path = hints[name], f"{path}{name}."
    if dataclasses.is_dataclass(kind):
        names = ", ".join(typing.get_type_hints(kind))
        raise ConfigError(f"`{key}` is a section, not a setting; name one of its settings: {names}.")
    return kind


def _value(text: str, kind: Any) -> Any:
    """The value written after `=`: TOML, with quotes around texts optional and `.5` accepted for 0.5."""
    if kind is str:
        return text.strip("\"'")
    try:
        # A newline would let one override carry further keys.
        return tomllib.loads(f"value = {text}")["value"] if "\n" not in text else text
    except (tomllib.TOMLDecodeError, RecursionError, ValueError):
        pass
    try:
        return float(text) if kind in (float, Any) else text
    except ValueError:
        return text
