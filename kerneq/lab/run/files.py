"""Files that are whole or absent, JSON among them, and the lock on a folder."""

import fcntl
import json
import math
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from ...loading import TrainingError, read_small


def write_atomically(path: Path, data: bytes) -> None:
    """Make `path` hold `data`, or what it held before, never half of each, even if the power fails.

    Written to a temporary file of this process, brought to the disk, and renamed over `path`; its folder is made if
    need be. Of two processes that write at once, the last one wins.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # or the rename might not survive a power cut
        finally:
            os.close(folder)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise TrainingError(
            f"{path} could not be written: {error.strerror}. What was there before is intact; make room or choose "
            "another folder and try again, a training with --resume."
        ) from error


def write_json(path: Path, table: Mapping[str, Any]) -> None:
    """Make `path` hold the table, atomically."""
    write_atomically(path, (to_json(table, indent=2) + "\n").encode())


def replace_nonfinite(tree: Any) -> Any:
    """A tree of mappings and lists as JSON can hold it, which knows neither infinity nor NaN: they become None."""
    if isinstance(tree, Mapping):
        return {key: replace_nonfinite(entry) for key, entry in tree.items()}
    if isinstance(tree, list | tuple):
        return [replace_nonfinite(entry) for entry in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def to_json(tree: Any, indent: int | None = None) -> str:
    """The tree as JSON."""
    text = json.dumps(replace_nonfinite(tree), indent=indent, allow_nan=False)
    # A list of numbers on one line: a confusion matrix has a line a row. (Strings have no line breaks of their own.)
    return re.sub(r"\[\n\s*([^\[\]{}\"]*?)\n\s*\]", lambda match: f"[{' '.join(match[1].split())}]", text)


def read_json(path: Path, needed: bool = True) -> dict[str, Any]:
    """The table in a JSON file; empty if there is no such file, or it is damaged and not `needed`."""
    try:
        found = json.loads(read_small(path)) if path.exists() else {}
        problem = "" if isinstance(found, dict) else "it holds no table"
    except (OSError, ValueError, RecursionError) as error:
        found, problem = {}, str(error)
    if problem and needed:
        raise TrainingError(f"{path} is damaged: {problem}.")
    return {} if problem else found


def wait_for_lock(file: TextIO, folder: Path, patience: float) -> None:
    """Lock the open file and write this process's number into it; refused if another still holds it after a while."""
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.seek(0)
                used = f"{folder} is in use by process {file.read().strip() or 'another process'}"
                raise TrainingError(f"{used}; wait for it, or choose another --name.") from None
        time.sleep(0.1)
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
