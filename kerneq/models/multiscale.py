"""The MDEQ classifier: stem → the multi-scale equilibrium → a head that gathers the scales."""

from typing import Literal, final, overload

from torch import Tensor, nn

from ..solution import Solution
from .mdeq import MDEQConfig, MultiscaleCell
from .parts import conv_norm_relu
from .pictures import check_pictures
from .resnet import Block


@final
class MDEQ(nn.Module):
    def __init__(self, config: MDEQConfig, classes: int, channels: int = 3):
        super().__init__()
        self.config, self.channels = config, channels
        self.stem = nn.Sequential(
            conv_norm_relu(channels, config.widths[0]),
            nn.Conv2d(config.widths[0], config.widths[0], 3, padding=1, bias=False),
            nn.BatchNorm2d(config.widths[0]),
        )
        self.equilibrium = config.make_layer(MultiscaleCell(config))
        self.lift = nn.ModuleList(
            Block(width, planes, 1, bottleneck=True) for width, planes in zip(config.widths, config.head, strict=True)
        )
        outputs = [planes * 4 for planes in config.head]
        # Pooling and a 1×1 convolution where MDEQ's code has 3×3 with stride 2: those alone are a million parameters
        # more than the published ten.
        self.down = nn.ModuleList(
            nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(a, b, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True))
            for a, b in zip(outputs, outputs[1:], strict=False)
        )
        self.final = nn.Sequential(
            nn.Conv2d(outputs[-1], config.final, 1), nn.BatchNorm2d(config.final), nn.ReLU(inplace=True)
        )
        self.head = nn.Linear(config.final, classes)

    @overload
    def forward(self, x: Tensor, solutions: Literal[False] = False) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, solutions: Literal[True]) -> tuple[Tensor, dict[str, Solution]]: ...
    def forward(self, x: Tensor, solutions: bool = False) -> Tensor | tuple[Tensor, dict[str, Solution]]:
        check_pictures(x, self.channels, multiple=2 ** (len(self.config.widths) - 1))
        x = self.stem(x)
        solution: Solution = self.equilibrium(x)
        cell = self.equilibrium.cell
        assert isinstance(cell, MultiscaleCell)
        maps = [lift(z) for lift, z in zip(self.lift, cell.unpack(solution.value, x), strict=True)]
        gathered = maps[0]
        for down, z in zip(self.down, maps[1:], strict=True):
            gathered = down(gathered) + z
        logits: Tensor = self.head(self.final(gathered).mean((2, 3)))
        return (logits, {"multiscale": solution}) if solutions else logits

    def diagnostics(self) -> dict[str, float]:
        return {}

    def compile_map(self) -> None:
        self.equilibrium.cell.compile_map()
