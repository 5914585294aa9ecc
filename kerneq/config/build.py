"""Tables of settings → frozen dataclasses: every key known, every value of its type and in its range."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from kerneq.config.setting import ConfigError, check_range

T = TypeVar("T")


def build(cls: type[T], table: Mapping[str, Any], path: str = "") -> T:
    """An instance of the dataclass `cls`; an unknown key, a wrong type or range is an error."""
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    types_of = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for name, value in table.items():
        key = f"{path}{name}"
        if name not in fields:
            raise ConfigError(unknown(key, name, fields, path))
        if dataclasses.is_dataclass(types_of[name]):
            if not isinstance(value, Mapping):
                raise ConfigError(f"`{key}` must be a table ([{key}]), got {value!r}.")
            values[name] = build(typing.cast(type, types_of[name]), value, f"{key}.")
        else:
            values[name] = convert(key, value, types_of[name])
            check_range(key, values[name], fields[name])
    try:
        return cls(**values)
    except ConfigError:
        raise
    except ValueError as error:
        # Dataclasses of other parts (augmentation) check their own ranges.
        raise ConfigError(f"[{path.rstrip('.')}] {error}") from None


def unknown(key: str, name: str, known: Iterable[str], path: str) -> str:
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean `{path}{close[0]}`?" if close else ""
    where = f"[{path.rstrip('.')}]" if path else "The configuration"
    return f"There is no setting `{key}`.{hint} {where} has: {', '.join(known)}."


def convert(key: str, value: Any, kind: Any) -> Any:
    """`value` as the annotated type `kind`; whole numbers pass for floats, nothing else is guessed."""
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        choices = typing.get_args(kind)
        if value in choices:
            return value
        close = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
        hint = f" Did you mean `{close[0]}`?" if close else ""
        raise ConfigError(f"`{key}` must be one of {', '.join(map(str, choices))}, got {value!r}.{hint}")
    if origin in (types.UnionType, typing.Union):
        return _convert_union(key, value, typing.get_args(kind))
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"`{key}` must be a list, got {value!r}.")
        return tuple(convert(f"{key}[{i}]", item, typing.get_args(kind)[0]) for i, item in enumerate(value))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return _as_float(key, value)
    if origin is Mapping and isinstance(value, Mapping):
        return {str(name): _plain(f"{key}.{name}", item) for name, item in value.items()}
    if kind in (bool, int, float, str) and type(value) is kind:
        return value
    raise ConfigError(f"`{key}` must be {describe(kind)}, got {value!r}.")


def _convert_union(key: str, value: Any, members: tuple[Any, ...]) -> Any:
    for member in members:
        if member is type(None):
            if value is None:
                return None
            continue
        try:
            return convert(key, value, member)
        except ConfigError:
            continue
    raise ConfigError(f"`{key}` must be {' or '.join(describe(member) for member in members)}, got {value!r}.")


def _plain(key: str, value: Any) -> Any:
    """A value of a free table: numbers, texts, lists and tables, but not TOML's dates."""
    if isinstance(value, Mapping):
        return {name: _plain(f"{key}.{name}", item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(f"{key}[{i}]", item) for i, item in enumerate(value)]
    if isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(f"`{key}` must be a number, a text, true or false, or a list of these, got {value}.")


def _as_float(key: str, value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(f"`{key}` is too large for a number of 64 bits.") from None


def describe(kind: Any) -> str:
    """A type in words."""
    words = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a text",
        type(None): "nothing",
    }
    if kind in words:
        return words[kind]
    return "a list" if typing.get_origin(kind) is tuple else "a table"
