"""Errors a user can act on end a command with one sentence and a code; only bugs give a traceback."""

import sys
from collections.abc import Callable


def guarded(command: Callable[[], object]) -> None:
    """Run `command`; exit with 2 for a wrong request, 130 for a stopped run, 1 for other known failures."""
    try:
        command()
    except KeyboardInterrupt:
        stop("Interrupted.", 130)
    except BrokenPipeError:
        sys.exit(1)  # the reader of our output went away; there is nobody to tell
    except Exception as error:
        code = exit_code(error)
        if code is None:
            raise
        stop(str(error), code)


def exit_code(error: Exception) -> int | None:
    """The code for a known failure; None for one that nobody foresaw."""
    # Here, because these import torch, and most commands that end well never need them.
    import torch

    from kerneq.data import DataError
    from kerneq.settings import ConfigError
    from kerneq.solution import EquilibriumError
    from kerneq.training import Stopped, TrainingError

    if isinstance(error, ConfigError):
        return 2
    if isinstance(error, Stopped):
        return 130
    known = (DataError, EquilibriumError, TrainingError, OSError, torch.OutOfMemoryError)
    return 1 if isinstance(error, known) else None


def stop(sentence: str, code: int) -> None:
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True).print(Text.assemble(("kerneq: ", "bold red"), sentence), soft_wrap=True)
    sys.exit(code)
