"""Errors whose sentence is enough for the user: what the program says of them, and the code it ends with."""


def exit_code(error: Exception) -> int | None:
    """What the program ends with after an error whose sentence is enough; None for a bug."""
    from torch import OutOfMemoryError

    from ...solution import EquilibriumError, NonfiniteInputError
    from ..data import DataError
    from ..run import Stopped, TrainingError
    from ..run.config import ConfigError

    match error:
        case ConfigError():
            return 2
        case Stopped():
            return 130
        case (
            DataError() | EquilibriumError() | NonfiniteInputError() | TrainingError() | OSError() | OutOfMemoryError()
        ):
            return 1
    return None


def explain(error: Exception) -> str:
    """The sentence of an error; of PyTorch's about memory its first ones, and what to do instead of its own advice."""
    from torch import OutOfMemoryError

    if not isinstance(error, OutOfMemoryError):
        return str(error)
    said = str(error).partition(" Including non-PyTorch memory")[0].partition(" Of the allocated memory")[0]
    return f"{said} Free the card (`nvidia-smi` shows who holds it), or train in smaller batches (training.batch_size)."
