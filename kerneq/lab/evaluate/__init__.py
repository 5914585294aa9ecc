"""Measurements of a trained run, one file for each kind of evidence.

A file has functions of tensors, or of a model and a batch, and one `measure_X(trained) -> XResult`. Its line in `PARTS`
makes it a part of `kerneq evaluate`, which writes RUN/evaluation/X.json (of the scores: RUN/evaluation.json).
"""

from typing import Any

from .attack import measure_attack
from .behaviour import measure_behaviour
from .certificates import measure_certificates
from .corruptions import measure_corruptions
from .export import export as export
from .ood import measure_ood
from .saliency import draw_saliency, measure_saliency
from .scores import SCORES
from .scores import EvaluationResult as EvaluationResult
from .scores import evaluate as evaluate
from .scores import measure_scores as measure_scores
from .scores import over_seeds as over_seeds
from .trained import Measurements as Measurements
from .trained import NotApplicableError as NotApplicableError
from .trained import Part as Part
from .trained import TrainedRun as TrainedRun
from .trained import measure_part as measure_part

PARTS: dict[str, Part[Any]] = {
    "scores": SCORES,
    "ood": Part(measure_ood, "known against unknown classes: KL and AUROC (KerDEQ, Table 3)", usual=True),
    "behaviour": Part(measure_behaviour, "the solver: traces, contraction, and accuracy after fewer steps"),
    "corruptions": Part(measure_corruptions, "accuracy under the 19 corruptions of CIFAR-10-C (KerDEQ, Figure 2)"),
    "saliency": Part(measure_saliency, "where the model looks: maps, deletion and insertion", draw=draw_saliency),
    "attack": Part(measure_attack, "accuracy under PGD, and whether its gradient is masked"),
    "certificates": Part(measure_certificates, "predictions that provably do not change within a distance"),
}
