"""What a trained run is worth: each chapter measures one kind of evidence on a `TrainedRun`, and writes it down."""

from .corruptions import CorruptionResult as CorruptionResult
from .corruptions import measure_corruptions as measure_corruptions
from .scores import EvaluationResult as EvaluationResult
from .scores import evaluate as evaluate
from .scores import measure as measure
from .trained import TrainedRun as TrainedRun
