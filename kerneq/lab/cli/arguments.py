"""The arguments that several commands take, and what the shell completes them with."""

import glob
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

PACKAGE = Path(__file__).parents[2]
RUNS = Path("runs")


def complete(*patterns: str) -> Callable[[str], list[str]]:
    """Complete a word with the names of package data of these patterns, and with paths."""

    def offer(start: str) -> list[str]:
        shipped = [path.name.removesuffix(".toml") for pattern in patterns for path in sorted(PACKAGE.glob(pattern))]
        names = [*shipped, *sorted(glob.glob(glob.escape(start) + "*"))]
        return [name for name in names if name.startswith(start)]

    return offer


_run = partial(Argument, metavar="RUN", autocompletion=complete("weights/*"))
RunFolder = Annotated[Path, _run(help="A run folder, or the name of weights that ship (kerneq models).")]
RunFolders = Annotated[list[Path], _run(help="Run folders, folders that hold some, or names of weights that ship.")]
RunsFolder = Annotated[Path, Option("--runs", help="The folder that holds the runs.")]
AsJson = Annotated[bool, Option("--json", help="Print JSON instead of a table.")]
Checkpoint = Annotated[
    str, Option(help="best (on the held-out images) or last.", autocompletion=lambda: ["best", "last"])
]
Device = Annotated[
    str, Option(help="auto, cpu, cuda or cuda:N.", autocompletion=lambda: ["auto", "cpu", "cuda", "cuda:0"])
]
