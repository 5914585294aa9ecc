"""The kinds of evidence about a trained run: what each measures, of which runs, how long that takes, and its files."""

import dataclasses
import operator
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, final

import torch
from PIL import Image

from ... import __version__
from ...equation import Equation
from ...equilibrium import hook_solves, solving
from ...gradients import AbstractSteps
from ...kernels import AbstractRadialKernel, Linear
from ...maps import AbstractMap
from ...models import CertifiedConfig, ClassifierConfig, KernelConfig, ResNetConfig
from ...settings import suggestion
from ..run import SHIPPED, TrainingError
from ..run.config import Config, ConfigError
from ..training.build import Builder, build_model
from .attack import freeze, measure_attack
from .behaviour import measure_behaviour
from .certificates import measure_certificates
from .corruptions import measure_corruptions
from .ood import find_ood_obstacle, measure_ood
from .saliency import draw_saliency, measure_saliency
from .scores import draw_mistakes, measure_scores
from .sheet import png
from .trained import NotApplicableError, TrainedRun

CONVEX = -0.05  # estimates of μ below this are of layers that are not convex, however the estimate is rounded
TIMED = 16  # pictures that a pass is timed on; on a GPU a whole batch


class Evidence(Protocol):
    """A frozen dataclass of plain numbers, strings, lists and such dataclasses: what JSON can hold."""

    def summary(self) -> list[tuple[str, str]]:
        """Names and values to print, a line each."""


R = TypeVar("R", bound=Evidence)


@final
@dataclasses.dataclass(frozen=True)
class Part(Generic[R]):
    """One kind of evidence: its function, a sentence about it, and a function that draws its pictures by file name.

    `work` is about how many passes through the model, and how many of its exact gradients, so many test images take.
    `obstacle` says why it has nothing to say about any run of these settings; empty where it may have.
    """

    measure: Callable[[TrainedRun], R]
    sentence: str
    draw: Callable[[TrainedRun, R], Mapping[str, Image.Image]] | None = None
    usual: bool = False  # measured unless parts are named
    work: Callable[[int], tuple[float, float]] | None = None
    obstacle: Callable[[Config], str] = lambda config: ""


def find_corruption_obstacle(config: Config) -> str:
    name = config.data.name
    of = f"The corruptions are those of CIFAR-10-C, and this run is of {name}."
    return "" if name.startswith("cifar") else of


def find_behaviour_obstacle(config: Config) -> str:
    settings = config.model.settings
    if isinstance(settings, ResNetConfig) or settings.equation == ResNetConfig.equation:
        what = "no equilibrium layer"
    elif isinstance(settings.gradient, AbstractSteps):
        what = "layers of unrolled steps"
    else:
        return ""
    return f"{config.model.name} has {what}, and so no solver behaviour to measure."


def find_certificate_obstacle(config: Config) -> str:
    """Why nothing can be proved about any model of these settings; empty where something may be."""
    settings, problem = config.model.settings, ""
    if isinstance(settings, CertifiedConfig | KernelConfig) and isinstance(settings.gradient, AbstractSteps):
        problem = "its layers give unrolled steps, not equilibria"
    elif isinstance(settings, CertifiedConfig):
        return ""
    elif not isinstance(settings, KernelConfig) or settings.equation == ResNetConfig.equation:
        problem = "no bounds are known of the layers of such a model"
    elif not isinstance(settings.kernel, AbstractRadialKernel | Linear):
        problem = f"the kernel {settings.kernel!r} has no bounds"
    elif isinstance(settings, ClassifierConfig) and settings.refinements:
        problem = "no bound is known of its residual blocks (`model.refinements`)"
    return _refuse_certificates(config, problem) if problem else ""


def _refuse_certificates(config: Config, problem: str) -> str:
    return f"Nothing is certified about {config.model.name}: {problem}. `certified-small` is made for it."


@torch.no_grad()
def find_nonconvex_layer(trained: TrainedRun) -> str:
    """Why no prediction can be certified, as far as a single pass can tell; empty where one may be.

    `certify` would find the same, but after it has computed the norm of every layer exactly: minutes in a large model.
    """
    least: list[float] = []

    def note(layer: object, f: AbstractMap, z: torch.Tensor) -> None:
        least.append(float(f.convexity.max()) if isinstance(f, Equation) else 0.0)

    with hook_solves(trained.model, note):
        trained.model(torch.zeros(1, *trained.seen.shape, device=trained.process.device))
    if min(least, default=0.0) >= CONVEX:
        return ""
    return _refuse_certificates(
        trained.config, f"its equilibria are not shown to be unique (E has μ = {min(least):.2g} < 0)"
    )


def check_certifiable(trained: TrainedRun) -> None:
    """Raise a `NotApplicableError` where no prediction can be certified."""
    if problem := find_certificate_obstacle(trained.config) or find_nonconvex_layer(trained):
        raise NotApplicableError(problem)


PARTS: dict[str, Part[Any]] = {
    "scores": Part(
        measure_scores,
        "accuracy, calibration and solver on the test images, and the worst mistakes",
        draw_mistakes,
        usual=True,
        work=lambda count: (2 * count, 0),
    ),
    "ood": Part(
        measure_ood,
        "known against unknown classes: KL and AUROC (KerDEQ, Table 3)",
        usual=True,
        work=lambda count: (2 * count, 0),
        obstacle=find_ood_obstacle,
    ),
    "behaviour": Part(
        measure_behaviour,
        "the solver: traces, contraction, and accuracy after fewer steps",
        work=lambda count: (6 * min(count, 10_000) + 1000, 0),
        obstacle=find_behaviour_obstacle,
    ),
    "corruptions": Part(
        measure_corruptions,
        "accuracy under the 19 corruptions of CIFAR-10-C (KerDEQ, Figure 2)",
        work=lambda count: (96 * count, 0),
        obstacle=find_corruption_obstacle,
    ),
    "saliency": Part(
        measure_saliency,
        "where the model looks: maps, deletion and insertion",
        draw_saliency,
        work=lambda count: (170 * min(count, 256), 64 * min(count, 256)),
    ),
    "attack": Part(
        measure_attack,
        "accuracy under PGD, and whether its gradient is masked",
        work=lambda count: (5000, 80 * min(count, 1000) + 360 * min(count, 128)),
    ),
    "certificates": Part(
        measure_certificates,
        "predictions that provably do not change within a distance",
        work=lambda count: (40 * min(count, 1000), 200 * min(count, 64)),
        obstacle=find_certificate_obstacle,
    ),
}


@final
@dataclasses.dataclass(frozen=True)
class PlannedPart:
    """A part of an evaluation: how long it will take, or why it is left out."""

    name: str
    seconds: float | None  # about; None where it is not known
    left_out: str = ""


def make_plan(trained: TrainedRun) -> list[PlannedPart]:
    """Plan all parts of an evaluation, without those that this version has measured on the same weights."""
    plan: list[PlannedPart] = []
    pace: tuple[float, float] | None = None
    for name, part in PARTS.items():
        left_out = part.obstacle(trained.config)
        if name == "certificates" and not left_out:
            left_out = find_nonconvex_layer(trained)
        if is_measured(trained, name):
            left_out = f"measured already; again by --part {name}"
        seconds = None
        if part.work is not None and not left_out:
            pace = pace or measure_pace(trained)
            seconds = sum(map(operator.mul, part.work(len(trained.test)), pace))
        plan.append(PlannedPart(name, seconds, left_out))
    return plan


def is_measured(trained: TrainedRun, name: str) -> bool:
    """Whether a part of the evaluation is in the run's folder, of the same weights, and whole."""
    with warnings.catch_warnings(), suppress(TrainingError):
        warnings.simplefilter("ignore")  # that it is of other weights
        found = trained.run.part(name)
        return (found.get("checkpoint"), found.get("kerneq")) == (trained.checkpoint, __version__)
    return False


def measure_pace(trained: TrainedRun) -> tuple[float, float]:
    """The seconds for one picture of a pass through the model, and of its exact gradient."""
    count = trained.config.training.batch_size if trained.process.device.type == "cuda" else TIMED
    x = next(iter(trained.batches(trained.test.sample(count)).epoch(0)))[0]
    times = []
    with solving(trained.model, exact=True), freeze(trained.model):
        for gradient in (False, False, True):  # the first one is slower
            began = time.monotonic()
            with torch.set_grad_enabled(gradient):
                logits = trained.model(x.requires_grad_(gradient))
                if gradient:
                    torch.autograd.grad(logits.sum(), x)
            logits.sum().item()  # waits for the device
            times.append((time.monotonic() - began) / len(x))
    return times[1], times[2]


@final
@dataclasses.dataclass(frozen=True)
class Measurements(Generic[R]):
    """A measured part of a run and its pictures, not yet written."""

    trained: TrainedRun
    name: str
    evidence: R
    seconds: float
    pictures: Mapping[str, Image.Image]

    def write(self) -> list[str]:
        """Write the part and its pictures into the run's folder, and return the names of the files.

        Into the installation, where the weights that ship are, nothing is written.
        """
        trained, run = self.trained, self.trained.run
        if run.path.resolve().parent == SHIPPED.resolve():
            return []
        header = {"checkpoint": trained.checkpoint, "epoch": trained.epoch, "step": trained.step}
        header |= {"seconds": round(self.seconds, 3), "kerneq": __version__}
        found = [run.write_part(self.name, header | dataclasses.asdict(self.evidence))]  # type: ignore[call-overload]
        return found + [run.write_picture(name, png(picture)) for name, picture in self.pictures.items()]


def find_part(name: str) -> Part[Any]:
    """The part of this name; without one a `ConfigError` that lists them."""
    if name not in PARTS:
        known = "".join(f"\n{name}: {part.sentence}" for name, part in PARTS.items())
        raise ConfigError(f"There is no part `{name}`.{suggestion(name, PARTS)} There are:{known}")
    return PARTS[name]


def measure_part(trained: TrainedRun, name: str) -> Measurements[Any]:
    """Measure one part of a trained run and draw it, without writing; `NotApplicableError` where it says nothing."""
    part, began = find_part(name), time.monotonic()
    if problem := part.obstacle(trained.config):
        raise NotApplicableError(problem)
    evidence = part.measure(trained)
    pictures = part.draw(trained, evidence) if part.draw is not None else {}
    return Measurements(trained, name, evidence, time.monotonic() - began, pictures)


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
    find_part(part)
    measured = measure_part(TrainedRun.open(run, checkpoint, device, build), part)
    measured.write()
    return measured.evidence
