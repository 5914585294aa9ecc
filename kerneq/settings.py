"""Tables of settings ↔ frozen dataclasses: every key known, every value of its type and in its range.

A table is what TOML gives. `build` makes a dataclass of one, `write` goes back. A field's annotation says what may
stand there:

    steps: int = setting(5, "what it means", low=1)     steps = 5
    split: int | None = None                            split = 8, or "none"
    data: Data                                          [data], a table with the fields of Data
    solver: AbstractSolver = Proximal()                 [solver] name = "anderson", memory = 3

Under an abstract class `name` chooses among the final classes that the package of the abstract class exports. A table
without `name`, or with the name of the current value's class, changes that value; under another name it starts from
the defaults of that class. Written by hand: cattrs and pydantic have neither that rule nor errors of one sentence, and
the library needs torch, numpy and safetensors only.
"""

import dataclasses
import difflib
import importlib
import json
import math
import operator
import re
import sys
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NoReturn, TypeVar, final

T = TypeVar("T")
NOTHING = "none"  # how a file says None, for which TOML has no word
LARGEST = 1_000_000  # of a number whose field states no `high`: nothing in a network needs more, and float32 holds it
BOUNDS = {"low": ("at least", operator.ge), "above": ("greater than", operator.gt), "high": ("at most", operator.le)}


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is the sentence shown to people."""


@final
class Override(str):
    """The text after `key=` on a command line, which only the type of its setting can read: 12, "12" or .5."""


def read_override(text: str) -> Any:
    """Read the text after `key=`: a table or a text in quotes as TOML, anything else as an `Override`."""
    with suppress(RecursionError, ValueError):
        value = _read_toml(text)
        if isinstance(value, dict | str):
            return value
    return Override(text)


def setting(
    default: Any, meaning: str, *, low: float | None = None, high: float | None = None, above: float | None = None
) -> Any:
    """Make a dataclass field with a meaning and a range, low ≤ value ≤ high and value > above, for all of a list.

    Where no `high` is stated it is `LARGEST`.
    """
    return dataclasses.field(default=default, metadata={"meaning": meaning, "low": low, "high": high, "above": above})


def build(cls: type[T], table: Mapping[str, Any], path: str = "", current: T | None = None, named: bool = False) -> T:
    """Make an instance of the dataclass `cls`; an unknown key, a wrong type or a value out of range is a `ConfigError`.

    What the table does not say is as in `current`, or the default. Error messages put `path` ("model.") before every
    key and, if `named`, list `name` among the valid keys.
    """
    where = f"[{path.rstrip('.')}]" if path else ""
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = next((name for name in table if name not in fields), None)
    if unknown is not None:
        known = settings_of(cls, named)
        hint, owner = suggestion(unknown, known, path), where or "The configuration"
        raise ConfigError(f"There is no setting `{path}{unknown}`.{hint} {owner} has: {', '.join(known)}.")
    hints = typing.get_type_hints(cls)
    values = {}
    for name, field in fields.items():
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        values[name] = default if current is None else getattr(current, name)
        if name in table:
            values[name] = convert(path + name, table[name], hints[name], values[name])
            _check_range(path + name, values[name], field.metadata)
        if values[name] is dataclasses.MISSING:
            raise ConfigError(f"`{path}{name}` has no default: it must be given.")
    try:
        return cls(**values)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:  # what the class itself refuses
        raise ConfigError(f"{where} {error}".strip()) from None


def check_values(section: Any) -> None:
    """Refuse what `build` refuses in a dataclass that was made in Python."""
    hints = typing.get_type_hints(type(section))
    for field in dataclasses.fields(section):
        value = convert(field.name, getattr(section, field.name), hints[field.name])
        _check_range(field.name, value, field.metadata)


def convert(key: str, value: Any, kind: Any, current: Any = None) -> Any:
    """Return `value` as the annotated type `kind`; whole numbers pass for floats, nothing else is guessed.

    `current` is the value that a table without a `name` changes.
    """
    members = _members(kind)
    if isinstance(value, Override):
        value = _read_as(value, members)
    if type(value) in choices(kind).values():  # from Python, where a value can stand for its table
        return value
    if isinstance(value, Mapping) or all(choices(member) for member in members):
        return _convert_table(key, value, kind, current)
    if type(None) in members and value in (None, NOTHING):
        return None
    return _convert_plain(key, value, kind)


def choices(kind: Any) -> dict[str, type]:
    """Return the dataclasses that a table under this annotation may stand for, by name; none for a plain value."""
    found: list[Any] = []
    for member in _members(kind):
        cls = typing.get_origin(member) or member  # AbstractSolver[Any] → AbstractSolver
        if isinstance(cls, type) and cls.__name__.startswith("Abstract"):
            package = importlib.import_module(cls.__module__).__package__ or cls.__module__
            exported = vars(importlib.import_module(package)).values()
            found += [value for value in exported if isinstance(value, type) and issubclass(value, cls)]
        else:
            found.append(cls)
    classes = [cls for cls in found if isinstance(cls, type) and dataclasses.is_dataclass(cls)]
    return {name_of(cls): cls for cls in classes if not cls.__name__.startswith("Abstract")}


def name_of(cls: type) -> str:
    """Return the name of a class in a table: InFeatures → in-features."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", cls.__name__).lower()


def settings_of(cls: Any, named: bool = False) -> list[str]:
    """Return the keys of a table of this class, `name` first where that chooses the class."""
    names = [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
    return ["name", *names] if named else names


def suggestion(name: str, known: Iterable[str], path: str = "") -> str:
    """Return " Did you mean `…`?" with the nearest known name; empty where none is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean `{path}{close[0]}`?" if close else ""


def rows(section: Any, path: str = "") -> list[tuple[str, Any, str]]:
    """List every setting of a dataclass tree, (dotted key, value, meaning), plain ones before tables as TOML wants it.

    The fields of a field with `metadata={"flat": True}` stand beside those of the dataclass that has it.
    """
    found: list[tuple[str, Any, str]] = []
    hints = typing.get_type_hints(type(section))
    for field in dataclasses.fields(section):
        key, value, meaning = path + field.name, getattr(section, field.name), str(field.metadata.get("meaning", ""))
        if field.metadata.get("flat"):
            found += rows(value, path)
        elif dataclasses.is_dataclass(value):
            if not dataclasses.is_dataclass(hints[field.name]):
                found.append((f"{key}.name", name_of(type(value)), meaning))
            found += rows(value, f"{key}.")
        else:
            found.append((key, value, meaning))
    return sorted(found, key=lambda row: "." in row[0][len(path) :])


def values(section: Any) -> dict[str, Any]:
    """Return every setting of a dataclass tree by its dotted key."""
    return {key: value for key, value, _ in rows(section)}


def write(section: Any, comments: bool = False) -> str:
    """Return the dataclass tree as TOML, a line `key = value  # meaning` each; `build` reads the same tree back."""
    lines: list[str] = []
    table = ""
    for key, value, meaning in rows(section):
        home, _, name = key.rpartition(".")
        if home != table:
            lines += ["", f"[{home}]"]
            table = home
        # JSON's literals are TOML's, except that TOML has no null and also wants DEL escaped.
        literal = json.dumps(NOTHING if value is None else value, ensure_ascii=False).replace("\x7f", "\\u007f")
        lines.append(f"{name} = {literal}" + (f"  # {meaning}" if comments and meaning else ""))
    return "\n".join(lines) + "\n"


def _members(kind: Any) -> tuple[Any, ...]:
    """Return the types that a union allows; any other type is its own only member."""
    return typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)


def _refuse_choice(key: str, value: Any, known: Iterable[str]) -> NoReturn:
    known = list(known)
    raise ConfigError(f"`{key}` must be one of {', '.join(known)}, got {value!r}.{suggestion(str(value), known)}")


def _convert_table(key: str, value: Any, kind: Any, current: Any) -> Any:
    """Build the value of a table: of the one class it can be, of the class it names, or of the class of `current`."""
    classes, named = choices(kind), not dataclasses.is_dataclass(kind)
    cls = type(current) if named else kind
    if not isinstance(value, Mapping):
        known = ", ".join(settings_of(cls, named))
        raise ConfigError(f"`{key}` is a section, not a setting; name one of its settings: {known}.")
    if not classes:
        raise ConfigError(f"`{key}` is a setting, so there is no `{key}.{next(iter(value), '')}`.")
    table = dict(value)
    if named and "name" in table:
        name = convert(f"{key}.name", table.pop("name"), str)
        cls = classes[name] if name in classes else _refuse_choice(f"{key}.name", name, classes)
    elif not dataclasses.is_dataclass(cls):
        raise ConfigError(f"[{key}] must say its `name`, one of {', '.join(classes)}.")
    return build(cls, table, f"{key}.", current if type(current) is cls else None, named)


def _convert_plain(key: str, value: Any, kind: Any) -> Any:
    """Return the value as the first plain type that it fits: a number, a text, a list, one of some literals."""
    for member in _members(kind):
        if type(value) is member or (member is float and type(value) is int and abs(value) <= sys.float_info.max):
            return member(value)
        arguments = typing.get_args(member)
        if typing.get_origin(member) is typing.Literal and value in arguments:
            return value
        if typing.get_origin(member) is tuple and isinstance(value, list | tuple):
            return tuple(convert(f"{key}[{index}]", entry, arguments[0]) for index, entry in enumerate(value))
    if kind is float and type(value) is int:
        raise ConfigError(f"`{key}` is too large for a number of 64 bits.")
    if typing.get_origin(kind) is typing.Literal:
        _refuse_choice(key, value, map(str, typing.get_args(kind)))
    raise ConfigError(f"`{key}` must be {' or '.join(dict.fromkeys(map(_describe, _members(kind))))}, got {value!r}.")


def _describe(kind: Any) -> str:
    """Return a type in words."""
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", type(None): f'"{NOTHING}"'}
    return words.get(kind) or ("a list" if typing.get_origin(kind) is tuple else "a table")


def _check_range(key: str, value: Any, bounds: Mapping[str, Any]) -> None:
    """Refuse a number outside the range that its field states, also in a list."""
    if isinstance(value, tuple):
        for index, entry in enumerate(value):
            _check_range(f"{key}[{index}]", entry, bounds)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"`{key}` must be a finite number, got {value}.")
    for name, (words, holds) in BOUNDS.items():
        bound = bounds.get(name)
        if bound is None and name == "high":
            bound = LARGEST
        if bound is not None and not holds(value, bound):  # so that NaN is refused too
            raise ConfigError(f"`{key}` must be {words} {bound}, got {value}.")
    if value < -LARGEST:
        raise ConfigError(f"`{key}` must be at least {-LARGEST}, got {value}.")


def _read_as(override: Override, members: tuple[Any, ...]) -> Any:
    """Read the text after `=` as one of these types: TOML, but texts need no quotes, and .5 is 0.5."""
    text = override.strip()
    if str in members:
        return text.strip("\"'")
    with suppress(RecursionError, ValueError):
        return _read_toml(text)
    with suppress(ValueError):
        return float(text) if float in members else text
    return text


def _read_toml(text: str) -> Any:
    """Read one value of TOML; a `ValueError` where it is none."""
    if "\n" in text:
        raise ValueError("A newline would let one override carry further keys.")
    return tomllib.loads(f"value = {text}")["value"]
