"""Training: a plain loop that can be watched, stopped, killed, resumed and spread over processes."""

from kerneq.training.errors import CheckpointError as CheckpointError
from kerneq.training.errors import Stopped as Stopped
from kerneq.training.errors import TrainingError as TrainingError
from kerneq.training.folder import Folder as Folder
from kerneq.training.loop import train as train
