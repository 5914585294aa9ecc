"""A configuration as TOML text, one `key = value  # meaning` line per setting; the reader is `tomllib`."""

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from kerneq.config.setting import meaning

BARE = re.compile(r"[A-Za-z0-9_-]+")


def write(config: Any, comments: bool = False) -> str:
    """The dataclass tree `config` as TOML: its plain settings first, then one table per section."""
    return "\n".join(_section(config, "", comments)) + "\n"


def _section(section: Any, path: str, comments: bool) -> list[str]:
    plain, tables = [], []
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        key = path + field.name
        if dataclasses.is_dataclass(value):
            tables += ["", f"[{key}]", *_section(value, f"{key}.", comments)]
        elif isinstance(value, Mapping):
            tables += _table(key, value, meaning(field) if comments else "")
        elif value is not None:  # TOML has no null: an absent key is None
            note = f"  # {meaning(field)}" if comments and meaning(field) else ""
            plain.append(f"{field.name} = {literal(value)}{note}")
    return plain + tables


def _table(key: str, table: Mapping[str, Any], note: str) -> list[str]:
    lines = ["", f"[{key}]" + (f"  # {note}" if note else "")]
    return lines + [f"{name_of(name)} = {literal(value)}" for name, value in table.items()]


def name_of(key: str) -> str:
    return key if BARE.fullmatch(key) else literal(key)


def literal(value: Any) -> str:
    """One TOML value."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # JSON's escapes are TOML's, except that TOML also wants DEL escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(literal(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name_of(name)} = {literal(item)}" for name, item in value.items()) + "}"
    raise TypeError(f"TOML has no form for {value!r}.")
