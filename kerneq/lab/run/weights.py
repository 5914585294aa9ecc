"""Runs by the names people give: their folders, folders that hold some, and weights that ship."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
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
        runs = list(_runs_in(path, depth=3))
        found |= {run.path.resolve(): run for run in runs if run.path.resolve() not in found}
        if not runs:
            raise TrainingError(f"{path} holds no run: neither it nor a folder in it has a config.toml.")
    return list(found.values())


def _runs_in(folder: Path, depth: int) -> Iterator[Run]:
    """The run that is this folder, and those in its folders; what may not be entered or listed is passed over."""
    with suppress(OSError):
        if Run(folder).exists:
            yield Run(folder)
    if depth == 0:
        return
    inner: list[Path] = []
    with suppress(OSError):
        inner = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    for path in inner:  # a sweep may lie in the folder of the run that it was named after
        yield from _runs_in(path, depth - 1)
