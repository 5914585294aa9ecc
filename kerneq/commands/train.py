"""`kerneq train`."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from kerneq.run.config import Config, ConfigError, check, load, write
from kerneq.training import train
from kerneq.training.tensorboard import TensorBoard
from kerneq.training.terminal import Terminal
from kerneq.training.watch import AbstractWatcher, Watchers


def run(file: str, changes: Sequence[str], *, resume: bool, name: str, runs: Path, show_config: bool) -> None:
    if "=" in file and not Path(file).exists():
        file, changes = "", [file, *changes]
    config, folder = resolve(file, changes, resume, name, runs)
    check(config)
    if show_config:
        sys.stdout.write(write(config, comments=True))
        return
    rows = train(config, folder, resume=resume, watcher=watchers(folder, folder.name))
    if is_leader():
        best = max((row["validation"]["accuracy"] for row in rows if row["validation"]), default=None)
        words = f"best validation accuracy {best:.2%}" if best is not None else "nothing was held out"
        Console().print(
            f"{folder}: {len(rows)} epochs, {words}. Next: kerneq evaluate {folder}",
            highlight=False,
            soft_wrap=True,
        )


def resolve(file: str, changes: Sequence[str], resume: bool, name: str, runs: Path) -> tuple[Config, Path]:
    """The configuration and the run folder that the arguments mean."""
    path = Path(file)
    if file and path.is_dir():
        if not resume:
            raise ConfigError(f"{path} is a folder: add --resume to continue the run in it, or name a TOML file.")
        if name:
            raise ConfigError("--name and a run folder exclude each other: the folder has a name.")
        return load(path / "config.toml", changes), path
    if name in (".", "..") or "/" in name:
        raise ConfigError(f"--name is the name of a folder in {runs}, without slashes, got `{name}`.")
    config = load(path if file else None, changes)
    return config, runs / (name or path.name.removesuffix(".toml") or config.model.name)


def watchers(folder: Path, title: str) -> AbstractWatcher:
    """Terminal and TensorBoard, for the process that leads."""
    if not is_leader():
        return Watchers()
    return Watchers([Terminal(title=title), TensorBoard(folder / "tensorboard")])


def is_leader() -> bool:
    return os.environ.get("RANK", "0") == "0"
