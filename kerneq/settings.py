"""Tables of settings ↔ frozen dataclasses: every key known, every value of its type and in its range.

A table is what TOML gives: names → numbers, texts, lists, tables. `build` makes a dataclass of one, `write` goes back.
A field's annotation says what may stand there:

    steps: int = setting(5, "what it means", low=1)     steps = 5
    split: int | None = None                            split = 8, or "none"
    data: Data                                          [data], a table with the fields of Data
    solver: AbstractSolver = Proximal()                 [solver] name = "anderson", memory = 3

Under an abstract class `name` chooses among the final classes that the package of the abstract class exports, so that a
new one is known as soon as that package's `__init__` names it. A table without `name` changes the value that stands
there, as does one with the name of its class; under another name the table starts from that class's defaults.
"""

import dataclasses
import difflib
import importlib
import json
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, TypeVar, final

T = TypeVar("T")
NOTHING = "none"  # how a file says None, for which TOML has no word


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is the sentence shown to people."""


@final
class Written(str):
    """A value as it was written after `key=` on a command line: which kind it is, only its setting can tell."""


def setting(
    default: Any,
    meaning: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
) -> Any:
    """A dataclass field that carries its meaning and its range, low ≤ value ≤ high and value > above.

    Of a list every entry has to lie in the range.
    """
    return dataclasses.field(default=default, metadata={"meaning": meaning, "low": low, "high": high, "above": above})


def build(cls: type[T], table: Mapping[str, Any], path: str = "", standing: T | None = None, named: bool = False) -> T:
    """An instance of the dataclass `cls`; an unknown key, a wrong type or a value out of range is a `ConfigError`.

    `path` ("model.") stands before every key that a sentence names. What the table does not say is as in `standing`, or
    the default. `named` only says that the table also had a `name`, which whoever called has read.
    """
    where = f"[{path.rstrip('.')}]" if path else ""
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    values = {name: _default(field) for name, field in fields.items()}
    if standing is not None:
        values = {name: getattr(standing, name) for name in fields}
    for name, value in table.items():
        key = f"{path}{name}"
        if name not in fields:
            known, where = ["name", *fields] if named else list(fields), where or "The configuration"
            hint = suggestion(name, known, path)
            raise ConfigError(f"There is no setting `{key}`.{hint} {where} has: {', '.join(known)}.")
        values[name] = convert(key, value, hints[name], values[name])
        check_range(key, values[name], fields[name])
    for name, value in values.items():
        if value is dataclasses.MISSING:
            raise ConfigError(f"`{path}{name}` has no default: it must be given.")
    try:
        return cls(**values)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:  # what the class itself refuses
        raise ConfigError(f"{where} {error}".strip()) from None


def convert(key: str, value: Any, kind: Any, standing: Any = None) -> Any:
    """`value` as the annotated type `kind`; whole numbers pass for floats, nothing else is guessed.

    `standing` is the value that a table without a `name` changes.
    """
    members = _members(kind)
    if isinstance(value, Written):
        value = _read(value, members)
    if isinstance(value, Mapping):
        return _choose(key, value, kind, standing)
    if type(value) in choices(kind).values():  # from Python, where a value can stand for its table
        return value
    if all(choices(member) for member in members):
        raise ConfigError(f"`{key}` is a section, not a setting; name one of its settings: {_names(kind, standing)}.")
    if len(members) == 1:
        return _plain(key, value, kind)
    if type(None) in members and value in (None, NOTHING):
        return None
    for member in members:
        try:
            return _plain(key, value, member)
        except ConfigError:
            continue
    raise ConfigError(f"`{key}` must be {' or '.join(dict.fromkeys(map(_describe, members)))}, got {value!r}.")


def choices(kind: Any) -> dict[str, type]:
    """The dataclasses that a table under this annotation may stand for, by name; none where it is a plain value."""
    found: dict[str, type] = {}
    for member in _members(kind):
        cls = typing.get_origin(member) or member  # AbstractSolver[Any] → AbstractSolver
        if not isinstance(cls, type):
            continue
        candidates: list[type] = [cls]
        if cls.__name__.startswith("Abstract"):
            package = importlib.import_module(cls.__module__).__package__ or cls.__module__
            candidates = [value for value in vars(importlib.import_module(package)).values() if isinstance(value, type)]
        for value in candidates:
            if issubclass(value, cls) and dataclasses.is_dataclass(value) and not value.__name__.startswith("Abstract"):
                found[name_of(value)] = value
    return found


def name_of(cls: type) -> str:
    """The name of a class in a table: InFeatures → in-features."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", cls.__name__).lower()


def suggestion(name: str, known: Iterable[str], path: str = "") -> str:
    """The question whether a known name was meant, to be put after a sentence; empty where none is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean `{path}{close[0]}`?" if close else ""


def check_range(key: str, value: Any, field: dataclasses.Field) -> None:
    """Refuse a number outside the range that its field states."""
    if isinstance(value, tuple):
        for index, entry in enumerate(value):
            check_range(f"{key}[{index}]", entry, field)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    low, high, above = (field.metadata.get(bound) for bound in ("low", "high", "above"))
    # Written as "not (inside)", so that NaN is refused too.
    if low is not None and not value >= low:
        raise ConfigError(f"`{key}` must be at least {low}, got {value}.")
    if above is not None and not value > above:
        raise ConfigError(f"`{key}` must be greater than {above}, got {value}.")
    if high is not None and not value <= high:
        raise ConfigError(f"`{key}` must be at most {high}, got {value}.")
    if value != value or value in (float("inf"), float("-inf")):
        raise ConfigError(f"`{key}` must be a finite number, got {value}.")


def rows(section: Any, path: str = "") -> list[tuple[str, Any, str]]:
    """Every setting of a dataclass tree as (dotted key, value, meaning), plain ones before tables as TOML wants it.

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


def write(section: Any, comments: bool = False) -> str:
    """The dataclass tree as TOML, one `key = value  # meaning` line a setting; `build` reads the same tree back."""
    lines: list[str] = []
    table = ""
    for key, value, meaning in rows(section):
        home, _, name = key.rpartition(".")
        if home != table:
            lines += ["", f"[{home}]"]
            table = home
        lines.append(f"{name} = {_literal(value)}" + (f"  # {meaning}" if comments and meaning else ""))
    return "\n".join(lines) + "\n"


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _members(kind: Any) -> tuple[Any, ...]:
    """The kinds that a union allows; what is no union is its own only member."""
    return typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)


def _one_of(key: str, value: Any, known: Iterable[str]) -> NoReturn:
    known = list(known)
    raise ConfigError(f"`{key}` must be one of {', '.join(known)}, got {value!r}.{suggestion(str(value), known)}")


def _choose(key: str, table: Mapping[str, Any], kind: Any, standing: Any) -> Any:
    """The value of a table: of the one class it can be, of the class it names, or of the class that stands there."""
    classes = choices(kind)
    if not classes:
        raise ConfigError(f"`{key}` is a setting, so there is no `{key}.{next(iter(table), '')}`.")
    rest, named = dict(table), not dataclasses.is_dataclass(kind)
    cls = type(standing)
    if not named:
        cls = kind
    elif "name" in rest:
        name = convert(f"{key}.name", rest.pop("name"), str)
        cls = classes[name] if name in classes else _one_of(f"{key}.name", name, classes)
    elif not dataclasses.is_dataclass(standing):
        raise ConfigError(f"[{key}] must say its `name`, one of {', '.join(classes)}.")
    return build(cls, rest, f"{key}.", standing if type(standing) is cls else None, named)


def _names(kind: Any, standing: Any) -> str:
    """The settings that a table under this annotation may have now."""
    cls = kind if dataclasses.is_dataclass(kind) else type(standing)
    names = [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
    return ", ".join(names if cls is kind else ["name", *names])


def _plain(key: str, value: Any, kind: Any) -> Any:
    """A value that is no table, under an annotation that is no union."""
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        choice = typing.get_args(kind)
        return value if value in choice else _one_of(key, value, map(str, choice))
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"`{key}` must be a list, got {value!r}.")
        return tuple(convert(f"{key}[{index}]", entry, typing.get_args(kind)[0]) for index, entry in enumerate(value))
    if kind is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"`{key}` is too large for a number of 64 bits.") from None
    if kind in (bool, int, float, str) and type(value) is kind:
        return value
    raise ConfigError(f"`{key}` must be {_describe(kind)}, got {value!r}.")


def _describe(kind: Any) -> str:
    """A type in words."""
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", type(None): f'"{NOTHING}"'}
    return words.get(kind) or ("a list" if typing.get_origin(kind) is tuple else "a table")


def _read(written: Written, members: tuple[Any, ...]) -> Any:
    """The value written after `=`: TOML, with quotes around texts optional and `.5` accepted for 0.5."""
    text = written.strip()
    if str in members:
        return text.strip("\"'")
    try:
        # A newline would let one override carry further keys.
        return tomllib.loads(f"value = {text}")["value"] if "\n" not in text else text
    except (tomllib.TOMLDecodeError, RecursionError, ValueError):
        pass
    try:
        return float(text) if float in members else text
    except ValueError:
        return text


def _literal(value: Any) -> str:
    """One TOML value."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_literal(item) for item in value) + "]"
    # JSON's escapes are TOML's, except that TOML also wants DEL escaped.
    return json.dumps(NOTHING if value is None else value, ensure_ascii=False).replace("\x7f", "\\u007f")
