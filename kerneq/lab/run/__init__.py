"""A run as a noun: the folder that holds everything about one training of one model."""

from ...loading import CheckpointError as CheckpointError
from ...loading import TrainingError as TrainingError
from .checkpoint import Stopped as Stopped
from .checkpoint import write_atomically as write_atomically
from .folder import Run as Run
from .origin import machine as machine
from .weights import SHIPPED as SHIPPED
from .weights import find_run as find_run
from .weights import find_runs as find_runs
