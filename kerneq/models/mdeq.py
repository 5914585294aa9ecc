"""MDEQ (Bai et al., 2020): one equilibrium over several resolutions, as a cell like any other."""

import dataclasses
import functools
from typing import Any, Self, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cells import AbstractCell
from ..equation import AbstractMap
from ..tensors import take_samples
from .config import SolveConfig


@dataclasses.dataclass(frozen=True)
class MDEQConfig(SolveConfig):
    """The large CIFAR model: four scales, group norm, expansion 5; no weight norm bound, so no guarantee."""

    solver: str = "anderson"
    gradient: str = "phantom"
    backward: str = "map"
    gradient_steps: int = 5
    gradient_relaxation: float = 0.5
    max_steps: int = 18
    widths: tuple[int, ...] = (32, 64, 128, 256)  # channels, each scale half the size of the one before
    head: tuple[int, ...] = (14, 28, 56, 112)
    final: int = 1680
    expansion: int = 5
    groups: int = 8


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


def _down(widths: tuple[int, ...], source: int, target: int, groups: int) -> nn.Sequential:
    """Stride-2 convolutions from scale `source` to the smaller scale `target`."""
    layers: list[nn.Module] = []
    for scale in range(source, target):
        outputs = widths[target] if scale == target - 1 else widths[source]
        layers.append(nn.Conv2d(widths[source], outputs, 3, 2, padding=1, bias=False))
        layers.append(nn.GroupNorm(groups, outputs))
        if scale < target - 1:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def _up(widths: tuple[int, ...], source: int, target: int, groups: int) -> nn.Sequential:
    """A 1×1 convolution and nearest up-sampling from scale `source` to the larger scale `target`."""
    return nn.Sequential(
        nn.Conv2d(widths[source], widths[target], 1, bias=False),
        nn.GroupNorm(groups, widths[target]),
        nn.Upsample(scale_factor=2 ** (source - target)),
    )


@final
class MultiscaleCell(AbstractCell):
    """A residual block a scale, then every scale sums what the others send; x enters at the largest scale.

    The states of all scales are one row of numbers a sample, so every solver and gradient works on them unchanged.
    """

    def __init__(self, config: MDEQConfig):
        super().__init__()
        widths, groups = config.widths, config.groups
        self.widths = widths
        self.blocks = nn.ModuleList(ResidualBlock(width, config.expansion, groups) for width in widths)
        self.fuse = nn.ModuleList(
            nn.ModuleList(
                nn.Identity()
                if source == target
                else (_down if source < target else _up)(widths, source, target, groups)
                for source in range(len(widths))
            )
            for target in range(len(widths))
        )
        self.post = nn.ModuleList(
            nn.Sequential(nn.ReLU(), nn.Conv2d(width, width, 1, bias=False), nn.GroupNorm(groups // 2, width))
            for width in widths
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=0.01)
        self.compiled = False

    def bind(self, x: Tensor) -> "MultiscaleMap":
        return MultiscaleMap(self, x)

    def initial(self, f: AbstractMap) -> Tensor:
        assert isinstance(f, MultiscaleMap)
        numbers = sum(width * h * w for width, h, w in self.shapes(f.x))
        return f.x.new_zeros(len(f.x), numbers)

    def shapes(self, x: Tensor) -> list[tuple[int, int, int]]:
        height, width = x.shape[2:]
        return [(channels, height >> s, width >> s) for s, channels in enumerate(self.widths)]

    def unpack(self, z: Tensor, x: Tensor) -> list[Tensor]:
        """One feature map a scale out of a row of numbers."""
        shapes = self.shapes(x)
        parts = torch.split(z, [c * h * w for c, h, w in shapes], dim=1)
        return [part.view(-1, *shape) for part, shape in zip(parts, shapes, strict=True)]

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        states = [
            block(state, x if scale == 0 else None)
            for scale, (block, state) in enumerate(zip(self.blocks, self.unpack(z, x), strict=True))
        ]
        fused = []
        for target, post in enumerate(self.post):
            paths = self.fuse[target]
            assert isinstance(paths, nn.ModuleList)
            total = torch.stack([path(state) for path, state in zip(paths, states, strict=True)]).sum(0)
            fused.append(post(total).flatten(1))
        return torch.cat(fused, dim=1)

    def compile_map(self) -> None:
        self.compiled = True

    def diagnostics(self) -> dict[str, float]:
        return {}


@functools.cache
def _compiled() -> Any:
    return torch.compile(MultiscaleCell.forward, dynamic=False)


@final
@dataclasses.dataclass(frozen=True)
class MultiscaleMap(AbstractMap):
    cell: MultiscaleCell
    x: Tensor

    def __call__(self, z: Tensor) -> Tensor:
        # Only the solve is compiled: a compiled graph gives up its buffers after one backward pass through it.
        fast = self.cell.compiled and not torch.is_grad_enabled()
        out: Tensor = _compiled()(self.cell, z, self.x) if fast else self.cell(z, self.x)
        return out

    def rows(self, index: Tensor) -> Self:
        return dataclasses.replace(self, x=take_samples(self.x, index))
