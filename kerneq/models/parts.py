"""The pieces around the equilibria: stem, branch, fusion."""

from typing import final

import torch.nn.functional as F
from torch import Tensor, nn

from ..cells import ConvCell
from ..equilibrium import Equilibrium
from ..solution import Solution
from .config import ClassifierConfig


def conv_norm_relu(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


def make_stem(kind: str, channels: int, width: int) -> nn.Sequential:
    """Pixels → `width` channels. One convolution alone costs about six points on CIFAR-10 (design page, section 3)."""
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
    """The stem's output at one scale → its equilibrium → batch norm; nothing is normalised inside the equation."""

    def __init__(self, config: ClassifierConfig, scale: int, features: int):
        super().__init__()
        self.scale = scale
        kernel = config.make_kernel()
        channels = config.width if kernel.in_state else features
        norm = nn.BatchNorm2d(channels)
        nn.init.constant_(norm.weight, config.input_scale)
        cell = ConvCell(
            kernel,
            inputs=config.width,
            state=config.width,
            features=features,
            norm=config.norm,
            inject=nn.Sequential(nn.Conv2d(config.width, channels, 3, padding=1, bias=False), norm),
        )
        self.equilibrium = Equilibrium(
            cell,
            solver=config.make_solver(),
            gradient=config.make_gradient(),
            tol=config.tol,
            max_steps=config.max_steps,
            check_every=config.check_every or None,
        )
        self.norm = nn.BatchNorm2d(config.width)

    def forward(self, x: Tensor) -> tuple[Tensor, Solution]:
        solution: Solution = self.equilibrium(F.avg_pool2d(x, self.scale) if self.scale > 1 else x)
        return self.norm(solution.value), solution


def bring_to_scale(z: Tensor, scale: int, target: int) -> Tensor:
    """Average pooling down to, or nearest up-sampling up to, the target scale."""
    if scale < target:
        return F.avg_pool2d(z, target // scale)
    return F.interpolate(z, scale_factor=scale // target) if scale > target else z
