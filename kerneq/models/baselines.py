"""The baselines the papers compare with: MDEQ (Bai et al., 2020), ResNet-18 and ResNet-50 (He et al., 2016).

MDEQ is one equilibrium over several resolutions, as a cell like any other; the ResNets are explicit networks.
"""

import dataclasses
import itertools
import math
from typing import Any, ClassVar, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cells import AbstractCell
from ..gradients import AbstractGradient, ConjugateGradient, Implicit, Phantom
from ..maps import AbstractMap, Function
from ..settings import setting
from ..solution import Solution
from ..solvers import AbstractSolver, Anderson, InFeatures, Proximal
from .classifier import EXPLICIT, AbstractModel, AbstractSolveConfig
from .layers import conv_batch_norm


@final
@dataclasses.dataclass(frozen=True)
class MDEQConfig(AbstractSolveConfig):
    """The large CIFAR model: four scales, group norm, expansion 5; no weight norm bound, so no guarantee."""

    equation: ClassVar[str] = "z = multi-scale residual block (z; x)"
    solver: AbstractSolver[Any] = setting(Anderson(), "how z = f(z) is solved")
    gradient: AbstractGradient = setting(Phantom(5, relaxation=0.5, advance=True), "how the solution is differentiated")
    max_steps: int = setting(18, "evaluations of f in a solve, at most", low=1)
    widths: tuple[int, ...] = setting((32, 64, 128, 256), "channels; each scale has half the side of the last", low=1)
    head: tuple[int, ...] = setting(
        (14, 28, 56, 112), "channels of the head's blocks, a quarter of their output", low=1
    )
    final: int = setting(1680, "channels before the linear head", low=1)
    expansion: int = setting(5, "how many times wider a residual block is inside", low=1)
    groups: int = setting(8, "of the group norms", low=2)
    stem: Literal["cifar", "imagenet"] = setting("cifar", "two 3×3 convolutions; imagenet: each with stride 2")

    def __post_init__(self) -> None:
        if len(self.widths) != len(self.head) or not self.widths:
            got = f"{len(self.widths)} and {len(self.head)}"
            raise ValueError(f"`widths` and `head` need one entry a scale, got {got}.")
        backward = self.gradient.solver if isinstance(self.gradient, Implicit) else None
        for solver in (self.solver, backward):
            if isinstance(solver, ConjugateGradient | InFeatures | Proximal):
                raise ValueError(f"MDEQ has no kernel, which {solver} needs: choose Picard, Anderson or Broyden.")


@final
class ResidualBlock(nn.Module):
    """z ↦ GN(relu(z + GN(conv(relu(GN(conv z))) + injection)))."""

    def __init__(self, width: int, expansion: int, groups: int):
        super().__init__()
        inner = width * expansion
        self.conv1 = nn.Conv2d(width, inner, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, inner)
        self.conv2 = nn.Conv2d(inner, width, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, width)
        self.norm3 = nn.GroupNorm(groups, width)

    def forward(self, z: Tensor, injection: Tensor | None) -> Tensor:
        out = self.conv2(F.relu(self.norm1(self.conv1(z))))
        if injection is not None:
            out = out + injection
        return self.norm3(F.relu(self.norm2(out) + z))


def _make_path(widths: tuple[int, ...], source: int, target: int, groups: int) -> nn.Module:
    """Return layers from one scale to another: convolutions of stride 2 to a smaller one, else 1×1 and up-sampling."""
    here, there = widths[source], widths[target]
    if source == target:
        return nn.Identity()
    if source > target:
        larger = nn.Upsample(scale_factor=2 ** (source - target))
        return nn.Sequential(nn.Conv2d(here, there, 1, bias=False), nn.GroupNorm(groups, there), larger)
    layers: list[nn.Module] = []
    for _ in range(source, target - 1):
        layers += [nn.Conv2d(here, here, 3, 2, padding=1, bias=False), nn.GroupNorm(groups, here), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(here, there, 3, 2, padding=1, bias=False), nn.GroupNorm(groups, there))


@final
class MultiscaleCell(AbstractCell):
    """A residual block for each scale, then every scale sums the others' outputs; x enters at the largest scale.

    The states of all scales are one row of numbers a sample, so every solver and gradient works on them unchanged.
    """

    def __init__(self, config: MDEQConfig):
        super().__init__()
        widths, groups = config.widths, config.groups
        self.widths = widths
        self.blocks = nn.ModuleList(ResidualBlock(width, config.expansion, groups) for width in widths)
        scales = range(len(widths))
        paths = [[_make_path(widths, source, target, groups) for source in scales] for target in scales]
        self.fuse = nn.ModuleList(nn.ModuleList(incoming) for incoming in paths)
        post = [(nn.ReLU(), nn.Conv2d(n, n, 1, bias=False), nn.GroupNorm(groups // 2, n)) for n in widths]
        self.post = nn.ModuleList(nn.Sequential(*layers) for layers in post)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=0.01)

    def bind(self, x: Tensor) -> Function:
        return Function(self.evaluate, (x,), apart=True)

    def initial(self, f: AbstractMap) -> Tensor:
        assert isinstance(f, Function)
        (x,) = f.inputs
        return x.new_zeros(len(x), sum(math.prod(shape) for shape in self.shapes(x)))

    def evaluate(self, z: Tensor, x: Tensor) -> Tensor:
        """Return the image of z at x."""
        # Only the solve is compiled: a compiled graph frees its buffers after one backward pass through it.
        image: Tensor = self.forward(z, x) if torch.is_grad_enabled() else self(z, x)
        return image

    def shapes(self, x: Tensor) -> list[tuple[int, int, int]]:
        height, width = x.shape[2:]
        return [(channels, height >> s, width >> s) for s, channels in enumerate(self.widths)]

    def unpack(self, z: Tensor, x: Tensor) -> list[Tensor]:
        """Return one feature map for each scale from the rows of numbers z, (batch, numbers)."""
        shapes = self.shapes(x)
        parts = torch.split(z, [math.prod(shape) for shape in shapes], dim=1)
        return [part.view(-1, *shape) for part, shape in zip(parts, shapes, strict=True)]

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        injected = [x] + [None] * (len(self.blocks) - 1)
        parts = zip(self.blocks, self.unpack(z, x), injected, strict=True)
        states = [block(state, injection) for block, state, injection in parts]
        fused = []
        for target, post in enumerate(self.post):
            paths = self.fuse[target]
            assert isinstance(paths, nn.ModuleList)
            total = torch.stack([path(state) for path, state in zip(paths, states, strict=True)]).sum(0)
            fused.append(post(total).flatten(1))
        return torch.cat(fused, dim=1)

    def compile_map(self) -> None:
        self.compile(dynamic=False)


@final
class MDEQ(AbstractModel):
    """stem → the multi-scale equilibrium → a head that adds up the scales from the largest to the smallest."""

    def __init__(self, config: MDEQConfig, classes: int, channels: int = 3):
        stride = 2 if config.stem == "imagenet" else 1
        super().__init__(channels, multiple=stride**2 * 2 ** (len(config.widths) - 1))
        self.config, width = config, config.widths[0]
        self.stem = nn.Sequential(
            conv_batch_norm(channels, width, stride=stride, relu=True), *conv_bn(width, width, 3, stride)
        )
        self.equilibrium = config.make_layer(MultiscaleCell(config))
        pairs = zip(config.widths, config.head, strict=True)
        self.lift = nn.ModuleList(Block(width, planes, 1, bottleneck=True) for width, planes in pairs)
        outputs = [planes * 4 for planes in config.head]
        # Pooling and a 1×1 convolution where MDEQ's code has 3×3 with stride 2: those alone are a million parameters
        # more than the published ten.
        down = [(nn.AvgPool2d(2), *conv_bn(a, b, 1), nn.ReLU(inplace=True)) for a, b in itertools.pairwise(outputs)]
        self.down = nn.ModuleList(nn.Sequential(*layers) for layers in down)
        last = nn.Conv2d(outputs[-1], config.final, 1)
        self.final = nn.Sequential(last, nn.BatchNorm2d(config.final), nn.ReLU(inplace=True))
        self.head = nn.Linear(config.final, classes)

    def classify(self, x: Tensor) -> tuple[Tensor, dict[str, Solution]]:
        x = self.stem(x)
        solution = self.equilibrium(x)
        cell = self.equilibrium.cell
        assert isinstance(cell, MultiscaleCell)
        maps = [lift(z) for lift, z in zip(self.lift, cell.unpack(solution.value, x), strict=True)]
        gathered = maps[0]
        for down, z in zip(self.down, maps[1:], strict=True):
            gathered = down(gathered) + z
        return self.head(self.final(gathered).mean((2, 3))), {"multiscale": solution}


@final
@dataclasses.dataclass(frozen=True)
class ResNetConfig:
    """The settings of a `ResNet`; the defaults are those of ResNet-18 for CIFAR."""

    equation: ClassVar[str] = EXPLICIT
    blocks: tuple[int, ...] = setting((2, 2, 2, 2), "residual blocks a stage", low=1, high=1000)
    bottleneck: bool = setting(False, "blocks of 1×1, 3×3, 1×1 convolutions instead of two 3×3")
    width: int = setting(64, "channels of the first stage; each stage doubles them", low=1)
    stem: Literal["cifar", "imagenet"] = setting("cifar", "3×3, no pooling; imagenet: 7×7 of stride 2, pooling")
    rectified: bool = setting(True, "whether a residual block gives relu(x + F(x)), or x + F(x)")


def conv_bn(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution that keeps the size of the picture (or divides it by `stride`), and batch norm."""
    conv = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


@final
class Block(nn.Module):
    """x + F(x), or its ReLU, F two 3×3 convolutions, or 1×1, 3×3, 1×1 with four times the channels at the end."""

    def __init__(self, inputs: int, planes: int, stride: int, bottleneck: bool, rectified: bool = True):
        super().__init__()
        self.rectified = rectified
        outputs = planes * 4 if bottleneck else planes
        relu = nn.ReLU(inplace=True)
        if bottleneck:
            parts = [conv_bn(inputs, planes, 1), relu, conv_bn(planes, planes, 3, stride), relu]
            parts.append(conv_bn(planes, outputs, 1))
        else:
            parts = [conv_bn(inputs, planes, 3, stride), relu, conv_bn(planes, outputs, 3)]
        self.residual = nn.Sequential(*parts)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else conv_bn(inputs, outputs, 1, stride)
        self.outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.residual(x) + self.shortcut(x)
        return torch.relu(y) if self.rectified else y


@final
class ResNet(AbstractModel):
    """stem → stages of residual blocks, each half the size and twice the channels → mean → linear head."""

    def __init__(self, config: ResNetConfig, classes: int, channels: int = 3):
        super().__init__(channels)
        width = config.width
        if config.stem == "cifar":
            self.stem = nn.Sequential(conv_bn(channels, width, 3), nn.ReLU(inplace=True))
        else:
            pool = nn.MaxPool2d(3, 2, 1)
            self.stem = nn.Sequential(conv_bn(channels, width, 7, 2), nn.ReLU(inplace=True), pool)
        blocks: list[Block] = []
        inputs = width
        for stage, count in enumerate(config.blocks):
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(Block(inputs, width * 2**stage, stride, config.bottleneck, config.rectified))
                inputs = blocks[-1].outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)

    def classify(self, x: Tensor) -> tuple[Tensor, dict[str, Solution]]:
        return self.head(self.blocks(self.stem(x)).mean((2, 3))), {}

    def compile_map(self) -> None:
        """Use torch.compile for the whole network: there is no map inside."""
        self.compile()
