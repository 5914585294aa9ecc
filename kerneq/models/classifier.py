"""stem → branches of equilibrium layers at several scales → fusion → head: GEQ, KerDEQ, OptEq and MOptEq.

Also the smallest classifier, one dense equilibrium between the pixels and a linear head. `lipschitz.py` has the
1-Lipschitz counterpart, made of the same branches.
"""

import abc
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn

from ..cells import AbstractCell, ConvCell, DenseCell, Output
from ..equilibrium import Equilibrium, layers_of
from ..fused.device import run_on_streams
from ..gradients import AbstractGradient, Implicit
from ..kernels import AbstractKernel, AbstractRadialKernel, Adaptive, Gaussian
from ..kernels.radial import PatchParameters
from ..settings import setting
from ..solution import Solution
from ..solvers import AbstractSolver, Anderson, InFeatures, Proximal
from .layers import BatchNorm, Refinement, conv_batch_norm, pool, pyramid, unpool

Stem = Literal["cifar", "deep", "paper", "imagenet", "folded", "plain"]
STEMS: dict[Stem, tuple[tuple[int, int], ...]] = {  # of each convolution: by what it divides the width, its stride
    "cifar": ((4, 1), (2, 1), (1, 1)),
    "deep": ((4, 1), (4, 1), (2, 1), (2, 1), (1, 1)),
    "paper": ((1, 1), (1, 1)),
    "imagenet": ((1, 1), (1, 1), (1, 2), (1, 2)),
    "folded": ((4, 1), (4, 1), (2, 2), (2, 1), (1, 2), (1, 1)),
    "plain": ((1, 1),),
}
EXPLICIT = "none: explicit"  # the equation of a model without one
# While training, a backward solve that stops at its step limit is a choice, not an accident.
_IMPLICIT = Implicit(InFeatures(Anderson(memory=3)), tol=1e-3, max_steps=20, on_failure="return")


@dataclasses.dataclass(frozen=True)
class AbstractSolveConfig:
    """How every equilibrium layer of a model is solved and differentiated."""

    solver: AbstractSolver[Any] = setting(Proximal(), "how z = f(z) is solved")
    gradient: AbstractGradient = setting(_IMPLICIT, "how the solution is differentiated")
    tol: float = setting(1e-3, "relative residual at which a sample has converged", above=0, high=0.99)
    max_steps: int = setting(30, "evaluations of f in a solve, at most", low=1)
    check_every: int = setting(0, "steps between two residual checks, 0: left to the solve", low=0)

    def make_layer(self, cell: AbstractCell) -> Equilibrium:
        """Return the cell as a layer; an implicit gradient without a `check_every` of its own gets this one."""
        check_every = self.check_every or None
        gradient = self.gradient
        if isinstance(gradient, Implicit) and gradient.check_every is None:
            gradient = dataclasses.replace(gradient, check_every=check_every)
        return Equilibrium(
            cell, solver=self.solver, gradient=gradient, tol=self.tol, max_steps=self.max_steps, check_every=check_every
        )


class AbstractModel(nn.Module, abc.ABC):
    """Pictures x (batch, channels, height, width) ↦ logits (batch, classes). To write one: `classify`.

    `model(x, solutions=True)` also gives the `Solution` of every equilibrium layer, by name. The sides of a picture are
    multiples of `multiple`, or exactly `side`. A model of several layers says in `part` what each of them is called.
    """

    part: ClassVar[str] = ""

    def __init__(self, channels: int, multiple: int = 1, side: int | None = None):
        super().__init__()
        self.channels, self.multiple, self.side = channels, multiple, side
        # What `kerneq.load` knows of the pictures that the weights were trained on.
        self.classes: tuple[str, ...] = ()
        self.mean: tuple[float, ...] = ()
        self.std: tuple[float, ...] = ()
        self.size: int | None = None

    @abc.abstractmethod
    def classify(self, x: Tensor) -> tuple[Tensor, dict[str, Solution]]:
        """Return the logits and the solutions by name, for pictures whose shape has been checked."""

    def forward(self, x: Tensor, solutions: bool = False) -> Tensor | tuple[Tensor, dict[str, Solution]]:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"The pictures must be a floating-point tensor, got {got}: scale the pixels first.")
        self.check_shape(x.shape)
        if self.size not in (None, x.shape[2]) and not torch.compiler.is_compiling():
            side, known = x.shape[2], self.size
            warnings.warn(
                f"These weights were trained on pictures of {known} × {known} and may be far worse at {side} × {side}: "
                "resize the pictures, or set `model.size = None`.",
                stacklevel=4,
            )
        logits, found = self.classify(x)
        return (logits, found) if solutions else logits

    def features(self, x: Tensor) -> Tensor:
        """Return what the linear head makes the logits of, (batch, features), with gradients."""
        seen: list[Tensor] = []
        hook = self.get_submodule("head").register_forward_pre_hook(lambda head, inputs: seen.append(inputs[0]))
        try:
            self(x)
        finally:
            hook.remove()
        return seen[0]

    def layers(self) -> list[Equilibrium]:
        """Return the equilibrium layers."""
        return layers_of(self)

    def diagnostics(self) -> dict[str, float]:
        """Return the numbers worth following over a training run, from the cells of the layers, by layer and name."""
        cells = enumerate(layer.cell.diagnostics() for layer in self.layers())
        before = self.part + "{}/" if self.part else ""
        return {before.format(index) + name: value for index, found in cells for name, value in found.items()}

    def compile_map(self) -> None:
        """Use torch.compile for the map of every layer, where a solve spends its time."""
        for layer in self.layers():
            layer.cell.compile_map()

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise, in one sentence, unless the shape is (batch, channels, height, width) with sides that fit."""
        wanted = f" and sides that are multiples of {self.multiple}" if self.multiple > 1 else ""
        fit = all(side > 0 and side % self.multiple == 0 for side in shape[2:])
        if self.side is not None:
            wanted, fit = f" and sides of {self.side}", all(side == self.side for side in shape[2:])
        if len(shape) != 4 or shape[1] != self.channels or not fit:
            wanted = f"pictures (batch, channels, height, width) with {self.channels} channels{wanted}"
            raise ValueError(f"The input must be {wanted}, got {tuple(shape)}.")


@final
@dataclasses.dataclass(frozen=True)
class ClassifierConfig(AbstractSolveConfig):
    """The settings of a `Classifier`; the defaults are those of GEQ-5M."""

    kernel: AbstractKernel = setting(Gaussian(Adaptive(0.2), patch=2, split=8, hidden=64), "similarity of a and v = Wz")
    width: int = setting(256, "channels of the stem and of every state z", low=1)
    features: tuple[int, ...] = setting((64, 128, 128, 128, 256, 256), "channels of v = Wz, a branch each", low=1)
    scales: tuple[int, ...] = setting((1, 2, 4, 4, 8, 8), "how often smaller than the stem's output a branch is", low=1)
    fusion: int = setting(4, "the scale at which the branches meet", low=1)
    join: Literal["mean", "concatenate"] = setting("mean", "how the branches are joined where they meet")
    stem: Stem = setting(
        "cifar",
        "3×3 convolutions. cifar: 3 → w/4 → w/2 → w; deep: 3 → w/4 → w/4 → w/2 → w/2 → w; paper: 3 → w → w; "
        "imagenet: the same, then two w → w of stride 2; folded: 3 → w/4 → w/4, w/2 → w/2, w → w, with stride 2 in "
        "between; plain: 3 → w",
    )
    refinements: int = setting(0, "residual blocks at each coarser scale; 0: none, averages alone", low=0, high=100)
    rectified: bool = setting(True, "whether a residual block gives relu(x + F(x)), or x + F(x)")
    explicit: bool = setting(False, "a control: in the place of each equilibrium a residual block of as many weights")
    norm: float = setting(1.0, "bound on ‖W‖‖W_h‖", above=0)
    activity: float = setting(0.5, "sᵢ = γ‖rᵢW_h‖² at initialisation, where γ is fixed", above=0)
    length: float | None = setting(None, "‖aᵢ‖² of a patch at initialisation, whatever γ; none: activity / γ", above=0)
    output: Output = setting("state", "what a branch gives: z, or v = Wz with the widths of z and v exchanged")
    overlap: bool = setting(True, "on a GPU, solve the branches side by side")
    lipschitz: bool = setting(False, "for certificates: a LipschitzClassifier, which has no batch norm")
    gain: float = setting(1.0, "factor of the logits of a lipschitz model: one over a temperature", above=0)

    def __post_init__(self) -> None:
        if self.lipschitz:
            self._check_lipschitz()
        if self.width < 4 and (self.refinements or any(divisor == 4 for divisor, _ in STEMS[self.stem])):
            raise ValueError(
                f"`width` must be at least 4: this stem, or a refinement, has a quarter, got {self.width}."
            )
        if len(self.features) != len(self.scales) or not self.features:
            got = f"{len(self.features)} and {len(self.scales)}"
            raise ValueError(f"`features` and `scales` need one entry a branch, got {got}.")
        if any(scale % self.fusion and self.fusion % scale for scale in self.scales):
            got = f"{list(self.scales)} and {self.fusion}"
            raise ValueError(f"Each of `scales` must divide `fusion` or be a multiple of it, got {got}.")

    def _check_lipschitz(self) -> None:
        """Raise, in one sentence, if a `LipschitzClassifier` cannot have these settings."""
        if not isinstance(self.kernel, AbstractRadialKernel):
            raise ValueError(f"`lipschitz` needs a radial kernel such as multiquadric, got {self.kernel!r}.")
        if self.join != "mean":
            raise ValueError(f"`lipschitz` needs `join` = mean, got {self.join}.")
        if self.explicit:
            raise ValueError("`lipschitz` needs `explicit` = false: a residual block has no bound.")
        if self.refinements:
            raise ValueError(f"`lipschitz` needs `refinements` = 0: they have batch norms, got {self.refinements}.")

    @property
    def equation(self) -> str:
        """The equation of the branches."""
        if self.explicit:
            return EXPLICIT
        return f"{self.kernel.equation}; output v = Wz" if self.output == "features" else self.kernel.equation

    @property
    def branches(self) -> Iterator[tuple[int, int]]:
        """The scale and the features of each branch."""
        return zip(self.scales, self.features, strict=True)

    @property
    def multiple(self) -> int:
        """The sides of a picture must be multiples of it, so that every branch ends in whole patches."""
        patch = self.kernel.patch if isinstance(self.kernel, AbstractRadialKernel) else 1
        stride = math.prod(stride for _, stride in STEMS[self.stem])
        return stride * math.lcm(self.fusion, *(scale * patch for scale in self.scales))


class AbstractBranchedModel(AbstractModel):
    """stem → its levels → an equilibrium branch each → joined at one scale → logits.

    To write one: make `stem`, `levels` and `branches`, and write `read_out`.
    """

    part = "branch"
    stem: nn.Sequential
    levels: "Levels"
    branches: nn.ModuleList

    def __init__(self, config: ClassifierConfig, channels: int):
        super().__init__(channels, multiple=config.multiple)
        self.config = config

    @abc.abstractmethod
    def read_out(self, values: list[Tensor]) -> Tensor:
        """Return the logits for the outputs of the branches, each (batch, width, height, width) at one scale."""

    def classify(self, x: Tensor) -> tuple[Tensor, dict[str, Solution]]:
        branches, levels = list(self.branches), self.levels(self.stem(x))
        if x.is_cuda and self.config.overlap and len(branches) > 1:
            results = run_on_streams(branches, levels)
        else:
            results = [branch(level) for branch, level in zip(branches, levels, strict=True)]
        logits = self.read_out([z for z, _ in results])
        return logits, {f"branch{index}": s for index, (_, s) in enumerate(results) if s is not None}


@final
class Classifier(AbstractBranchedModel):
    """Branches joined → batch norm, ReLU, mean over pixels, linear head.

    Before `torch.export.export(model, (x,), strict=False)`, call it once in `eval()` on an x of that size: the norm of
    W is measured there, and the program, which takes `max_steps` steps, holds it.
    """

    def __init__(self, config: ClassifierConfig, classes: int, channels: int = 3):
        if config.lipschitz:
            raise ValueError("Settings with `lipschitz` are those of a `LipschitzClassifier`.")
        super().__init__(config, channels)
        self.stem = make_stem(config, channels, functools.partial(conv_batch_norm, relu=True))
        self.levels = Levels(config)
        make = ExplicitBranch if config.explicit else Branch
        self.branches = nn.ModuleList(make(config, *branch) for branch in config.branches)
        joined = config.width * (len(config.scales) if config.join == "concatenate" else 1)
        self.norm = BatchNorm(joined, relu=True)
        self.head = nn.Linear(joined, classes)

    def read_out(self, values: list[Tensor]) -> Tensor:
        joined = torch.cat(values, 1) if self.config.join == "concatenate" else mean_of(values)
        logits: Tensor = self.head(self.norm(joined).mean((2, 3)))
        return logits


def mean_of(values: list[Tensor]) -> Tensor:
    """Return the mean of some tensors of one shape."""
    return sum(values[1:], values[0]) / len(values)


def make_stem(config: ClassifierConfig, channels: int, make_layer: Callable[..., nn.Sequential]) -> nn.Sequential:
    """Return pixels → `width` channels, by layers `make_layer(inputs, outputs, stride=…)`.

    One convolution alone is markedly worse on CIFAR-10.
    """
    layers = []
    for divisor, stride in STEMS[config.stem]:
        layers.append(make_layer(channels, config.width // divisor, stride=stride))
        channels = config.width // divisor
    return nn.Sequential(*layers)


@final
class Levels(nn.Module):
    """The stem's output at the scale of every branch: squares of pixels of a finer one averaged, then refined."""

    def __init__(self, config: ClassifierConfig):
        super().__init__()
        self.scales = config.scales
        coarser = sorted({*config.scales} - {1}) if config.refinements else []
        self.blocks = nn.ModuleDict()
        for scale in coarser:
            blocks = (Refinement(config.width, config.rectified) for _ in range(config.refinements))
            self.blocks[str(scale)] = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the levels in the order of the branches, each computed when it is needed: the branch of the finest
        scale starts before the coarser levels are computed."""
        levels = {1: x} if self.blocks else pyramid(x, self.scales)
        coarser = iter(self.blocks.items())
        for scale in self.scales:
            while scale not in levels:
                name, blocks = next(coarser)
                finer = max(level for level in levels if int(name) % level == 0)
                levels[int(name)] = blocks(pool(levels[finer], int(name) // finer))
            yield levels[scale]


def make_equilibrium(
    config: ClassifierConfig, features: int, make_inject: Callable[[int, int], nn.Sequential]
) -> Equilibrium:
    """Return the equilibrium layer of a branch, whose input becomes a by the layers `make_inject(inputs, outputs)`."""
    state = config.width
    if config.output == "features":
        state, features = features, state
    cell = ConvCell(
        config.kernel,
        inputs=config.width,
        state=state,
        features=features,
        norm=config.norm,
        inject=make_inject(config.width, state if config.kernel.in_state else features),
        output=config.output,
    )
    return config.make_layer(cell)


def change_scale(z: Tensor, scale: int, other: int) -> Tensor:
    """Return z, of one scale, at another."""
    return pool(z, other // scale) if scale < other else unpool(z, scale // other) if scale > other else z


@final
class Branch(nn.Module):
    """The stem's output at one scale → batch norm → equilibrium → the scale of the fusion → batch norm.

    Nothing is normalised inside the equation. A curved inner kernel enters a in a unit of its own, in which z comes
    back; the branch gives z in the units of a.
    """

    def __init__(self, config: ClassifierConfig, scale: int, features: int):
        super().__init__()
        self.scale, self.fusion = scale, config.fusion
        self.equilibrium = make_equilibrium(config, features, conv_batch_norm)
        set_scale(self.equilibrium.cell, config.activity, config.length)
        self.norm = BatchNorm(config.width)

    def forward(self, x: Tensor) -> tuple[Tensor, Solution]:
        solution: Solution = self.equilibrium(x)
        z = solution.value
        if (unit := self.unit(x)) != 1:
            z = z / unit  # or the ε of the batch norm would outweigh it
        return self.norm(change_scale(z, self.scale, self.fusion)), solution

    def unit(self, x: Tensor) -> float:
        """Return what a typical entry of a, and so of z, is multiplied by for pictures of this size."""
        cell = self.equilibrium.cell
        assert isinstance(cell, ConvCell)
        return cell.kernel.unit(cell.norm, cell.operator.weight.shape[1] * x.shape[2] * x.shape[3])


@final
class ExplicitBranch(nn.Module):
    """x + F(x) at the scale of the fusion, no equilibrium; F: 3×3 convolutions as large as U and Wᵀ, 0 at the start.

    What a model with these lacks beside one with equilibria is what the equation, and not its weights, is worth.
    """

    def __init__(self, config: ClassifierConfig, scale: int, features: int):
        super().__init__()
        self.scale, self.fusion = scale, config.fusion
        self.reduce = conv_batch_norm(config.width, features, relu=True)
        self.expand = conv_batch_norm(features, config.width)
        nn.init.zeros_(self.expand[-1].get_parameter("weight"))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return change_scale(x + self.expand(self.reduce(x)), self.scale, self.fusion), None


@final
@dataclasses.dataclass(frozen=True)
class DenseConfig(AbstractSolveConfig):
    """The settings of a `DenseClassifier`."""

    kernel: AbstractKernel = setting(Gaussian(0.5, split=16, hidden=64), "similarity of a and v = Wz")
    size: int = setting(8, "side of the pictures in pixels", low=1)
    width: int = setting(128, "numbers in the state z", low=1)
    features: int = setting(64, "numbers in v = Wz", low=1)
    norm: float = setting(1.0, "bound on ‖W‖‖W_h‖", above=0)

    @property
    def equation(self) -> str:
        """The equation of the layer."""
        return self.kernel.equation


KernelConfig = ClassifierConfig | DenseConfig


@final
class DenseClassifier(AbstractModel):
    """pixels → one dense equilibrium → batch norm → linear head, for pictures of one size."""

    def __init__(self, config: DenseConfig, classes: int, channels: int = 3):
        super().__init__(channels, side=config.size)
        self.config = config
        inputs = channels * config.size**2
        numbers = config.width if config.kernel.in_state else config.features
        inject = nn.Sequential(nn.Linear(inputs, numbers, bias=False), nn.BatchNorm1d(numbers))
        width, features = config.width, config.features
        cell = DenseCell(config.kernel, inputs=inputs, state=width, features=features, norm=config.norm, inject=inject)
        set_scale(cell, activity=0.5)
        self.equilibrium = config.make_layer(cell)
        self.norm = nn.BatchNorm1d(config.width)
        self.head = nn.Linear(config.width, classes)

    def classify(self, x: Tensor) -> tuple[Tensor, dict[str, Solution]]:
        solution = self.equilibrium(x.flatten(1))
        return self.head(self.norm(solution.value)), {"dense": solution}


def set_scale(cell: AbstractCell, activity: float, length: float | None = None) -> None:
    """Initialise the size of a = Ux + b, by the batch norm at the end of the cell's `inject`.

    With W_h an isometry and z = 0, sᵢ = γ‖rᵢW_h‖² is γ·n·scale² on average, for patches of n numbers. It starts at
    `activity`, so that γ cancels; with `length`, ‖aᵢ‖² starts at that for every γ, so that γ matters. Where γ follows
    the data (without `length`), or where there is no γ, the scale starts at 1.
    """
    assert isinstance(cell, ConvCell | DenseCell)
    kernel, patches = cell.kernel, cell.similarity
    if not isinstance(kernel, AbstractRadialKernel):
        return
    assert isinstance(patches, PatchParameters)
    size = patches.project.weight.shape[1]
    if length is not None:
        square = length / size
    elif isinstance(kernel.gamma, Adaptive):
        return
    else:
        square = activity / (kernel.gamma * size)
    assert isinstance(cell.inject, nn.Sequential)
    nn.init.constant_(cell.inject[-1].get_parameter("weight"), square**0.5)
