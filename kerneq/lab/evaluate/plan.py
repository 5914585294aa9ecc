"""What an evaluation will measure of a run, and about how long that takes on this machine."""

import dataclasses
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import final

import torch

from ... import __version__
from ...equation import Equation
from ...equilibrium import hook_solves, solving
from ...gradients import AbstractSteps
from ...kernels import AbstractRadialKernel, Linear
from ...maps import AbstractMap
from ...models import CertifiedConfig, ClassifierConfig, KernelConfig, ModelConfig, ResNetConfig
from ..run import TrainingError
from .attack import freeze
from .trained import NotApplicableError, Part, TrainedRun, Work

CONVEX = -0.05  # estimates of μ below this are of layers that are not convex, however the estimate is rounded
TIMED = 16  # pictures that a pass is timed on; on a GPU a whole batch


@final
@dataclasses.dataclass(frozen=True)
class PlannedPart:
    """A part of an evaluation: how long it will take, or why it is left out."""

    name: str
    seconds: float | None  # about; None where it is not known
    left_out: str = ""


def make_plan(trained: TrainedRun, parts: Mapping[str, Part]) -> list[PlannedPart]:
    """Plan the parts of an evaluation, without those that this version has measured on the same weights."""
    plan: list[PlannedPart] = []
    pace: tuple[float, float] | None = None
    for name, part in parts.items():
        if is_measured(trained, name):
            plan.append(PlannedPart(name, None, f"measured already; again by --part {name}"))
            continue
        try:
            work = part.estimate(trained) if part.estimate is not None else None
        except NotApplicableError as error:
            plan.append(PlannedPart(name, None, str(error)))
            continue
        pace = pace or measure_pace(trained)
        plan.append(PlannedPart(name, None if work is None else work.passes * pace[0] + work.gradients * pace[1]))
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


def certificate_obstacle(settings: ModelConfig) -> str:
    """Why nothing can be proved about any model of these settings; empty where something may be."""
    if isinstance(settings, CertifiedConfig | KernelConfig) and isinstance(settings.gradient, AbstractSteps):
        return "its layers give unrolled steps, not equilibria"
    if isinstance(settings, CertifiedConfig):
        return ""
    if not isinstance(settings, KernelConfig) or settings.equation == ResNetConfig.equation:
        return "no bounds are known of the layers of such a model"
    if not isinstance(settings.kernel, AbstractRadialKernel | Linear):
        return f"the kernel {settings.kernel!r} has no bounds"
    if isinstance(settings, ClassifierConfig) and settings.refinements:
        return "no bound is known of its residual blocks (`model.refinements`)"
    return ""


@torch.no_grad()
def check_certifiable(trained: TrainedRun) -> None:
    """Raise a `NotApplicableError` where no prediction can be certified, as far as a single pass can tell.

    `certify` would find the same, but after it has computed the norm of every layer exactly: minutes in a large model.
    """
    problem = certificate_obstacle(trained.config.model.settings)
    if not problem:
        least: list[float] = []

        def note(layer: object, f: AbstractMap, z: torch.Tensor) -> None:
            least.append(float(f.convexity.max()) if isinstance(f, Equation) else 0.0)

        with hook_solves(trained.model, note):
            trained.model(torch.zeros(1, *trained.seen.shape, device=trained.process.device))
        if min(least, default=0.0) < CONVEX:
            problem = f"its equilibria are not shown to be unique (E has μ = {min(least):.2g} < 0)"
    if problem:
        name = trained.config.model.name
        raise NotApplicableError(f"Nothing is certified about {name}: {problem}. `certified-small` is made for it.")


def estimate_certificates(trained: TrainedRun) -> Work:
    """Solves of 1000 pictures to a small residual in float64, and the attack on 64 of them."""
    check_certifiable(trained)
    count = len(trained.test)
    return Work(40 * min(count, 1000), 200 * min(count, 64))
