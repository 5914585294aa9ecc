"""Files that are either the old one or the new one, never half of each."""

import os
from pathlib import Path

from kerneq.training.errors import TrainingError


def write_atomically(path: Path, data: bytes) -> None:
    """Write to a temporary file, make sure it has reached the disk, and rename it over `path`."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise TrainingError(
            f"{path} could not be written: {error.strerror}. Earlier checkpoints are intact; make room or "
            "choose another folder, then continue with --resume."
        ) from error


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
