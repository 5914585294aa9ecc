"""How a run begins: afresh in an empty folder, or where the last checkpoint left it."""

from kerneq.run.config import ConfigError, differences, load, write
from kerneq.training.environment import environment, record
from kerneq.training.errors import CheckpointError, TrainingError
from kerneq.training.files import write_atomically
from kerneq.training.folder import Folder
from kerneq.training.state import State

FREE = ("device", "training.checkpoint_epochs", "training.checkpoint_steps")  # may change between two starts


def open_run(folder: Folder, state: State, resume: bool) -> None:
    """Bring `state` to where the run in `folder` stands, and write down this start of it."""
    newest = folder.newest()
    if newest is not None and not resume:
        raise TrainingError(f"{folder.path} already holds a run; add --resume to continue it, or --name for another.")
    if newest is not None:
        _check_same(folder, state)
        try:
            state.restore(newest)
        except CheckpointError as error:
            raise CheckpointError(f"{error} {folder.advice(newest)}") from None
    if state.process.leads:
        folder.keep_rows(state.epoch)
        write_atomically(folder.config, write(state.config).encode())
        record(folder.environment, environment(state.config, state.process), state.step)
    state.process.wait()


def _check_same(folder: Folder, state: State) -> None:
    """A run that is continued with other settings would be neither the old one nor the new one."""
    try:
        before = load(folder.config)
    except ConfigError as error:
        raise TrainingError(f"The run cannot be continued: {error}") from None
    changed = [key for key in differences(before, state.config) if key not in FREE]
    if changed:
        raise TrainingError(
            f"{folder.path} was started with another value of {', '.join(f'`{key}`' for key in changed)}; "
            "resume it with the settings in its config.toml, or choose another --name."
        )
