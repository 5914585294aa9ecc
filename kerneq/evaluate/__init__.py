"""What a trained run is worth: each chapter measures one kind of evidence on a `TrainedRun`, and writes it down."""

from .scores import EvaluationResult as EvaluationResult
from .scores import evaluate as evaluate
from .scores import measure as measure
from .trained import TrainedRun as TrainedRun
