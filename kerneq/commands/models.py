"""`kerneq models`."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from kerneq.models import MODELS, build, parameters


def run() -> None:
    table = Table(title="Models: kerneq train … model.name=NAME")
    table.add_column("name", no_wrap=True)
    table.add_column("parameters", justify="right")
    table.add_column("equation", overflow="fold")
    table.add_column("paper", overflow="fold")
    table.add_column("published", overflow="fold")
    for name, entry in MODELS.items():
        table.add_row(name, millions(parameters(build(name))), entry.equation, entry.paper, percents(entry.published))
    Console().print(table)


def millions(count: int) -> str:
    return f"{count / 1e6:.2f} M" if count >= 100_000 else f"{count / 1e3:.1f} k"


def percents(published: Mapping[str, float]) -> str:
    """Published accuracies by data set."""
    return "\n".join(f"{data} {value} %" for data, value in published.items()) or "–"
