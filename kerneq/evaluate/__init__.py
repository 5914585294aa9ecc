"""What a trained run is worth: each chapter measures one kind of evidence on a `TrainedRun`, and writes it down.

A chapter has a pure core, functions of tensors or of a model and a batch, and one `measure_X(trained) -> XResult`. Its
line in `PARTS` makes it a part of `kerneq evaluate`, which writes RUN/evaluation/X.json (scores: RUN/evaluation.json).
"""

from typing import Any

from .export import export as export
from .ood import measure_ood
from .parts import Measurements as Measurements
from .parts import NotApplicableError as NotApplicableError
from .parts import Part as Part
from .parts import measure_part as measure_part
from .scores import SCORES
from .scores import EvaluationResult as EvaluationResult
from .scores import evaluate as evaluate
from .scores import measure_scores as measure_scores
from .scores import over_seeds as over_seeds
from .trained import TrainedRun as TrainedRun

PARTS: dict[str, Part[Any]] = {
    "scores": SCORES,
    "ood": Part(measure_ood, "known against unknown classes: KL and AUROC (KerDEQ, Table 3)", usual=True),
}
