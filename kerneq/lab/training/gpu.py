"""What keeps a GPU busy: its start beside the data's, each batch beside the step before, a step as one CUDA graph."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from ...fused.layers import pool
from ...loading import TrainingError

Step = Callable[[Tensor, Tensor], None]  # of a batch: x (samples, channels, height, width), labels or probabilities
EAGER_STEPS = 3  # before a step is captured: libraries choose their algorithms, optimizers make their buffers


@contextmanager
def wake(device: torch.device, amp: bool) -> Iterator[None]:
    """Meanwhile, a thread starts the GPU, which takes seconds and needs neither data nor model; its error comes last.

    Call it after the seeds are set: those set while a context is being made would be lost.
    """
    if device.type != "cuda":
        yield
        return
    with ThreadPoolExecutor(1) as thread:
        touched = thread.submit(_touch, device, amp)
        yield
    touched.result()


def _touch(device: torch.device, amp: bool) -> None:
    """Make the context and load the libraries: a convolution, a matrix product and a Triton program, all tiny."""
    x = torch.zeros(1, 8, 8, 8, device=device, dtype=torch.bfloat16 if amp else torch.float32)
    x = x.to(memory_format=torch.channels_last)
    torch.matmul(x[0, 0], torch.conv2d(x, x, padding=4)[0, 0, 1:])
    pool(x, 2)


def prefetch(batches: Iterator[tuple[Tensor, Tensor]], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """The same batches; on a GPU each is made on a stream of its own, beside the step before it."""
    if device.type != "cuda":
        yield from batches
        return
    here, aside = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    aside.wait_stream(here)
    while True:
        with torch.cuda.stream(aside):
            batch = next(batches, None)
        if batch is None:
            return
        here.wait_stream(aside)
        for t in batch:
            t.record_stream(here)
        yield batch


@final
class GraphedStep:
    """Runs `step(x, target)`, the first few times as it is, then as one CUDA graph: hundreds of launches become one.

    The step may not read a number from the device, and every batch must have the shapes of the first one.
    """

    def __init__(self, step: Step):
        self.step = step
        self.taken = 0
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.x = self.target = torch.empty(0)

    def __call__(self, x: Tensor, target: Tensor) -> None:
        self.taken += 1
        if self.taken <= EAGER_STEPS:
            here = torch.cuda.current_stream()
            self.stream.wait_stream(here)
            with torch.cuda.stream(self.stream):  # as the capture will be
                self.step(x, target)
            here.wait_stream(self.stream)
            return
        if self.graph is None:
            self.x, self.target = x.clone(), target.clone()
            self.graph = self._capture()
        self.x.copy_(x)
        self.target.copy_(target)
        self.graph.replay()

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
