"""Adversarial pictures: projected gradient ascent (PGD) through the equilibrium, and tests of its gradient.

Radii are in pixel units, for pictures in [0, 1] (`InPixels`). A robust accuracy is an upper bound: a better attack may
find more. So each comes with the usual tests for a masked gradient (Athalye et al., 2018): the loss rises along the
steps, a large ball leaves nothing, and neither random points nor the gradient of the unrolled iterations fool the model
more often. Logits that are NaN or infinite count as fooled.

By hand: torchattacks 3.5.1 (which requires torchvision) and pyautoattack 0.2.0 cut every point to [0, 1], which the
attack on a certificate must not, do not report the loss at each step, and draw from the global generators.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, final, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ...equilibrium import layers_of, solving
from ...gradients import AbstractGradient, Unrolled
from ...tensors import check_positive, check_whole, magnitude, per_sample, per_sample_norm
from .trained import TrainedRun

Norm = Literal["linf", "l2"]
Box = tuple[float, float] | None  # the range of a pixel value; None: no limits
Track = Callable[[Sequence[Any], str, int], Iterable[Any]]  # as `TrainedRun.track`
Objective = Callable[[Tensor, Tensor], Tensor]  # logits and labels ↦ the function to maximise, (batch,)

_cross_entropies: Objective = functools.partial(cross_entropy, reduction="none")

STRIDE = 2.5  # length of all steps together, in radii (Madry et al., 2018)
UNROLLED = 30  # proximal steps that the unrolled gradient goes through
TOGETHER = 16  # pictures per unrolled attack on a CPU, 0.15 GB each in GEQ-5M; a GPU takes as many as fit
IMAGES = 1000  # attacked, at most
TESTED = 128  # pictures used in the tests for a masked gradient
FACTORS = (0.5, 1.0, 2.0, 4.0, 8.0)  # of the radius; the accuracy at the last should be close to 0
SLACK = 0.02  # share of the pictures by which a test may fail by chance


@final
class InPixels(nn.Module):
    """A model of normalised pictures as a model of pictures in [0, 1]: x ↦ model((x − mean) / std)."""

    mean: Tensor  # (channels, 1, 1), as std
    std: Tensor

    def __init__(self, model: nn.Module, mean: tuple[float, ...], std: tuple[float, ...]):
        super().__init__()
        self.model = model
        reference = next(model.parameters())
        self.register_buffer("mean", torch.tensor(mean).to(reference)[:, None, None])
        self.register_buffer("std", torch.tensor(std).to(reference)[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model((x - self.mean) / self.std)
        return logits

    def pixels(self, x: Tensor) -> Tensor:
        """Normalised pictures back in [0, 1]."""
        return (x * self.std + self.mean).clamp(0, 1)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Adversarial:
    """The result of an attack: for each sample the picture with the largest margin, which may be the clean one."""

    x: Tensor  # (batch, ...)
    margin: Tensor  # (batch,), the largest other logit minus that of the label
    losses: tuple[float, ...] = ()  # mean cross-entropy before each step and after the last, in the first restart

    @property
    def fooled(self) -> Tensor:
        """Where the model predicts another class than the label, (batch,) of bool."""
        return self.margin > 0

    def or_better(self, x: Tensor, margin: Tensor) -> "Adversarial":
        """For each sample, this picture or the one in `x`, whichever has the larger margin."""
        better = margin > self.margin
        return Adversarial(torch.where(per_sample(better, x), x, self.x), torch.where(better, margin, self.margin))


@final
@dataclasses.dataclass(frozen=True)
class Threat:
    """A ball ‖x′ − x‖ ≤ radius, in pixel units, and the number of steps and restarts of the attack in it."""

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
        """A uniformly random point of the ball around zero for each sample, drawn on the host for every device."""
        if self.norm == "linf":
            return (self.radius * (2 * torch.rand(x.shape, generator=noise) - 1)).to(x)
        direction = torch.randn(x.shape, generator=noise)
        share = torch.rand(len(x), generator=noise) ** (1 / max(direction[0].numel(), 1))
        return (direction * per_sample(self.radius * share / _lengths(direction), direction)).to(x)

    def project(self, x: Tensor, offset: Tensor, box: Box) -> Tensor:
        """x + offset, projected into the ball and cut to the box, which shortens an offset where the box holds x."""
        if self.norm == "linf":
            offset = offset.clamp(-self.radius, self.radius)
        else:
            offset = offset * per_sample(self.radius / _lengths(offset).clamp_min(self.radius), offset)
        return x + offset if box is None else (x + offset).clamp(*box)

    def steepest(self, g: Tensor) -> Tensor:
        """The offset of length 1 along which a function with gradient g rises fastest."""
        g = g.nan_to_num()  # of a backward solve that failed
        if self.norm == "linf":
            return g.sign()
        g = g / magnitude(g)  # squares of a saturated loss's slopes would underflow
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
    """Projected gradient ascent from random points of the threat's ball, cut to the box.

    `model` maps x (batch, ...), in the units of the radius, to logits, and is in `eval()`. Restarts maximise the
    cross-entropy and the margin in turn, since the margin has a slope where the cross-entropy is saturated, and leave
    out the samples already fooled. The same seed gives the same attack. The gradient of equilibrium layers is the exact
    one, whatever they were trained with, unless `gradient` is given.
    """
    if model.training:
        raise ValueError("The model is in training mode, where batch norms mix the samples: call `model.eval()` first.")
    noise = torch.Generator().manual_seed(threat.seed)
    x = x.detach()
    losses: tuple[float, ...] = ()
    with torch.no_grad():
        best, margin = x.clone(), margins(model(x), labels)
    with solving(model, gradient=gradient, exact=gradient is None), freeze(model):
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
    """One restart, from x + offset: steps along the gradient of the objective, each projected back into the ball."""
    at = threat.project(x, offset, box)
    best = Adversarial(at, at.new_full((len(at),), -torch.inf))
    losses: list[Tensor] = []
    for step in range(threat.steps + 1):
        with torch.set_grad_enabled(step < threat.steps):
            at = at.detach().requires_grad_(step < threat.steps)
            logits = model(at)
        best = best.or_better(at.detach(), margins(logits.detach(), labels))
        losses.append(_cross_entropies(logits.detach(), labels).mean())
        if step < threat.steps:
            (g,) = torch.autograd.grad(objective(logits, labels).sum(), at)
            move = STRIDE * threat.radius / threat.steps * threat.steepest(g)
            at = threat.project(x, at.detach() - x + move, box)
    return dataclasses.replace(best, losses=tuple(torch.stack(losses).tolist()))


def margins(logits: Tensor, labels: Tensor) -> Tensor:
    """The largest other logit minus that of the label, (batch,); ∞ where logits are NaN."""
    own = logits.gather(1, labels[:, None])
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return (others.amax(1) - own[:, 0]).nan_to_num(torch.inf, torch.inf, -torch.inf)


@contextlib.contextmanager
def freeze(model: nn.Module) -> Iterator[None]:
    """Inside, parameters need no gradient, which halves the cost of the gradient of inputs."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


def in_batches(batch: int, x: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pictures and labels, `batch` of them at a time."""
    return zip(torch.split(x, batch), torch.split(labels, batch), strict=True)


def attack_all(
    threat: Threat, model: nn.Module, x: Tensor, labels: Tensor, batch: int, gradient: AbstractGradient | None = None
) -> tuple[Tensor, list[float]]:
    """Attack `batch` pictures at a time: the attacked ones, and the mean loss before each step and after the last."""
    attacked, losses = [], torch.zeros(threat.steps + 1)
    for number, (some, theirs) in enumerate(in_batches(batch, x, labels)):
        found = pgd(model, some, theirs, dataclasses.replace(threat, seed=threat.seed + number), gradient=gradient)
        attacked.append(found.x)
        losses += len(some) * torch.tensor(found.losses)
    return torch.cat(attacked), (losses / len(x)).tolist()


def attack_unrolled(threat: Threat, model: nn.Module, x: Tensor, labels: Tensor, batch: int) -> Tensor:
    """The pictures attacked with the gradient of the unrolled iterations.

    Where GPU memory runs out, it tries again with half as many at once, and so on.
    """
    try:
        return attack_all(threat, model, x, labels, batch, Unrolled(UNROLLED))[0]
    except torch.OutOfMemoryError:
        if batch == 1:
            raise
    return attack_unrolled(threat, model, x, labels, batch // 2)


@torch.no_grad()
def try_random_points(threat: Threat, model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """For each picture, of as many random points of the ball as the attack has steps, that with the largest margin."""
    noise = torch.Generator().manual_seed(threat.seed)
    best = Adversarial(x, x.new_full((len(x),), -torch.inf))
    for _ in range(threat.steps):
        at = threat.project(x, threat.random_offset(x, noise), (0.0, 1.0))
        best = best.or_better(at, margins(model(at), labels))
    return best.x


@final
@dataclasses.dataclass(frozen=True)
class ThreatResult:
    """The accuracy under one threat, and under the tests for a masked gradient, which use the first pictures only."""

    threat: Threat
    accuracy: float  # share of all pictures whose class the attack did not change
    losses: list[float]  # mean cross-entropy along the steps
    random: float  # accuracy on the tested pictures at the worst of the random points
    tested: float  # accuracy on the tested pictures under the attack itself
    radii: list[tuple[float, float]]  # radius and accuracy, one restart each
    unrolled: float | None  # accuracy under the gradient of the unrolled iterations

    def concerns(self) -> list[str]:
        """Signs of a masked gradient, in words; empty where the accuracy can be trusted."""
        accuracies = [accuracy for _, accuracy in self.radii]
        signs = {
            "the loss does not rise along the steps": not self.losses[-1] > self.losses[0],
            "random points do better": self.random < self.tested - SLACK,
            "a larger ball leaves more": any(b > a + SLACK for a, b in itertools.pairwise(accuracies)),
            f"a ball {FACTORS[-1]:g} times as large leaves {accuracies[-1]:.1%}": accuracies[-1] > 0.1,
            "the unrolled gradient does better": self.unrolled is not None and self.unrolled < self.tested - SLACK,
        }
        return [words for words, seen in signs.items() if seen]


@final
@dataclasses.dataclass(frozen=True)
class AttackResult:
    """Accuracy of a trained run on clean and on adversarial test pictures, in float32."""

    images: int
    tested: int  # pictures used in the tests for a masked gradient
    clean: float
    threats: list[ThreatResult]
    concerns: list[str]  # signs of a masked gradient under any of the threats

    def summary(self) -> list[tuple[str, str]]:
        lines = [("clean accuracy", f"{self.clean:.2%} of {self.images} pictures")]
        for found in self.threats:
            t = found.threat
            lines.append((f"{t.norm} {t.radius * 255:g}/255, PGD-{t.steps} × {t.restarts}", f"{found.accuracy:.2%}"))
        return [*lines, ("signs of a masked gradient", "; ".join(self.concerns) or "none")]


def measure_attack(trained: TrainedRun, *, images: int = IMAGES, threats: Sequence[Threat] = THREATS) -> AttackResult:
    """Attack a random choice of test pictures."""
    chosen = trained.test.sample(images)
    model, batches = InPixels(trained.model, chosen.mean, chosen.std).eval(), trained.batches(chosen)
    x, labels = (torch.cat(parts) for parts in zip(*batches.epoch(0), strict=True))
    x, batch = model.pixels(x), trained.config.training.batch_size
    found = [attack(model, x, labels, threat, batch, trained.track) for threat in threats]
    concerns = [f"{result.threat.norm}: {words}" for result in found for words in result.concerns()]
    return AttackResult(len(x), min(TESTED, len(x)), accuracy(model, x, labels, batch), found, concerns)


def attack(
    model: nn.Module, x: Tensor, labels: Tensor, threat: Threat, batch: int, track: Track = lambda items, *_: items
) -> ThreatResult:
    """The accuracy of a model of pictures in [0, 1] under a threat, and the tests for a masked gradient."""
    some, theirs = x[:TESTED], labels[:TESTED]
    balls = [(threat, x, labels)]
    balls += [(dataclasses.replace(threat, radius=f * threat.radius, restarts=1), some, theirs) for f in FACTORS]
    tracked = track(balls, f"attack, {threat.norm}", len(balls))
    (attacked, losses), *wider = [attack_all(ball, model, inside, own, batch) for ball, inside, own in tracked]
    shares = [accuracy(model, found, theirs, batch) for found in (some, *(found for found, _ in wider))]
    radii = list(zip((0.0, *(ball.radius for ball, *_ in balls[1:])), shares, strict=True))
    unrolled = None
    if layers_of(model):
        together = min(batch, TOGETHER if x.device.type == "cpu" else TESTED)
        unrolled = accuracy(model, attack_unrolled(threat, model, some, theirs, together), theirs, batch)
    return ThreatResult(
        threat=threat,
        accuracy=accuracy(model, attacked, labels, batch),
        losses=losses,
        random=accuracy(model, try_random_points(threat, model, some, theirs), theirs, batch),
        tested=accuracy(model, attacked[:TESTED], theirs, batch),
        radii=radii,
        unrolled=unrolled,
    )


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, labels: Tensor, batch: int) -> float:
    """The share of the pictures whose class the model predicts."""
    right = torch.stack(
        [(margins(model(some), theirs) <= 0).sum() for some, theirs in in_batches(batch, x, labels)]
    ).sum()
    return int(right) / len(x)
