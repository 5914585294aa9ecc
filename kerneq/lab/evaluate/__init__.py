"""Measurements of a trained run, one file for each kind of evidence.

A file has functions of tensors, or of a model and a batch, and one `measure_X(trained) -> XResult`. Its line in `PARTS`
makes it a part of `kerneq evaluate`, which writes RUN/evaluation/X.json (of the scores: RUN/evaluation.json).
"""

from .export import export as export
from .parts import PARTS as PARTS
from .parts import Measurements as Measurements
from .parts import Part as Part
from .parts import check_certifiable as check_certifiable
from .parts import evaluate as evaluate
from .parts import make_plan as make_plan
from .parts import measure_part as measure_part
from .scores import over_seeds as over_seeds
from .trained import NotApplicableError as NotApplicableError
from .trained import TrainedRun as TrainedRun
