"""Errors whose sentence is enough for the user."""


def explain(error: Exception) -> tuple[int, str] | None:
    """The code that the program ends with after this error, and what it says; None for a bug.

    Of PyTorch's sentences about memory the first ones are said, and what to do instead of its own advice.
    """
    from torch import OutOfMemoryError

    from ...solution import EquilibriumError, NonfiniteInputError
    from ..data import DataError
    from ..run import Stopped, TrainingError
    from ..run.config import ConfigError

    said = str(error)
    if isinstance(error, OutOfMemoryError):
        said = said.partition(" Including non-PyTorch memory")[0].partition(" Of the allocated memory")[0]
        return 1, f"{said} Free the card (`nvidia-smi` shows who holds it), or lower training.batch_size."
    if isinstance(error, ConfigError):
        return 2, said
    if isinstance(error, Stopped):
        return 130, said
    known = (DataError, EquilibriumError, NonfiniteInputError, TrainingError, OSError)
    return (1, said) if isinstance(error, known) else None
