"""A run as a noun: the folder that holds everything about one training of one model."""

from ...loading import SHIPPED as SHIPPED
from ...loading import CheckpointError as CheckpointError
from ...loading import TrainingError as TrainingError
from .checkpoint import Stopped as Stopped
from .files import write_atomically as write_atomically
from .folder import Run as Run
from .folder import find_run as find_run
from .folder import find_runs as find_runs
from .origin import machine as machine
