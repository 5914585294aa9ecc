"""Training: a plain loop that can be followed, stopped, killed, resumed and spread over processes."""

from .logger import AbstractLogger as AbstractLogger
from .loop import train as train
from .plan import train_experiment as train_experiment
