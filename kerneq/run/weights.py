"""Weights that ship: trained runs that are part of the installation, found by name.

Each is a run folder like any other, as `kerneq export` writes it.
"""

from pathlib import Path

from ..settings import suggestion
from .checkpoint import TrainingError
from .folder import Run

SHIPPED = Path(__file__).parents[1] / "weights"


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
