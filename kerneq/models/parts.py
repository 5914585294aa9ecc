"""The pieces around the equilibria: stem, branch, fusion."""

from typing import final

from torch import Tensor, nn

from ..cells import ConvCell
from ..fused.norm import BatchNorm
from ..fused.pool import pool, unpool
from ..solution import Solution
from .config import ClassifierConfig


def conv_norm_relu(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
        BatchNorm(outputs, relu=True),
    )


def make_stem(kind: str, channels: int, width: int) -> nn.Sequential:
    """Pixels → `width` channels. One convolution alone is markedly worse on CIFAR-10."""
    match kind:
        case "cifar":
            layers = [
                conv_norm_relu(channels, width // 4),
                conv_norm_relu(width // 4, width // 2),
                conv_norm_relu(width // 2, width),
            ]
        case "imagenet":
            layers = [
                conv_norm_relu(channels, width // 2, stride=2),
                conv_norm_relu(width // 2, width, stride=2),
            ]
        case "plain":
            layers = [conv_norm_relu(channels, width)]
        case _:
            raise ValueError(f"`stem` must be cifar, imagenet or plain, got {kind!r}.")
    return nn.Sequential(*layers)


@final
class Branch(nn.Module):
    """The stem's output at one scale → its equilibrium → the scale of the fusion → batch norm.

    Nothing is normalised inside the equation.
    """

    def __init__(self, config: ClassifierConfig, scale: int, features: int):
        super().__init__()
        self.scale, self.fusion = scale, config.fusion
        kernel = config.make_kernel()
        channels = config.width if kernel.in_state else features
        norm = BatchNorm(channels)
        nn.init.constant_(norm.weight, config.input_scale)
        cell = ConvCell(
            kernel,
            inputs=config.width,
            state=config.width,
            features=features,
            norm=config.norm,
            inject=nn.Sequential(nn.Conv2d(config.width, channels, 3, padding=1, bias=False), norm),
        )
        self.equilibrium = config.make_layer(cell)
        self.norm = BatchNorm(config.width)

    def forward(self, x: Tensor) -> tuple[Tensor, Solution]:
        solution: Solution = self.equilibrium(x)
        return self.norm(bring_to_scale(solution.value, self.scale, self.fusion)), solution


def bring_to_scale(z: Tensor, scale: int, target: int) -> Tensor:
    """Average pooling down to, or nearest up-sampling up to, the target scale."""
    if scale < target:
        return pool(z, target // scale)
    return unpool(z, scale // target) if scale > target else z
