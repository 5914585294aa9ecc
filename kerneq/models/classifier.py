"""stem → branches of equilibrium layers at several scales → fusion → head: GEQ, KerDEQ, OptEq and MOptEq.

Also the smallest classifier, one dense equilibrium between the pixels and a linear head, and what all models share:
how an equilibrium layer is solved and differentiated, and what is said to an input that is no batch of pictures.
"""

import abc
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from ..cells import AbstractCell, ConvCell, DenseCell, Output
from ..equilibrium import Equilibrium, layers_of
from ..fused.device import run_on_streams
from ..fused.layers import BatchNorm, pool, pyramid, unpool
from ..gradients import AbstractGradient, Implicit
from ..kernels import AbstractKernel, AbstractRadialKernel, Adaptive, Gaussian
from ..kernels.radial import PatchParameters
from ..settings import setting
from ..solution import Solution
from ..solvers import AbstractSolver, Anderson, InFeatures, Proximal
from .lipschitz import AlmostOrthogonal, MaxMin, UnitRows

Stem = Literal["cifar", "deep", "paper", "imagenet", "folded", "plain"]
STEMS: dict[Stem, tuple[tuple[int, int], ...]] = {  # of each convolution: by what it divides the width, its stride
    "cifar": ((4, 1), (2, 1), (1, 1)),
    "deep": ((4, 1), (4, 1), (2, 1), (2, 1), (1, 1)),
    "paper": ((1, 1), (1, 1)),
    "imagenet": ((1, 1), (1, 1), (1, 2), (1, 2)),
    "folded": ((4, 1), (4, 1), (2, 2), (2, 1), (1, 2), (1, 1)),
    "plain": ((1, 1),),
}

# While training, a backward solve that stops at its step limit is a choice, not an accident.
_IMPLICIT = Implicit(InFeatures(Anderson(memory=3)), tol=1e-3, max_steps=20, on_failure="return")


@dataclasses.dataclass(frozen=True)
class AbstractSolveConfig:
    """How every equilibrium layer of a model is solved and differentiated."""

    solver: AbstractSolver[Any] = setting(Proximal(), "how z = f(z) is solved")
    gradient: AbstractGradient = setting(_IMPLICIT, "how the solution is differentiated")
    tol: float = setting(1e-3, "relative residual at which a sample has converged", above=0)
    max_steps: int = setting(30, "evaluations of f in a solve, at most", low=1)
    check_every: int = setting(0, "steps between two looks at the residual, 0: left to the solve", low=0)

    def make_layer(self, cell: AbstractCell) -> Equilibrium:
        """The cell as a layer; `check_every` is also that of an implicit gradient that says none of its own."""
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
    multiples of `multiple`, or exactly `side`.
    """

    def __init__(self, channels: int, multiple: int = 1, side: int | None = None):
        super().__init__()
        self.channels, self.multiple, self.side = channels, multiple, side

    @abc.abstractmethod
    def classify(self, x: Tensor) -> tuple[Tensor, dict[str, Solution]]:
        """The logits and the solutions, for pictures that fit."""

    def forward(self, x: Tensor, solutions: bool = False) -> Tensor | tuple[Tensor, dict[str, Solution]]:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"The pictures must be a floating-point tensor, got {got}: scale the pixels first.")
        self.check_shape(x.shape)
        logits, found = self.classify(x)
        return (logits, found) if solutions else logits

    def layers(self) -> list[Equilibrium]:
        """The equilibrium layers."""
        return layers_of(self)

    def diagnostics(self) -> dict[str, float]:
        """Numbers to follow over a run, as the cells of the layers tell them."""
        return {name: value for layer in self.layers() for name, value in layer.cell.diagnostics().items()}

    def compile_map(self) -> None:
        """torch.compile the map of every layer, which is where a solve spends its time."""
        for layer in self.layers():
            layer.cell.compile_map()

    def check_shape(self, shape: Sequence[int]) -> None:
        """Refuse, in one sentence, what is not (batch, channels, height, width) with sides that fit."""
        wanted = f" and sides that are multiples of {self.multiple}" if self.multiple > 1 else ""
        fit = all(side > 0 and side % self.multiple == 0 for side in shape[2:])
        if self.side is not None:
            wanted = f" and sides of {self.side}"
            fit = all(side == self.side for side in shape[2:])
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
    join: Literal["mean", "concatenate"] = setting("mean", "what is made of the branches where they meet")
    stem: Stem = setting(
        "cifar",
        "3×3 convolutions. cifar: 3 → w/4 → w/2 → w; deep: 3 → w/4 → w/4 → w/2 → w/2 → w; paper: 3 → w → w; "
        "imagenet: the same, then two w → w of stride 2; folded: 3 → w/4 → w/4, w/2 → w/2, w → w, with stride 2 in "
        "between; plain: 3 → w",
    )
    refinements: int = setting(0, "residual blocks at each coarser scale; 0: none, means alone", low=0)
    rectified: bool = setting(True, "whether a residual block gives relu(x + F(x)), or x + F(x)")
    norm: float = setting(1.0, "bound on ‖W‖‖W_h‖", above=0)
    activity: float = setting(0.5, "sᵢ = γ‖rᵢW_h‖² at initialisation, where γ is fixed", above=0)
    length: float | None = setting(None, "‖aᵢ‖² of a patch at initialisation, whatever γ; none: activity / γ", above=0)
    output: Output = setting("state", "what a branch gives: z, or v = Wz with the widths of z and v exchanged")
    overlap: bool = setting(True, "on a GPU, solve the branches side by side")
    lipschitz: bool = setting(False, "for certificates: almost-orthogonal convolutions and MaxMin, no batch norm")
    gain: float = setting(1.0, "what a lipschitz model multiplies its logits by: one over a temperature", above=0)

    def __post_init__(self) -> None:
        if self.lipschitz and not isinstance(self.kernel, AbstractRadialKernel):
            raise ValueError(f"`lipschitz` needs a radial kernel such as multiquadric, got {self.kernel!r}.")
        if self.lipschitz and self.join != "mean":
            raise ValueError(f"`lipschitz` needs `join` = mean, got {self.join}.")
        if self.lipschitz and self.refinements:
            raise ValueError(f"`lipschitz` needs `refinements` = 0: they have batch norms, got {self.refinements}.")
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

    @property
    def multiple(self) -> int:
        """What the sides of a picture must be multiples of: every branch has to end in whole patches."""
        patch = self.kernel.patch if isinstance(self.kernel, AbstractRadialKernel) else 1
        stride = math.prod(stride for _, stride in STEMS[self.stem])
        return stride * math.lcm(self.fusion, *(scale * patch for scale in self.scales))


@final
class Classifier(AbstractModel):
    """stem → its levels → an equilibrium branch each → joined at one scale → batch norm, ReLU, mean, linear head.

    Before `torch.export.export(model, (x,), strict=False)`, call it once in `eval()` on an x of that size: the norm of
    W is measured there, and the program, which takes `max_steps` steps, holds it.
    """

    def __init__(self, config: ClassifierConfig, classes: int, channels: int = 3):
        super().__init__(channels, multiple=config.multiple)
        self.config = config
        self.stem = make_stem(config.stem, channels, config.width, config.lipschitz)
        self.levels = Levels(config)
        branches = zip(config.scales, config.features, strict=True)
        self.branches = nn.ModuleList(Branch(config, scale, features) for scale, features in branches)
        joined = config.width * (len(config.scales) if config.join == "concatenate" else 1)
        self.norm = MaxMin() if config.lipschitz else BatchNorm(joined, relu=True)
        self.head = UnitRows(joined, classes, config.gain) if config.lipschitz else nn.Linear(joined, classes)

    def classify(self, x: Tensor) -> tuple[Tensor, dict[str, Solution]]:
        results = run_on_streams(list(self.branches), self.levels(self.stem(x)), self.config.overlap)
        values = [z for z, _ in results]
        joined = torch.cat(values, 1) if self.config.join == "concatenate" else sum(values[1:], values[0]) / len(values)
        features = self.norm(joined).mean((2, 3))
        if self.config.lipschitz:
            pixels = joined.shape[2] * joined.shape[3]
            features = features * pixels**0.5  # the mean of n pixels shrinks them to 1/√n
        logits = self.head(features)
        return logits, {f"branch{index}": solution for index, (_, solution) in enumerate(results)}

    def diagnostics(self) -> dict[str, float]:
        """Those of the cell of every branch, under its name."""
        cells = [layer.cell.diagnostics().items() for layer in self.layers()]
        return {f"branch{index}/{name}": value for index, numbers in enumerate(cells) for name, value in numbers}


def make_stem(kind: Stem, channels: int, width: int, lipschitz: bool) -> nn.Sequential:
    """Pixels → `width` channels. One convolution alone is markedly worse on CIFAR-10."""
    outputs = tuple(width // divisor for divisor, _ in STEMS[kind])
    strides = [stride for _, stride in STEMS[kind]]
    if lipschitz and any(channels % 2 for channels in outputs):
        raise ValueError(f"`lipschitz` sorts channels in pairs: the stem needs even numbers of them, got {outputs}.")
    layer = fold_conv_sort if lipschitz else conv_norm_relu
    return nn.Sequential(*map(layer, (channels, *outputs[:-1]), outputs, strides))


def conv_norm_relu(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """A 3×3 convolution, batch norm and ReLU."""
    conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return nn.Sequential(conv, BatchNorm(outputs, relu=True))


def fold_conv_sort(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """The 1-Lipschitz counterpart: instead of a stride, squares of pixels become channels, so that nothing is lost."""
    return nn.Sequential(nn.PixelUnshuffle(stride), AlmostOrthogonal(inputs * stride**2, outputs), MaxMin())


@final
class Levels(nn.Module):
    """The stem's output at the scale of every branch: each coarser one the mean of squares of a finer one, refined."""

    def __init__(self, config: ClassifierConfig):
        super().__init__()
        self.scales = config.scales
        coarser = sorted({*config.scales} - {1}) if config.refinements else []
        self.blocks = nn.ModuleDict({str(scale): self.make_blocks(config) for scale in coarser})

    @staticmethod
    def make_blocks(config: ClassifierConfig) -> nn.Sequential:
        """The residual blocks of one scale."""
        return nn.Sequential(*(Refinement(config.width, config.rectified) for _ in range(config.refinements)))

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        """One by one, each made when it is asked for: work on the finest need not wait for the coarser ones."""
        levels = {1: x} if self.blocks else pyramid(x, self.scales)
        coarser = iter(self.blocks.items())
        for scale in self.scales:
            while scale not in levels:
                name, blocks = next(coarser)
                finer = max(level for level in levels if int(name) % level == 0)
                levels[int(name)] = blocks(pool(levels[finer], int(name) // finer))
            yield levels[scale]


@final
class Refinement(nn.Module):
    """x + F(x), or its ReLU; F: 1×1, 3×3, 1×1 convolutions through a quarter of the channels, 0 at the start."""

    def __init__(self, width: int, rectified: bool):
        super().__init__()
        self.rectified = rectified
        inner = width // 4
        self.reduce = nn.Sequential(nn.Conv2d(width, inner, 1, bias=False), BatchNorm(inner, relu=True))
        self.mix = conv_norm_relu(inner, inner)
        self.expand = nn.Sequential(nn.Conv2d(inner, width, 1, bias=False), BatchNorm(width))
        nn.init.zeros_(self.expand[-1].get_parameter("weight"))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.expand(self.mix(self.reduce(x)))
        return torch.relu(y) if self.rectified else y


@final
class Branch(nn.Module):
    """The stem's output at one scale → its equilibrium → the scale of the fusion → batch norm.

    Nothing is normalised inside the equation. A curved inner kernel enters a in a unit of its own, in which z comes
    back; the branch gives z in the units of a. A `lipschitz` branch has no batch norm, but three numbers that make it
    1-Lipschitz: pooling by s shrinks differences to 1/s of their length, at least, up-sampling stretches them by s; and
    the equilibrium, from a to z*, by `kernel.input_lipschitz` · ‖W_h‖ at most.
    """

    def __init__(self, config: ClassifierConfig, scale: int, features: int):
        super().__init__()
        self.scale, self.fusion = scale, config.fusion
        state = config.width
        if config.output == "features":
            state, features = features, state
        channels = state if config.kernel.in_state else features
        if config.lipschitz:
            inject = nn.Sequential(AlmostOrthogonal(config.width, channels))
        else:
            conv = nn.Conv2d(config.width, channels, 3, padding=1, bias=False)
            inject = nn.Sequential(conv, BatchNorm(channels))
        cell = ConvCell(
            config.kernel,
            inputs=config.width,
            state=state,
            features=features,
            norm=config.norm,
            inject=inject,
            output=config.output,
        )
        self.sensitivity: float | None = None  # the Lipschitz constant of aW_h ↦ the output
        if config.lipschitz:
            assert isinstance(config.kernel, AbstractRadialKernel)
            self.sensitivity = config.kernel.input_lipschitz(config.norm)
            if config.output == "features" or self.sensitivity == math.inf:
                raise ValueError("`lipschitz` needs `output` = state and a `norm` at which the equilibrium is unique.")
        else:
            set_scale(inject, cell, config.activity, config.length)
        self.equilibrium = config.make_layer(cell)
        self.norm = nn.Identity() if config.lipschitz else BatchNorm(config.width)

    def forward(self, x: Tensor) -> tuple[Tensor, Solution]:
        solution: Solution = self.equilibrium(x if self.sensitivity is None else self.scale * x)
        z = solution.value
        if self.sensitivity is not None:
            z = z * self.gain()
        elif (unit := self.unit(x)) != 1:
            z = z / unit  # or the ε of the batch norm would outweigh it
        if self.scale < self.fusion:
            z = pool(z, self.fusion // self.scale)
        elif self.scale > self.fusion:
            z = unpool(z, self.scale // self.fusion)
        return self.norm(z), solution

    def unit(self, x: Tensor) -> float:
        """What a typical entry of a, and so of z, is multiplied by for pictures of this size."""
        cell = self.equilibrium.cell
        assert isinstance(cell, ConvCell)
        state = cell.operator.weight.shape[1]
        return cell.kernel.unit(cell.norm, state * x.shape[2] * x.shape[3])

    def gain(self) -> Tensor:
        """What the z of a `lipschitz` branch is multiplied by."""
        cell = self.equilibrium.cell
        assert self.sensitivity is not None
        assert isinstance(cell, ConvCell) and isinstance(cell.similarity, PatchParameters)
        return self.fusion / (self.scale * self.sensitivity * cell.similarity.gain())


@final
@dataclasses.dataclass(frozen=True)
class DenseConfig(AbstractSolveConfig):
    """The settings of a `DenseClassifier`."""

    kernel: AbstractKernel = setting(Gaussian(0.5, split=16, hidden=64), "similarity of a and v = Wz")
    size: int = setting(8, "side of the pictures in pixels", low=1)
    width: int = setting(128, "numbers in the state z", low=1)
    features: int = setting(64, "numbers in v = Wz", low=1)
    norm: float = setting(1.0, "bound on ‖W‖‖W_h‖", above=0)


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
        set_scale(inject, cell, activity=0.5)
        self.equilibrium = config.make_layer(cell)
        self.norm = nn.BatchNorm1d(config.width)
        self.head = nn.Linear(config.width, classes)

    def classify(self, x: Tensor) -> tuple[Tensor, dict[str, Solution]]:
        solution = self.equilibrium(x.flatten(1))
        return self.head(self.norm(solution.value)), {"dense": solution}


def set_scale(inject: nn.Sequential, cell: ConvCell | DenseCell, activity: float, length: float | None = None) -> None:
    """Set how large a = Ux + b starts, by the batch norm at the end of `inject`.

    With W_h an isometry and z = 0, sᵢ = γ‖rᵢW_h‖² is γ·n·scale² on average, for patches of n numbers. It starts at
    `activity`, so that γ cancels; or, with `length`, ‖aᵢ‖² starts at that whatever γ, and γ acts. Where γ follows the
    data (without `length`), or where there is no γ, the scale starts at 1.
    """
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
    nn.init.constant_(inject[-1].get_parameter("weight"), square**0.5)
