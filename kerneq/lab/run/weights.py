"""Runs by the names people give: their folders, folders that hold some, and weights that ship.

Weights that ship are run folders like any other, as `kerneq export` writes them, in the installation.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ...settings import suggestion
from .checkpoint import TrainingError
from .folder import Run

SHIPPED = Path(__file__).parents[2] / "weights"


def names() -> tuple[str, ...]:
    """The names of the models whose weights are part of the installation."""
    return tuple(sorted(path.parent.name for path in SHIPPED.glob("*/config.toml")))


def find_run(name: Path | str) -> Run:
    """The run in a folder, or the one that ships under this name; a folder goes first."""
    if not isinstance(name, Path | str):
        raise TypeError(f"A run is a folder, or the name of weights that ship, got {name!r}.")
    path = Path(name)
    if path.exists() or len(path.parts) != 1:
        return Run(path)
    if str(name) not in names():
        hint = suggestion(str(name), names())
        raise TrainingError(
            f"There is no run folder {path}, and no weights of that name ship with kerneq.{hint} There are: "
            f"{', '.join(names())}."
        )
    return Run(SHIPPED / str(name))


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
