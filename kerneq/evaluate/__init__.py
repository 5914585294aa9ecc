"""What a trained run is worth: each chapter measures one kind of evidence on a `TrainedRun`, and writes it down."""

from .certificates import CertificateResult as CertificateResult
from .certificates import measure_certificates as measure_certificates
from .scores import EvaluationResult as EvaluationResult
from .scores import evaluate as evaluate
from .scores import measure as measure
from .trained import TrainedRun as TrainedRun
