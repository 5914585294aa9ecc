"""ResNet-18 and ResNet-50 (He et al., 2016), with the CIFAR or the ImageNet stem: the explicit baselines."""

import dataclasses
from typing import Literal, final, overload

import torch
from torch import Tensor, nn

from ..solution import Solution
from .pictures import check_pictures


@dataclasses.dataclass(frozen=True)
class ResNetConfig:
    blocks: tuple[int, ...] = (2, 2, 2, 2)  # residual blocks a stage
    bottleneck: bool = False
    width: int = 64
    stem: str = "cifar"  # cifar: 3×3, no pooling; imagenet: 7×7 with stride 2, then pooling


def conv_norm(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(outputs)
    )


@final
class Block(nn.Module):
    """relu(x + F(x)), F two 3×3 convolutions, or 1×1, 3×3, 1×1 with four times the channels at the end."""

    def __init__(self, inputs: int, planes: int, stride: int, bottleneck: bool):
        super().__init__()
        outputs = planes * 4 if bottleneck else planes
        relu = nn.ReLU(inplace=True)
        if bottleneck:
            parts = [conv_norm(inputs, planes, 1), relu, conv_norm(planes, planes, 3, stride), relu]
            parts.append(conv_norm(planes, outputs, 1))
        else:
            parts = [conv_norm(inputs, planes, 3, stride), relu, conv_norm(planes, outputs, 3)]
        self.residual = nn.Sequential(*parts)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else conv_norm(inputs, outputs, 1, stride)
        self.outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.residual(x) + self.shortcut(x))


@final
class ResNet(nn.Module):
    def __init__(self, config: ResNetConfig, classes: int, channels: int = 3):
        super().__init__()
        self.channels, width = channels, config.width
        match config.stem:
            case "cifar":
                stem = [conv_norm(channels, width, 3), nn.ReLU(inplace=True)]
            case "imagenet":
                stem = [conv_norm(channels, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
            case _:
                raise ValueError(f"`stem` must be cifar or imagenet, got {config.stem!r}.")
        self.stem = nn.Sequential(*stem)
        blocks: list[Block] = []
        inputs = width
        for stage, count in enumerate(config.blocks):
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(Block(inputs, width * 2**stage, stride, config.bottleneck))
                inputs = blocks[-1].outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)

    @overload
    def forward(self, x: Tensor, solutions: Literal[False] = False) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, solutions: Literal[True]) -> tuple[Tensor, dict[str, Solution]]: ...
    def forward(self, x: Tensor, solutions: bool = False) -> Tensor | tuple[Tensor, dict[str, Solution]]:
        check_pictures(x, self.channels)
        logits: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return (logits, {}) if solutions else logits

    def diagnostics(self) -> dict[str, float]:
        return {}

    def compile_map(self) -> None:
        """There is no map inside: the whole network is compiled."""
        self.compile()
