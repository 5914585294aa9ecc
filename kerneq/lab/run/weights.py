"""Runs by the names people give: their folders, folders that hold some, and weights that ship."""

from collections.abc import Sequence
from pathlib import Path

from ...loading import SHIPPED as SHIPPED
from ...loading import TrainingError, find_folder
from ...loading import names as names
from .folder import Run


def find_run(name: Path | str) -> Run:
    """The run in a folder, or the one that ships under this name; a folder of one's own goes first."""
    return Run(find_folder(name))


def find_runs(paths: Sequence[Path | str]) -> list[Run]:
    """The runs in some folders, each of which is one or holds some, or that ship under these names.

    In the order of `paths`, then of the names; a folder without any is a `TrainingError`.
    """
    found: dict[Path, Run] = {}
    for path in (find_run(path).path for path in paths):
        if not path.is_dir():
            raise TrainingError(f"{path} is not a run folder: it has no config.toml. kerneq train makes one.")
        runs = _runs_in(path)
        found |= {run.path.resolve(): run for run in runs if run.path.resolve() not in found}
        if not runs:
            raise TrainingError(f"{path} holds no run: neither it nor a folder in it has a config.toml.")
    return list(found.values())


def _runs_in(folder: Path, depth: int = 3) -> list[Run]:
    """The runs in a folder and in those in it, `depth` levels down, hidden ones left out; a sweep may lie in the folder
    of the run that it was named after."""
    found = {path.parent for level in range(depth + 1) for path in folder.glob("*/" * level + "config.toml")}
    hidden = {path for path in found if any(part.startswith(".") for part in path.relative_to(folder).parts)}
    return [Run(path) for path in sorted(found - hidden)]
