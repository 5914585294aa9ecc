"""`kerneq models`."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from kerneq.models import MODELS, build, parameters


def run() -> None:
    table = Table(title="Models: kerneq train … model.name=NAME")
    table.add_column("name", no_wrap=True)
    table.add_column("parameters", justify="right")
    table.add_column("equation", justify="right")
    table.add_column("paper", overflow="fold")
    table.add_column("published", overflow="fold")
    table.add_column("ours", overflow="fold")
    equations = list(dict.fromkeys(entry.equation for entry in MODELS.values()))
    for name, entry in MODELS.items():
        published = {data: f"{value} %" for data, value in entry.published.items()}
        count = millions(parameters(build(name)))
        number = str(equations.index(entry.equation) + 1)
        table.add_row(name, count, number, entry.paper, by_data(published), by_data(entry.ours))
    console = Console()
    console.print(table)
    for place, equation in enumerate(equations, start=1):
        console.print(f"{place}: {equation}", markup=False, highlight=False)


def millions(count: int) -> str:
    return f"{count / 1e6:.2f} M" if count >= 100_000 else f"{count / 1e3:.1f} k"


def by_data(accuracies: Mapping[str, str]) -> str:
    return "\n".join(f"{data} {value}" for data, value in accuracies.items()) or "–"
