"""The ways a run can end before its time; each message is the sentence shown to people."""

from typing import final


class TrainingError(RuntimeError):
    """The run cannot start or go on; nothing already saved is lost."""


@final
class CheckpointError(TrainingError):
    """A checkpoint that is damaged, or that does not belong to this run."""


@final
class Stopped(TrainingError):
    """The user asked the run to stop; everything is saved."""
