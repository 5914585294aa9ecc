"""Inpainting, the paper's example of a declarative network: a kernel GLM per picture, and F_γ behind it.

X are the pixels around a hole, X̃ those in it. Kernel ridge regression predicts the hole from each picture alone; what
pictures have in common is learnt around it: by F_γ (problem 6), by the kernel too, or by all weights (problem 3).
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch
from common import Experiment, Figures, Job, Record, Result, main, subplots
from pictures import center_crop, load_pixels
from torch import Tensor, nn
from torch.nn import functional as F

from kerneq.gradients import Implicit
from kerneq.kglm import DeclarativeNode, Gaussian, SquaredExponential, initialise, pixels
from kerneq.kglm.declarative import dual
from kerneq.kglm.newton import newton
from kerneq.settings import ConfigError, setting
from kerneq.solvers import Newton
from kerneq.tensors import map_tensors

NAMES = {
    "mean": "mean of the rest",
    "kglm": "kernel GLM",
    "ddn": "F_γ ∘ kernel GLM (6)",
    "kernel": "(6), kernel learnt",
    "deq": "(3) from the kernel",
    "random": "(3) from random weights",
}


@dataclasses.dataclass(frozen=True)
class Inpaint:
    """The paper describes the example and gives no numbers: all values are ours."""

    source: Literal["digits", "mnist", "cifar10"] = setting("digits", "of the pictures")
    train: int = setting(1200, "training pictures", low=1)
    test: int = setting(297, "test pictures", low=1)
    size: int = setting(0, "the central square of this side; 0: whole pictures", low=0)
    hole: int = setting(4, "side of the hole in pixels", low=1)
    moving: bool = setting(False, "a hole at another place in every picture: weights of their own (Corollary 5)")
    lengthscale: float = setting(2.0, "of the squared exponential, in pixels", above=0)
    variance: float = setting(1.0, "of the squared exponential", above=0)
    lam: float = setting(0.05, "λ", above=0)
    hidden: int = setting(64, "width of F_γ", low=1)
    epochs: int = setting(30, "over the training pictures", low=1)
    batch: int = setting(64, "pictures", low=1)
    lr: float = setting(3e-3, "of Adam; falls to zero along a cosine", above=0)
    free: bool = setting(True, "also train all weights of the equilibrium, problem (3)")
    compare: int = setting(8, "test pictures on which (6) and (9) are compared", low=1)
    seed: int = setting(0, "of F_γ, batches and holes", low=0)
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")


@dataclasses.dataclass(frozen=True)
class Quartets:
    """(X, Y, X̃, Ỹ) of each picture; coordinates (row, column, channel), shared or each picture's own."""

    X: Tensor  # (n, 3) or (count, n, 3)
    Y: Tensor  # (count, n)
    X2: Tensor  # (m, 3) or (count, m, 3)
    Y2: Tensor  # (count, m)
    inside: Tensor  # (count, n + m), whether a pixel lies in the hole

    def rows(self, index: Tensor) -> "Quartets":
        own = self.X.ndim == 3
        X, X2 = (self.X[index], self.X2[index]) if own else (self.X, self.X2)
        return Quartets(X, self.Y[index], X2, self.Y2[index], self.inside[index])

    def filled(self, values: Tensor) -> Tensor:
        """The pictures (count, n + m) with `values` (count, m) in their holes."""
        whole = self.Y.new_zeros(self.inside.shape)
        whole[~self.inside] = self.Y.flatten()
        whole[self.inside] = values.flatten()
        return whole


def quartets(images: Tensor, hole: int, moving: bool, seed: int) -> Quartets:
    """Pictures (count, c, h, w) as bytes, cut into the hole and the rest; float64 in [0, 1]."""
    count, channels, height, width = images.shape
    if hole >= min(height, width):
        raise ConfigError(f"A hole of side {hole} leaves nothing of pictures of {height} × {width} pixels.")
    top, left = (torch.full((count,), (side - hole) // 2) for side in (height, width))
    if moving:
        g = torch.Generator().manual_seed(seed)
        top, left = (torch.randint(0, side - hole + 1, (count,), generator=g) for side in (height, width))
    at = pixels(height, width, channels)
    row, column = at[:, 0] - top[:, None], at[:, 1] - left[:, None]
    inside = (row >= 0) & (row < hole) & (column >= 0) & (column < hole)
    values = images.flatten(1).double() / 255
    m = channels * hole * hole
    X, X2 = (at.expand(count, -1, -1)[mask].view(count, -1, 3) for mask in (~inside, inside))
    if not moving:
        X, X2 = X[0], X2[0]
    return Quartets(X, values[~inside].view(count, -1), X2, values[inside].view(count, m), inside)


class Smooth(nn.Module):
    """k = v exp(−½Σ(xᵢ − x2ᵢ)²/ℓᵢ²) + c: a smooth picture of unknown brightness; ℓ, v and c are trainable."""

    def __init__(self, lengthscale: float, variance: float) -> None:
        super().__init__()
        lengths = torch.tensor([lengthscale, lengthscale, 2.0], dtype=torch.float64)  # 2: between channels
        self.log_lengths = nn.Parameter(lengths.log())
        self.log_variances = nn.Parameter(torch.tensor([variance, 10.0], dtype=torch.float64).log())  # v, c

    def forward(self, X: Tensor, X2: Tensor) -> Tensor:
        lengths, (variance, level) = self.log_lengths.exp(), self.log_variances.exp()
        return variance * SquaredExponential()(X / lengths, X2 / lengths) + level


class Head(nn.Module):
    """F_γ(f) = f + a perceptron of f that starts at zero: before training the network is the kernel GLM."""

    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(size, hidden), nn.Linear(hidden, size)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, f: Tensor) -> Tensor:
        return f + self.outer(F.relu(self.inner(f)))


def descend(
    predict: Callable[[Quartets], Tensor], parameters: Iterable[nn.Parameter], data: Quartets, settings: Inpaint
) -> None:
    """Minimise the objective of (6) over the parameters with Adam."""
    optimiser = torch.optim.Adam(parameters, lr=settings.lr)
    g = torch.Generator().manual_seed(settings.seed)
    steps = settings.epochs * -(-len(data.Y) // settings.batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(settings.epochs):
        for index in torch.randperm(len(data.Y), generator=g).to(data.Y.device).split(settings.batch):
            part = data.rows(index)
            optimiser.zero_grad()
            F.mse_loss(predict(part), part.Y2).backward()
            optimiser.step()
            schedule.step()


def run(settings: Inpaint, job: Job) -> Result:
    """Train each model; the error of the test pictures' holes, and how far (6) and (9) are apart."""
    device = job.device
    train, test = (_data(settings, split, device) for split in ("train", "test"))
    outputs = {"mean": test.Y.mean(-1, keepdim=True).expand_as(test.Y2)}
    node = _node(settings, device)
    gaps = _agreement(settings, node, test.rows(torch.arange(min(settings.compare, len(test.Y)), device=device)))
    with torch.no_grad():  # γ is behind the node: what comes out of it stays as it is
        seen, outputs["kglm"] = (_chunks(node, part, settings.batch) for part in (train, test))
    job.report(0.2, f"kernel GLM alone: {_error(outputs['kglm'], test):.5f}")

    head = _head(settings, test, device)
    descend(lambda part: head(part.Y), head.parameters(), dataclasses.replace(train, Y=seen), settings)
    outputs["ddn"] = head(outputs["kglm"]).detach()
    job.report(0.4, f"F_γ trained: {_error(outputs['ddn'], test):.5f}")

    learnt, head = _node(settings, device), _head(settings, test, device)
    parameters = [*learnt.parameters(), *head.parameters()]
    descend(lambda part: head(learnt(part.X, part.Y, part.X2)), parameters, train, settings)
    outputs["kernel"] = head(_chunks(learnt, test, settings.batch)).detach()
    job.report(0.6, f"kernel trained: {_error(outputs['kernel'], test):.5f}")

    if settings.free and not settings.moving:  # (3) has one set of weights, so one set of coordinates
        for name, start in (("deq", None), ("random", "random")):
            outputs[name] = _free(settings, node, start, train, test)
            job.report(0.8, f"all weights trained, {NAMES[name]}: {_error(outputs[name], test):.5f}")
    kernel = learnt.trained[0]
    assert isinstance(kernel, Smooth)
    shown = {name: test.filled(values)[:6].tolist() for name, values in {"target": test.Y2, **outputs}.items()}
    return {
        "errors": {name: _error(values, test) for name, values in outputs.items()},
        **gaps,
        "lengths": kernel.log_lengths.exp().tolist(),
        "variances": kernel.log_variances.exp().tolist(),
        "pixels": {"around": test.Y.shape[1], "hole": test.Y2.shape[1]},
        "inside": test.inside[:6].tolist(),
        "pictures": shown,
    }


def _data(settings: Inpaint, split: Literal["train", "test"], device: torch.device) -> Quartets:
    images = load_pixels(settings.source, split, settings.train if split == "train" else settings.test)
    images = center_crop(images, settings.size)
    data = quartets(images, settings.hole, settings.moving, settings.seed + (split == "test"))
    return map_tensors(lambda t: t.to(device), data)


def _node(settings: Inpaint, device: torch.device) -> DeclarativeNode:
    kernel = Smooth(settings.lengthscale, settings.variance)
    return DeclarativeNode(kernel, Gaussian(), lam=settings.lam).to(device)


def _head(settings: Inpaint, data: Quartets, device: torch.device) -> Head:
    torch.manual_seed(settings.seed)
    return Head(data.Y2.shape[1], settings.hidden).to(device).double()


@torch.no_grad()
def _chunks(node: DeclarativeNode, data: Quartets, size: int) -> Tensor:
    """The node's output for all pictures, some at a time."""
    parts = torch.arange(len(data.Y), device=data.Y.device).split(size)
    return torch.cat([node(part.X, part.Y, part.X2) for part in map(data.rows, parts)])


@torch.no_grad()
def _agreement(settings: Inpaint, node: DeclarativeNode, data: Quartets) -> Result:
    """On a few pictures: the largest difference of (6) and (9), and of the objective from its dual."""
    other = DeclarativeNode(node.trained[0], Gaussian(), lam=settings.lam, constraint="equilibrium")
    minimum, equilibrium = node(data.X, data.Y, data.X2), other(data.X, data.Y, data.X2)
    problem = node.glm.pose(data.X, data.Y)
    fit = newton(problem)
    gap = problem.objective(fit.coefficients, fit.eta) - dual(problem, fit.eta)
    return {"difference": (minimum - equilibrium).abs().max().item(), "duality_gap": gap.abs().max().item()}


def _free(settings: Inpaint, node: DeclarativeNode, start: str | None, train: Quartets, test: Quartets) -> Tensor:
    """Problem (3): W₁, W₂, V₁, V₂, biases and γ trained, from the kernel's weights or from random ones."""
    layer = node.layer(train.X, train.X2)
    # small enough for direct solves, which need no contraction: the weights may go anywhere
    layer.layer.solver, layer.layer.gradient, layer.layer.tol = Newton(), Implicit(Newton()), 1e-8
    if start is not None:
        initialise(layer, start, generator=torch.Generator().manual_seed(settings.seed))
    head = _head(settings, train, train.Y.device)
    descend(lambda part: head(layer(part.Y)), [*layer.parameters(), *head.parameters()], train, settings)
    with torch.no_grad():
        prediction: Tensor = head(layer(test.Y))
    return prediction


def _error(values: Tensor, data: Quartets) -> float:
    return F.mse_loss(values, data.Y2).item()


def draw(records: Sequence[Record[Inpaint]]) -> Figures:
    """Test pictures, a column each: the target, the input, and what each model puts into the hole."""
    settings, result = records[0].settings, records[0].result
    inside = torch.tensor(result["inside"])
    rows = {"target": "target", "input": "input", **{name: NAMES[name] for name in result["errors"]}}
    figure, axes = subplots(len(rows), len(inside), width=8.2, height=0.95 * len(rows) + 0.4)
    side = int((inside.shape[1] // (3 if settings.source == "cifar10" else 1)) ** 0.5)
    for row, (name, words) in zip(axes, rows.items(), strict=True):
        images = torch.tensor(result["pictures"]["target" if name == "input" else name])
        for axis, image, hole in zip(row, images, inside, strict=True):
            colours = image.clamp(0, 1).view(-1, side, side).expand(3, -1, -1).clone()
            if name == "input":
                yellow = torch.tensor([0.94, 0.89, 0.26])  # as in the paper's Figure 1
                colours = torch.where(hole.view(-1, side, side)[:1], yellow[:, None, None], colours)
            axis.imshow(colours.permute(1, 2, 0).numpy(), interpolation="nearest", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
        error = f"\nMSE {result['errors'][name]:.4f}" if name in result["errors"] else ""
        row[0].set_ylabel(words + error, rotation=0, ha="right", va="center", fontsize=8)
    figure.suptitle(
        f"{settings.source}, test pictures: pixels in [0, 1], predictions clipped to it for drawing only", fontsize=9
    )
    return {"pictures": figure}


def summarise(settings: Inpaint, result: Result) -> list[str]:
    """The errors, and whether the two problems agree."""
    lines = [f"{NAMES[name]:>24}: {error:.5f}" for name, error in result["errors"].items()]
    lines.append(
        f"(6) and (9) differ by {result['difference']:.1e} at most; J and its dual by {result['duality_gap']:.1e}."
    )
    lengths, variances = ([f"{v:.3g}" for v in result[key]] for key in ("lengths", "variances"))
    lines.append(f"learnt lengths (row, column, channel) {', '.join(lengths)}; variance, level {', '.join(variances)}")
    return lines


def label(settings: Inpaint) -> str:
    """inpaint-SOURCE, and whether holes move."""
    return f"inpaint-{settings.source}" + "-moving" * settings.moving


EXPERIMENT = Experiment("inpaint", Inpaint, run, draw, summarise, label)

if __name__ == "__main__":
    main(EXPERIMENT)
