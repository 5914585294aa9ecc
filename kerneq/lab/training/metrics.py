"""Every number a run measures, in one table: its name, how it is accumulated, how it is written, where it is shown.

The table is `METRICS`; a new metric is one more entry. metrics.jsonl, evaluation.json, the terminal, TensorBoard,
`kerneq evaluate`, the report and the demo read it. Scores are plain dictionaries from names to numbers, as JSON has
them; a number that was not measured is None, or absent where an earlier version wrote the file.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Literal, final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ...solution import Solution
from ...tensors import map_tensors, take_samples
from ..data import Batches
from .process import Process

Scores = Mapping[str, float | None]
Over = Literal["images", "solves", "adjoints"]  # adjoints: the backward solves, which only training has


@final
@dataclasses.dataclass(frozen=True)
class BatchOutput:
    """What a metric is computed from: one batch after its forward pass, all on the device."""

    loss: Tensor  # () mean over the samples
    logits: Tensor  # (samples, classes)
    labels: Tensor  # (samples)
    solutions: tuple[Solution, ...]  # one for each equilibrium layer, every one of all samples

    @property
    def adjoints(self) -> tuple[Tensor, ...]:
        """Which samples have converged on the way back, for each layer through which one led."""
        return tuple(solution.backward[-1].converged for solution in self.solutions if solution.backward)


@final
@dataclasses.dataclass(frozen=True)
class Metric:
    """A number that is a mean over images, over solves (every sample of every equilibrium layer), or over adjoints.

    `total` gives its sum over a batch as a tensor () on the device; it may not wait for the device. Metrics over
    images are shown for training and held-out images, those over solves once, and only for models that solve.
    """

    name: str  # its key in metrics.jsonl, evaluation.json and TensorBoard
    title: str  # its heading in a table
    format: str  # of its value
    over: Over
    total: Callable[[BatchOutput], Tensor]
    phrase: str = "{name} {value}"  # how the terminal says it
    caption: str = ""  # of its curve in the report, which has none without a caption
    drawn: Literal["train", "validation"] = "validation"  # the images of that curve
    log: bool = False  # whether the axis of that curve is logarithmic
    demo: bool = False  # whether the demo's table, which has room for a few, shows it

    def text(self, scores: Scores) -> str:
        """Its value in a cell of a table; a dash where it was not measured."""
        value = scores.get(self.name)
        return self.format.format(value) if value is not None else "–"

    @property
    def heading(self) -> str:
        """The heading of its column in a table of results on test images."""
        return f"test {self.title}" if self.over == "images" else self.title


def over_solves(number: Callable[[Solution], Tensor]) -> Callable[[BatchOutput], Tensor]:
    """The sum of a per-sample number (samples) over all samples of all solves of a batch."""
    return lambda batch: torch.stack([number(solution).sum() for solution in batch.solutions]).sum()


METRICS: tuple[Metric, ...] = (
    Metric(
        name="loss",
        title="loss",
        format="{:.4f}",
        over="images",
        total=lambda batch: batch.loss * len(batch.labels),
        caption="Training loss",
        drawn="train",
    ),
    Metric(
        name="accuracy",
        title="accuracy",
        format="{:.2%}",
        over="images",
        total=lambda batch: (batch.logits.argmax(1) == batch.labels).sum(),
        phrase="{value}",
        caption="Accuracy on held-out images",
        demo=True,
    ),
    Metric(
        name="steps",
        title="solver steps",
        format="{:.1f}",
        over="solves",
        total=over_solves(lambda solution: solution.steps),
        phrase="{value} {name}",
        caption="Solver steps, mean over samples and branches",
        demo=True,
    ),
    Metric(
        name="residual",
        title="residual",
        format="{:.1e}",
        over="solves",
        total=over_solves(lambda solution: solution.residual),
        caption="Relative residual at the end of a solve",
        log=True,
        demo=True,
    ),
    Metric(
        name="unconverged",
        title="solves not converged",
        format="{:.1%}",
        over="solves",
        total=over_solves(lambda solution: ~solution.converged),
        phrase="{value} above tol",
    ),
    Metric(
        name="backward_unconverged",
        title="backward solves not converged",
        format="{:.1%}",
        over="adjoints",
        total=lambda batch: torch.stack([(~found).sum() for found in batch.adjoints]).sum(),
        phrase="{value} backward",
    ),
)


def describe_chance(hits: int, images: int, counts: Sequence[int]) -> str:
    """What to add to an accuracy that may be chance, as it is not above the largest class's share (p ≥ 0.05); else "".

    `counts` are the images of each class, of these or of the training.
    """
    from scipy.special import bdtrc  # slow to import, and only the end of a run asks

    chance = max(counts, default=0) / max(sum(counts), 1)
    p = float(bdtrc(hits - 1, images, chance))  # the probability of at least so many hits
    if not counts or p < 0.05:
        return ""
    return f"not distinguishable from chance, which is {chance:.0%} for the largest class (p = {p:.2f})"


def format_scores(scores: Scores, over: Over) -> list[str]:
    """The measured metrics over one of these, each as a few words: "loss 0.1234"."""
    shown = [metric for metric in METRICS if metric.over == over and scores.get(metric.name) is not None]
    return [metric.phrase.format(name=metric.name, value=metric.text(scores)) for metric in shown]


@final
class Accumulator:
    """Sums of images, solves, adjoints and every metric in one float64 tensor on the device: no step waits for it."""

    def __init__(self, device: torch.device):
        self.entries = ("images", "solves", "adjoints", *(metric.name for metric in METRICS))
        self.sums = torch.zeros(len(self.entries), dtype=torch.float64, device=device)
        self.missing: frozenset[str] = frozenset()  # metrics that a part of these sums does not have

    @torch.no_grad()
    def add(self, loss: Tensor, logits: Tensor, target: Tensor, solutions: Mapping[str, Solution]) -> None:
        """Count a batch; `target` holds labels (samples) or probabilities (samples, classes)."""
        labels = target if target.dim() == 1 else target.argmax(1)
        batch = BatchOutput(loss, logits, labels, tuple(solutions.values()))
        images = labels.new_full((), len(labels))
        layers: dict[Over, int] = {"images": 1, "solves": len(solutions), "adjoints": len(batch.adjoints)}
        totals = [images * count for count in layers.values()]
        for metric in METRICS:
            totals.append(metric.total(batch) if layers[metric.over] else torch.zeros_like(images))
        self.sums += torch.stack([total.to(self.sums) for total in totals])

    def reset(self) -> None:
        """Begin again at zero."""
        self.sums.zero_()
        self.missing = frozenset()

    def restore(self, sums: Tensor, entries: Sequence[str]) -> None:
        """Go on from saved sums; a metric they do not have stays unmeasured until the next `reset`."""
        saved = dict(zip(entries, sums.tolist(), strict=True))
        self.sums.copy_(torch.tensor([saved.get(name, 0.0) for name in self.entries], dtype=torch.float64))
        self.missing = frozenset(self.entries) - saved.keys()

    def read(self, sums: Tensor) -> dict[str, float | None]:
        """The means, by name, of `sums`: its own, or those of all processes; waits for the device."""
        values = dict(zip(self.entries, sums.tolist(), strict=True))
        scores: dict[str, float | None] = {"images": int(values["images"])}
        for metric in METRICS:
            count = values[metric.over]
            measured = count > 0 and metric.name not in self.missing
            scores[metric.name] = values[metric.name] / count if measured else None
        return scores


@torch.no_grad()
def validate(model: nn.Module, batches: Batches, process: Process, amp: bool) -> dict[str, float | None]:
    """The scores of a model in eval mode over batches of all processes; the loss is without label smoothing.

    On a GPU a last, smaller batch is filled up with its own pictures, which do not count: so all have one shape, for
    which algorithms are chosen and graphs captured once.
    """
    accumulator = Accumulator(process.device)
    training = model.training
    model.eval()
    whole = 0
    for x, target in batches.epoch(0):
        count = len(x)
        if count == 0:  # the last batch may have no image for this process
            continue
        whole = max(whole, count)
        if x.is_cuda and count < whole:
            x = take_samples(x, torch.arange(whole, device=x.device) % count)
        with process.autocast(amp):
            logits, solutions = model(x, solutions=True)
        logits, solutions = map_tensors(itemgetter(slice(count)), (logits, solutions))
        accumulator.add(cross_entropy(logits.float(), target), logits, target, solutions)
    model.train(training)
    return accumulator.read(process.total(accumulator.sums))
