"""Out-of-distribution detection: test images of known and of unknown classes (KerDEQ (13), Table 3).

A model trained on the first five classes should be confident about their test images only. Two of the scores come from
the equilibrium alone: −E(z*), and the mean weight ω of the patches.
"""

import dataclasses
import math
from typing import final

import torch
from torch import Tensor

from ...equation import Equation
from ...equilibrium import hook_solves
from ...maps import AbstractMap
from ..data import Images
from ..run.config import Config
from .classification import calibrate, classify
from .trained import NotApplicableError, TrainedRun

NEEDED = (
    "Out-of-distribution calibration needs a run that was trained on some of the classes, data.subset = "
    "first-five-classes, and this one has {}."
)
TITLES = {"confidence": "largest probability", "energy": "−E(z*)", "weight": "mean weight of the patches"}


@final
@dataclasses.dataclass(frozen=True)
class Familiarity:
    """A score that should be higher on known images than on unknown ones."""

    known: float  # the mean on known images
    unknown: float
    auroc: float


@final
@dataclasses.dataclass(frozen=True)
class OodResult:
    """Accuracy and confidence on test images of known and of unknown classes; KL in nats, lower is better.

    KerDEQ's Table 3 gives one KL for unknown classes and does not say which (docs/errata.md). KL(q ‖ uniform) is at
    most log K for K classes; KL(uniform ‖ q) is unbounded, and large for a single probability near zero.
    """

    known_images: int
    unknown_images: int
    accuracy: float
    interval: tuple[float, float]  # Wilson's, of 95 %
    known_kl: float  # KL(label ‖ q), the NLL
    unknown_kl_uniform_q: float  # KL(uniform ‖ q) = −log K − mean of log qₖ
    unknown_kl_q_uniform: float  # KL(q ‖ uniform) = log K − entropy of q
    familiarity: dict[str, Familiarity]  # confidence; energy and weight for models that have them

    def summary(self) -> list[tuple[str, str]]:
        lines = [
            ("images", f"{self.known_images} of known, {self.unknown_images} of unknown classes"),
            ("known accuracy", f"{self.accuracy:.2%}, 95 % interval {self.interval[0]:.2%} … {self.interval[1]:.2%}"),
            ("known KL(label ‖ q)", f"{self.known_kl:.4f}"),
            ("unknown KL(uniform ‖ q)", f"{self.unknown_kl_uniform_q:.4f}"),
            ("unknown KL(q ‖ uniform)", f"{self.unknown_kl_q_uniform:.4f}"),
        ]
        for name, found in self.familiarity.items():
            means = f"{found.known:.4g} on known, {found.unknown:.4g} on unknown"
            lines.append((f"AUROC of {TITLES[name]}", f"{found.auroc:.4f} ({means})"))
        return lines


def measure_ood(trained: TrainedRun) -> OodResult:
    """KerDEQ's Table 3 for a run that was trained on the first five classes."""
    unknown = unknown_images(trained)
    (logits, known), (others, strange) = (score_images(trained, images) for images in (trained.test, unknown))
    found = classify(logits, trained.test.labels)
    return OodResult(
        known_images=len(logits),
        unknown_images=len(others),
        accuracy=found.accuracy,
        interval=found.interval,
        known_kl=calibrate(logits, trained.test.labels).nll,
        unknown_kl_uniform_q=float(kl_uniform_q(others).mean()),
        unknown_kl_q_uniform=float(kl_q_uniform(others).mean()),
        familiarity={
            name: Familiarity(float(known[name].mean()), float(strange[name].mean()), auroc(known[name], strange[name]))
            for name in known
        },
    )


def find_ood_obstacle(config: Config) -> str:
    """Why a run of these settings knows no unknown classes; empty where it may."""
    return "" if config.data.subset == "first-five-classes" else NEEDED.format(config.data.subset)


def unknown_images(trained: TrainedRun) -> Images:
    """The test images of the classes that the run was not trained on."""
    if (unknown := trained.unknown()) is None:
        raise NotApplicableError(NEEDED.format("all"))  # there were no more than five
    return unknown


def score_images(trained: TrainedRun, images: Images) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits, (images, classes), and the scores of `familiarity` that the model has, (images,) each."""
    every: list[Tensor] = []
    parts: list[dict[str, Tensor]] = []
    seen: list[dict[str, Tensor]] = []
    with hook_solves(trained.model, lambda layer, f, z: seen.append(equilibrium_scores(f, z))):
        for _, _, logits, _ in trained.outputs(images):
            every.append(logits.cpu())
            parts.append({"confidence": logits.double().softmax(1).amax(1).cpu(), **_joined(seen)})
            seen.clear()
    return torch.cat(every), {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@torch.no_grad()
def equilibrium_scores(f: AbstractMap, z: Tensor) -> dict[str, Tensor]:
    """−E and the mean weight ω(sᵢ) of the patches, (batch,) each, where the equation f has them.

    At f(z) in place of z, since a mixture of iterates may lie outside the range of σ, where E is infinite."""
    if not isinstance(f, Equation):
        return {}
    z = f(z)
    weights = f.weights(z)
    scores = {"energy": -f.energy(z)}
    return scores if weights is None else scores | {"weight": weights.flatten(1).mean(1)}


def _joined(layers: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Over all layers of a model, the sum of the energies and the mean of the weights."""
    names = set[str]().union(*layers)
    rows = {name: torch.stack([layer[name].double().cpu() for layer in layers if name in layer]) for name in names}
    return {name: rows[name].sum(0) if name == "energy" else rows[name].mean(0) for name in TITLES if name in rows}


def kl_uniform_q(logits: Tensor) -> Tensor:
    """KL(uniform ‖ q), q = softmax(logits), (images,)."""
    return -logits.double().log_softmax(1).mean(1) - math.log(logits.shape[1])


def kl_q_uniform(logits: Tensor) -> Tensor:
    """KL(q ‖ uniform), q = softmax(logits), (images,)."""
    logs = logits.double().log_softmax(1)
    return math.log(logits.shape[1]) + (logs.exp() * logs).sum(1)


def auroc(known: Tensor, unknown: Tensor) -> float:
    """The share of pairs of a known and an unknown image in which the known one scores higher; ties count half.

    Four lines here: importing scikit-learn takes seconds."""
    ranked = unknown.sort().values
    below, up_to = (torch.searchsorted(ranked, known, right=right) for right in (False, True))
    return float((below + up_to).double().mean() / (2 * len(ranked)))
