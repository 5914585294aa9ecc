"""stem → branches of equilibrium layers at several scales → fusion → head: GEQ, KerDEQ, OptEq and MOptEq."""

import functools
from typing import Literal, final, overload

import torch
from torch import Tensor, nn

from ..fused.norm import BatchNorm
from ..fused.pool import pyramid
from ..fused.streams import run_on_streams
from ..solution import Solution
from .config import ClassifierConfig
from .parts import Branch, make_stem
from .pictures import check_pictures


@final
class Classifier(nn.Module):
    """`model(x)` gives logits; `model(x, solutions=True)` also the `Solution` of every equilibrium layer, by name.

    Before `torch.export.export(model, (x,), strict=False)`, call it once in `eval()` on an x of that size: the norm of
    W is measured there, and the program, which takes `max_steps` steps, holds it.
    """

    def __init__(self, config: ClassifierConfig, classes: int, channels: int = 3):
        super().__init__()
        self.config, self.channels = config, channels
        self.stem = make_stem(config.stem, channels, config.width)
        self.branches = nn.ModuleList(
            Branch(config, scale, features) for scale, features in zip(config.scales, config.features, strict=True)
        )
        self.norm = BatchNorm(config.width, relu=True)
        self.head = nn.Linear(config.width, classes)

    @overload
    def forward(self, x: Tensor, solutions: Literal[False] = False) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, solutions: Literal[True]) -> tuple[Tensor, dict[str, Solution]]: ...
    def forward(self, x: Tensor, solutions: bool = False) -> Tensor | tuple[Tensor, dict[str, Solution]]:
        check_pictures(x, self.channels, multiple=self._multiple())
        levels = pyramid(self.stem(x), self.config.scales)
        inputs = [levels[scale] for scale in self.config.scales]
        results = run_on_streams(self._branches(), inputs, self.config.overlap)
        mean = functools.reduce(torch.add, [z for z, _ in results]) / len(results)
        logits: Tensor = self.head(self.norm(mean).mean((2, 3)))
        if not solutions:
            return logits
        return logits, {f"branch{index}": solution for index, (_, solution) in enumerate(results)}

    def diagnostics(self) -> dict[str, float]:
        """The bound on ‖W‖‖W_h‖ that each branch is held under, its raw weight's norm, and γ, as they are now."""
        numbers: dict[str, float] = {}
        for index, branch in enumerate(self._branches()):
            found = branch.equilibrium.cell.diagnostics()
            numbers |= {f"branch{index}/{name}": value for name, value in found.items()}
        return numbers

    def compile_map(self) -> None:
        """torch.compile the map of every branch, which is where a solve spends its time."""
        for branch in self._branches():
            branch.equilibrium.cell.compile_map()

    def _branches(self) -> list[Branch]:
        return [branch for branch in self.branches if isinstance(branch, Branch)]

    def _multiple(self) -> int:
        """What the sides of a picture must be multiples of: every branch has to end in whole patches."""
        stride = 4 if self.config.stem == "imagenet" else 1
        patch = self.config.patch if self.config.kernel == "gaussian" else 1
        return stride * max(max(self.config.scales) * patch, self.config.fusion)
