"""One setting of a configuration: its default, what it means, and the values it may take."""

import dataclasses
from typing import Any


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is the sentence shown to people."""


def setting(
    default: Any,
    meaning: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
) -> Any:
    """A dataclass field that carries its meaning and its range: low ≤ value ≤ high, value > above."""
    return dataclasses.field(default=default, metadata={"meaning": meaning, "low": low, "high": high, "above": above})


def meaning(field: dataclasses.Field) -> str:
    return str(field.metadata.get("meaning", ""))


def check_range(key: str, value: Any, field: dataclasses.Field) -> None:
    """Refuse a number outside the range that its field states."""
    low, high, above = (field.metadata.get(bound) for bound in ("low", "high", "above"))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    # Written as "not (inside)", so that NaN is refused too.
    if low is not None and not value >= low:
        raise ConfigError(f"`{key}` must be at least {low}, got {value}.")
    if above is not None and not value > above:
        raise ConfigError(f"`{key}` must be greater than {above}, got {value}.")
    if high is not None and not value <= high:
        raise ConfigError(f"`{key}` must be at most {high}, got {value}.")
    if value != value or value in (float("inf"), float("-inf")):
        raise ConfigError(f"`{key}` must be a finite number, got {value}.")
