"""A training step as one CUDA graph: its hundreds of launches become one."""

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from ..run import TrainingError

Step = Callable[[Tensor, Tensor], None]
EAGER_STEPS = 3  # before the capture: libraries choose their algorithms, optimizers make their buffers


@final
class GraphedStep:
    """Runs `step(x, target)`, the first few times as it is, then captured and replayed.

    The step may not look at a number on the device, and every batch must have the shapes of the first one.
    """

    def __init__(self, step: Step):
        self.step = step
        self.taken = 0
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.x = self.target = torch.empty(0)

    def __call__(self, x: Tensor, target: Tensor) -> None:
        if self.taken < EAGER_STEPS:
            self._eagerly(x, target)
        else:
            if self.graph is None:
                self.x, self.target = x.clone(), target.clone()
                self.graph = self._capture()
            self.x.copy_(x)
            self.target.copy_(target)
            self.graph.replay()
        self.taken += 1

    def _eagerly(self, x: Tensor, target: Tensor) -> None:
        """On a side stream, as the capture will be."""
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            self.step(x, target)
        here.wait_stream(self.stream)

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                self.step(self.x, self.target)
        except RuntimeError as error:
            raise TrainingError(
                f"The step cannot be captured as a CUDA graph ({str(error).splitlines()[0]}). A solve may not look at "
                "its residual: set model.check_every to at least max_steps, or training.graph=false."
            ) from None
        return graph
