"""`kerneq report`."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from kerneq.report import render


def run(folders: Sequence[Path], output: Path) -> None:
    render(folders, output)
    Console().print(f"Written to {output}", highlight=False, soft_wrap=True)
