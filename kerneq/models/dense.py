"""The smallest classifier: one dense equilibrium between the pixels and a linear head."""

import dataclasses
from typing import Literal, final, overload

from torch import Tensor, nn

from ..cells import DenseCell
from ..kernels import Gaussian
from ..solution import Solution
from .config import SolveConfig
from .pictures import check_pictures


@dataclasses.dataclass(frozen=True)
class DenseConfig(SolveConfig):
    """For pictures of `size` × `size` pixels."""

    size: int = 8
    width: int = 128  # numbers in the state z
    features: int = 64
    split: int = 16  # entries of v in a patch
    hidden: int = 64
    norm: float = 1.0
    gamma: float = 0.5


@final
class DenseClassifier(nn.Module):
    def __init__(self, config: DenseConfig, classes: int, channels: int = 3):
        super().__init__()
        self.config, self.channels = config, channels
        inputs = channels * config.size**2
        norm = nn.BatchNorm1d(config.features)
        nn.init.constant_(norm.weight, (0.5 / (config.gamma * config.split)) ** 0.5)  # sᵢ starts near ½
        cell = DenseCell(
            Gaussian(config.gamma, split=config.split, hidden=config.hidden),
            inputs=inputs,
            state=config.width,
            features=config.features,
            norm=config.norm,
            inject=nn.Sequential(nn.Linear(inputs, config.features, bias=False), norm),
        )
        self.equilibrium = config.make_layer(cell)
        self.norm = nn.BatchNorm1d(config.width)
        self.head = nn.Linear(config.width, classes)

    @overload
    def forward(self, x: Tensor, solutions: Literal[False] = False) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, solutions: Literal[True]) -> tuple[Tensor, dict[str, Solution]]: ...
    def forward(self, x: Tensor, solutions: bool = False) -> Tensor | tuple[Tensor, dict[str, Solution]]:
        check_pictures(x, self.channels, side=self.config.size)
        solution: Solution = self.equilibrium(x.flatten(1))
        logits: Tensor = self.head(self.norm(solution.value))
        return (logits, {"dense": solution}) if solutions else logits

    def diagnostics(self) -> dict[str, float]:
        return self.equilibrium.cell.diagnostics()

    def compile_map(self) -> None:
        self.equilibrium.cell.compile_map()
