"""Adversarial pictures: projected gradient ascent through the equilibrium, and whether its gradient can be trusted.

Radii are in pixel units, pictures in [0, 1], whatever normalisation a model wants (`InPixels`). A robust accuracy is an
upper bound: a better attack may find more. So each comes with the usual tests for a masked gradient (Athalye et al.,
2018): the loss must rise along the steps, a large ball must leave nothing, and neither as many random points of the
ball, nor the gradient of the unrolled iterations, nor, where one is given, another model's pictures may fool the model
more often. Logits that are no numbers are no answer: they count as fooled.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, final, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ...equilibrium import layers_of, solving
from ...gradients import AbstractGradient, Unrolled
from ...tensors import check_positive, check_whole, magnitude, per_sample, per_sample_norm
from .trained import TrainedRun

Norm = Literal["linf", "l2"]
Pictures = Sequence[tuple[Tensor, Tensor]]  # batches of pictures in [0, 1] and their labels
Box = tuple[float, float] | None  # what every number of a picture lies between
Objective = Callable[[Tensor, Tensor], Tensor]  # logits and labels ↦ what is climbed, (batch,)

_cross_entropies: Objective = functools.partial(cross_entropy, reduction="none")

STRIDE = 2.5  # the steps together are this many radii long (Madry et al., 2018)
UNROLLED = 30  # proximal steps that the unrolled gradient is taken through
TOGETHER = 16  # pictures whose unrolled steps a CPU remembers at once: 0.15 GB each in GEQ-5M; a card as many as it can
TESTED = 128  # pictures the tests for a masked gradient look at
FACTORS = (0.5, 1.0, 2.0, 4.0, 8.0)  # of the radius: hardly anything may be left at the last
SLACK = 0.02  # share of the pictures by which a test may be missed by chance


@final
class InPixels(nn.Module):
    """A model of normalised pictures as one of pictures in [0, 1]: x ↦ model((x − mean) / std)."""

    def __init__(self, model: nn.Module, mean: tuple[float, ...], std: tuple[float, ...]):
        super().__init__()
        self.model = model
        reference = next(model.parameters())
        self.register_buffer("mean", torch.tensor(mean).to(reference)[:, None, None])
        self.register_buffer("std", torch.tensor(std).to(reference)[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model((x - self.get_buffer("mean")) / self.get_buffer("std"))
        return logits

    def pixels(self, x: Tensor) -> Tensor:
        """Normalised pictures back in [0, 1]."""
        return (x * self.get_buffer("std") + self.get_buffer("mean")).clamp(0, 1)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Adversarial:
    """What an attack found: for each sample the picture with the largest margin, the clean one among them."""

    x: Tensor  # like the pictures it started from
    margin: Tensor  # (batch,) largest other logit minus that of the label
    losses: tuple[float, ...]  # mean cross-entropy before each step and after the last, in the first restart

    @property
    def fooled(self) -> Tensor:
        """Where the model sees another class than the label, (batch,) of bool."""
        return self.margin > 0


@final
@dataclasses.dataclass(frozen=True)
class Threat:
    """A ball ‖x′ − x‖ ≤ radius, in pixel units, and how hard it is searched."""

    norm: Norm = "linf"
    radius: float = 8 / 255
    steps: int = 20
    restarts: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.norm not in get_args(Norm):
            raise ValueError(f"`norm` must be linf or l2, got {self.norm!r}.")
        check_positive("radius", self.radius)
        check_whole("steps", self.steps)
        check_whole("restarts", self.restarts)

    def random_offset(self, x: Tensor, noise: torch.Generator) -> Tensor:
        """A point of the ball around zero for each sample, uniformly; drawn on the host, whatever the device."""
        if self.norm == "linf":
            return (self.radius * (2 * torch.rand(x.shape, generator=noise) - 1)).to(x)
        direction = torch.randn(x.shape, generator=noise)
        share = torch.rand(len(x), generator=noise) ** (1 / max(direction[0].numel(), 1))
        return (direction * per_sample(self.radius * share / _lengths(direction), direction)).to(x)

    def project(self, x: Tensor, offset: Tensor, box: Box) -> Tensor:
        """The picture at x + offset, brought back; cutting to a box that holds x makes no offset longer."""
        if self.norm == "linf":
            offset = offset.clamp(-self.radius, self.radius)
        else:
            offset = offset * per_sample(self.radius / _lengths(offset).clamp_min(self.radius), offset)
        return x + offset if box is None else (x + offset).clamp(*box)

    def steepest(self, g: Tensor) -> Tensor:
        """The offset of length 1 along which a function with gradient g rises fastest."""
        g = g.nan_to_num()  # a backward solve that failed must not end the attack
        if self.norm == "linf":
            return g.sign()
        g = g / magnitude(g)  # the square of a saturated loss's slope would be zero
        return g / per_sample(_lengths(g), g)


THREATS = (Threat("linf", 8 / 255), Threat("l2", 128 / 255))


def _lengths(offset: Tensor) -> Tensor:
    return per_sample_norm(offset).clamp_min(torch.finfo(offset.dtype).tiny)


def pgd(
    model: nn.Module,
    x: Tensor,
    labels: Tensor,
    threat: Threat,
    *,
    box: Box = (0.0, 1.0),
    gradient: AbstractGradient | None = None,
) -> Adversarial:
    """Projected gradient ascent from some random points of the threat's ball, cut to the box.

    `model` maps x (batch, ...), in the units of the radius, to logits, and is in `eval()`. Restarts climb the
    cross-entropy and the margin in turn: the second has a slope where the first is saturated. Only samples not yet
    fooled are tried again. The same seed gives the same attack. The gradient of equilibrium layers is the exact one,
    whatever they were trained with, unless `gradient` says otherwise.
    """
    if model.training:
        raise ValueError("The model is in training mode, where batch norms mix the samples: call `model.eval()` first.")
    noise = torch.Generator().manual_seed(threat.seed)
    x = x.detach()
    losses: tuple[float, ...] = ()
    with torch.no_grad():
        best, margin = x.clone(), margins(model(x), labels)
    with solving(model, gradient=gradient, exact=gradient is None), frozen(model):
        for restart in range(threat.restarts):
            offset = threat.random_offset(x, noise)
            left = torch.arange(len(x), device=x.device) if restart == 0 else (margin <= 0).nonzero().flatten()
            if len(left) == 0:
                break
            objective = _cross_entropies if restart % 2 == 0 else margins
            found = _ascend(model, x[left], labels[left], threat, box, offset[left], objective)
            better = found.margin > margin[left]
            best[left[better]], margin[left[better]] = found.x[better], found.margin[better]
            losses = losses or found.losses
    return Adversarial(best, margin, losses)


def _ascend(
    model: nn.Module, x: Tensor, labels: Tensor, threat: Threat, box: Box, offset: Tensor, objective: Objective
) -> Adversarial:
    """Steps along the gradient of the objective, back into the ball after each."""
    at = best = threat.project(x, offset, box)
    margin = at.new_full((len(at),), -torch.inf)
    losses: list[Tensor] = []
    for step in range(threat.steps + 1):
        with torch.set_grad_enabled(step < threat.steps):
            at = at.detach().requires_grad_(step < threat.steps)
            logits = model(at)
        found = margins(logits.detach(), labels)
        better = found > margin
        best = torch.where(per_sample(better, at), at.detach(), best)
        margin = torch.where(better, found, margin)
        losses.append(_cross_entropies(logits.detach(), labels).mean())
        if step < threat.steps:
            (g,) = torch.autograd.grad(objective(logits, labels).sum(), at)
            move = STRIDE * threat.radius / threat.steps * threat.steepest(g)
            at = threat.project(x, at.detach() - x + move, box)
    return Adversarial(best, margin, tuple(torch.stack(losses).tolist()))


def margins(logits: Tensor, labels: Tensor) -> Tensor:
    """The largest other logit minus that of the label, (batch,); ∞ where the logits are no numbers."""
    own = logits.gather(1, labels[:, None])
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return (others.amax(1) - own[:, 0]).nan_to_num(torch.inf, torch.inf, -torch.inf)


@contextlib.contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Inside, no parameter has a gradient: those of inputs cost half without them."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


def carry_out(
    threat: Threat, model: nn.Module, pictures: Pictures, gradient: AbstractGradient | None = None
) -> tuple[Pictures, list[float]]:
    """The pictures as the attack leaves them, and the mean loss along its steps."""
    left, losses = [], torch.zeros(threat.steps + 1)
    for number, (x, labels) in enumerate(pictures):
        found = pgd(model, x, labels, dataclasses.replace(threat, seed=threat.seed + number), gradient=gradient)
        left.append((found.x, labels))
        losses += len(labels) * torch.tensor(found.losses)
    return left, (losses / sum(len(labels) for _, labels in pictures)).tolist()


def carry_out_unrolled(threat: Threat, model: nn.Module, pictures: Pictures, together: int) -> Pictures:
    """The pictures as an attack by the gradient of the unrolled iterations leaves them; so many pictures at once, or
    half of them, and so on, if the card has too little memory."""
    parts = ((x, labels, slice(i, i + together)) for x, labels in pictures for i in range(0, len(labels), together))
    try:
        return carry_out(threat, model, [(x[at], labels[at]) for x, labels, at in parts], Unrolled(UNROLLED))[0]
    except torch.OutOfMemoryError:
        if together == 1:
            raise
    return carry_out_unrolled(threat, model, pictures, together // 2)


@torch.no_grad()
def among_random_points(threat: Threat, model: nn.Module, pictures: Pictures) -> Pictures:
    """Of as many random points of the ball as the attack has steps, for each picture that with the largest margin."""
    noise = torch.Generator().manual_seed(threat.seed)
    left = []
    for x, labels in pictures:
        best, margin = x, x.new_full((len(x),), -torch.inf)
        for _ in range(threat.steps):
            at = threat.project(x, threat.random_offset(x, noise), (0.0, 1.0))
            found = margins(model(at), labels)
            best = torch.where(per_sample(found > margin, at), at, best)
            margin = torch.maximum(margin, found)
        left.append((best, labels))
    return left


@final
@dataclasses.dataclass(frozen=True)
class ThreatResult:
    """The accuracy left by one threat, and what the tests for a masked gradient gave."""

    threat: Threat
    accuracy: float  # share of the pictures classified rightly wherever the attack looked
    losses: list[float]  # mean cross-entropy along the steps
    random: float  # share right at all random points of the ball that were tried, of the pictures tested, as all below
    tested: float  # accuracy under the attack itself
    radii: list[tuple[float, float]]  # radius and accuracy, one restart each
    unrolled: float | None  # accuracy with the gradient of the unrolled iterations
    transfer: float | None  # accuracy on what was made for another model

    def concerns(self) -> list[str]:
        """Signs of a masked gradient, in words; none where the accuracy can be trusted."""
        accuracies = [accuracy for _, accuracy in self.radii]
        signs = {
            "the loss does not rise along the steps": not self.losses[-1] > self.losses[0],
            "random points do better": self.random < self.tested - SLACK,
            "a larger ball leaves more": any(b > a + SLACK for a, b in itertools.pairwise(accuracies)),
            f"a ball {FACTORS[-1]:g} times as large leaves {accuracies[-1]:.1%}": accuracies[-1] > 0.1,
            "the unrolled gradient does better": self.unrolled is not None and self.unrolled < self.tested - SLACK,
            "another model's pictures do better": self.transfer is not None and self.transfer < self.tested - SLACK,
        }
        return [words for words, seen in signs.items() if seen]


@final
@dataclasses.dataclass(frozen=True)
class AttackResult:
    """Accuracy of a trained run on clean and on adversarial test pictures, in float32."""

    images: int
    tested: int  # pictures the tests for a masked gradient looked at
    clean: float
    threats: list[ThreatResult]
    concerns: list[str]  # signs of a masked gradient under any of the threats

    def summary(self) -> list[tuple[str, str]]:
        lines = [("clean accuracy", f"{self.clean:.2%} of {self.images} pictures")]
        for found in self.threats:
            t = found.threat
            lines.append((f"{t.norm} {t.radius * 255:g}/255, PGD-{t.steps} × {t.restarts}", f"{found.accuracy:.2%}"))
        return [*lines, ("signs of a masked gradient", "; ".join(self.concerns) or "none")]


def measure_attack(
    trained: TrainedRun,
    *,
    images: int = 1000,
    threats: Sequence[Threat] = THREATS,
    other: nn.Module | None = None,
) -> AttackResult:
    """Attack a random choice of test pictures. `other`, for the transfer, takes the same normalised pictures."""
    chosen = trained.test.sample(images)
    model = InPixels(trained.model, chosen.mean, chosen.std).eval()
    source = None if other is None else InPixels(other, chosen.mean, chosen.std).eval()
    pictures = [(model.pixels(x), labels) for x, labels in trained.batches(chosen).epoch(0)]
    tracked = trained.track(threats, "attacks", len(threats))
    found = [attack(model, pictures, threat, source) for threat in tracked]
    concerns = [f"{result.threat.norm}: {words}" for result in found for words in result.concerns()]
    tested = sum(len(labels) for _, labels in _tested(pictures))
    return AttackResult(len(chosen), tested, accuracy(model, pictures), found, concerns)


def attack(model: nn.Module, pictures: Pictures, threat: Threat, source: nn.Module | None = None) -> ThreatResult:
    """The accuracy of a model of pictures in [0, 1] under a threat, and the tests for a masked gradient.

    `source` is another model of such pictures, for the transfer.
    """
    left, losses = carry_out(threat, model, pictures)
    some = _tested(pictures)
    radii = [(0.0, accuracy(model, some))]
    for factor in FACTORS:
        wider = dataclasses.replace(threat, radius=factor * threat.radius, restarts=1)
        radii.append((wider.radius, accuracy(model, carry_out(wider, model, some)[0])))
    unrolled = transfer = None
    if layers_of(model):
        together = TOGETHER if some[0][0].device.type == "cpu" else TESTED
        unrolled = accuracy(model, carry_out_unrolled(threat, model, some, together))
    if source is not None:
        transfer = accuracy(model, carry_out(threat, source, some)[0])
    random, tested = accuracy(model, among_random_points(threat, model, some)), accuracy(model, _tested(left))
    return ThreatResult(threat, accuracy(model, left), losses, random, tested, radii, unrolled, transfer)


@torch.no_grad()
def accuracy(model: nn.Module, pictures: Pictures) -> float:
    """Share of the pictures that `model` classifies rightly."""
    right = torch.stack([(margins(model(x), labels) <= 0).sum() for x, labels in pictures]).sum()
    return int(right) / sum(len(labels) for _, labels in pictures)


def _tested(pictures: Pictures) -> Pictures:
    """The first of the pictures, in batches like theirs."""
    some: list[tuple[Tensor, Tensor]] = []
    left = TESTED
    for x, labels in pictures:
        if left > 0:
            some.append((x[:left], labels[:left]))
            left -= len(some[-1][1])
    return some
