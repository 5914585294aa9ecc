"""Measurements of a trained run, one file for each kind of evidence.

A file has functions of tensors, or of a model and a batch, and one `measure_X(trained) -> XResult`. Its line in `PARTS`
makes it a part of `kerneq evaluate`, which writes RUN/evaluation/X.json (of the scores: RUN/evaluation.json).
"""

from pathlib import Path
from typing import Any

from ...settings import suggestion
from ..run.config import ConfigError
from ..training.build import Builder, build_model
from .attack import estimate_attack, measure_attack
from .behaviour import estimate_behaviour, measure_behaviour
from .certificates import measure_certificates
from .corruptions import estimate_corruptions, measure_corruptions
from .export import export as export
from .ood import estimate_ood, measure_ood
from .plan import check_certifiable as check_certifiable
from .plan import estimate_certificates
from .plan import make_plan as make_plan
from .saliency import draw_saliency, estimate_saliency, measure_saliency
from .scores import SCORES
from .scores import EvaluationResult as EvaluationResult
from .scores import measure_scores as measure_scores
from .scores import over_seeds as over_seeds
from .trained import Measurements as Measurements
from .trained import NotApplicableError as NotApplicableError
from .trained import Part as Part
from .trained import TrainedRun as TrainedRun
from .trained import measure_part as measure_part

PARTS: dict[str, Part[Any]] = {
    "scores": SCORES,
    "ood": Part(
        measure_ood, "known against unknown classes: KL and AUROC (KerDEQ, Table 3)", usual=True, estimate=estimate_ood
    ),
    "behaviour": Part(
        measure_behaviour,
        "the solver: traces, contraction, and accuracy after fewer steps",
        estimate=estimate_behaviour,
    ),
    "corruptions": Part(
        measure_corruptions,
        "accuracy under the 19 corruptions of CIFAR-10-C (KerDEQ, Figure 2)",
        estimate=estimate_corruptions,
    ),
    "saliency": Part(
        measure_saliency,
        "where the model looks: maps, deletion and insertion",
        draw=draw_saliency,
        estimate=estimate_saliency,
    ),
    "attack": Part(measure_attack, "accuracy under PGD, and whether its gradient is masked", estimate=estimate_attack),
    "certificates": Part(
        measure_certificates,
        "predictions that provably do not change within a distance",
        estimate=estimate_certificates,
    ),
}


def evaluate(
    run: Path | str,
    part: str = "scores",
    *,
    checkpoint: str = "best",
    device: str = "auto",
    build: Builder = build_model,
) -> Any:
    """Measure a part of a run's evaluation, write it into the run's folder, and return it: a frozen dataclass.

        kerneq.evaluate("runs/geq").scores["test"]["accuracy"]
        kerneq.evaluate("runs/geq", "behaviour").layers

    The parts are those of `kerneq evaluate --part`; into weights that ship nothing is written. One that does not apply
    to the run is a `NotApplicableError`.
    """
    if part not in PARTS:
        raise ConfigError(f"There is no part `{part}`.{suggestion(part, PARTS)} There are: {', '.join(PARTS)}.")
    measured = measure_part(TrainedRun.open(run, checkpoint, device, build), part, PARTS[part])
    measured.write()
    return measured.evidence
