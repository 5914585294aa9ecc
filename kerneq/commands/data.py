"""`kerneq data`."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kerneq.data import data_root, describe


def run() -> None:
    table = Table(title=f"Data sets under {data_root()} (set KERNEQ_DATA to look elsewhere)", show_lines=True)
    table.add_column("name", no_wrap=True)
    table.add_column("found", no_wrap=True)
    table.add_column("where, or how to get it", overflow="fold")
    for row in describe():
        if row.found:
            where = str(row.path or "part of the installation")
        else:
            where = str(row.problem) if row.path is not None else row.get
        cell = Text.assemble(where, "\n", (f"licence: {row.licence}", "dim"))
        table.add_row(row.name, "[green]yes" if row.found else "[yellow]no", cell)
    Console().print(table)
