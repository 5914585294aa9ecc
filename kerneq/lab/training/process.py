"""One of the processes that train together, and its device: joining the others, being stopped, keeping a GPU busy."""

import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import FrameType
from typing import final

import torch
from torch import Tensor, distributed, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from ...loading import TrainingError
from ...loading import choose_device as choose_device
from ...models.layers import pool
from ..data.images import explain_killed_worker

Batch = tuple[Tensor, Tensor]  # x (samples, channels, height, width), labels or probabilities
Step = Callable[[Tensor, Tensor], None]  # of a batch
EAGER_STEPS = 3  # before a step is captured: libraries choose their algorithms, optimizers make their buffers


@final
@dataclasses.dataclass(frozen=True)
class Process:
    """One of `world` processes that train a model together, each on its device and its share of every batch."""

    device: torch.device
    rank: int = 0
    world: int = 1
    restarts: int = 0  # how often torchrun has restarted the workers

    @property
    def leads(self) -> bool:
        """Whether this process writes files and talks to the terminal."""
        return self.rank == 0

    def autocast(self, amp: bool) -> torch.autocast:
        """bfloat16 where `amp` asks for it, on a GPU: most CPUs only imitate it, some 20 times slower than float32."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=amp and self.device.type == "cuda")

    def synchronise(self) -> None:
        """Wait until the device has finished its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def total(self, sums: Tensor) -> Tensor:
        """The sum over all processes; the argument is left alone."""
        return torch.stack(self.gather(sums)).sum(0)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The same-shaped tensor of every process, by rank."""
        if self.world == 1:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self.world)]
        distributed.all_gather(parts, tensor)
        return parts

    def share_buffers(self, model: nn.Module) -> None:
        """Give all processes the buffers of the one that saves them: batch norms on a CPU see their own images only."""
        if self.world > 1:
            for buffer in model.buffers():
                distributed.broadcast(buffer, 0)

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model whose backward pass averages gradients over the processes."""
        if self.world == 1:
            return model
        ids = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids)


@contextmanager
def join_processes(device: str) -> Iterator[Process]:
    """Join the processes that torchrun started, if it did; leave them at the end. Another's death is a sentence."""
    try:
        yield _start(device)
    except RuntimeError as error:
        if killed := explain_killed_worker(error):
            raise killed from None
        if "closed by peer" not in str(error) and "reset by peer" not in str(error):
            raise
        raise TrainingError("Another process of this run has died; see its own message.") from None
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def _start(device: str) -> Process:
    """Connect to the other processes, if there are any, and choose this one's device."""
    world, rank, restarts = _variable("WORLD_SIZE", 1), _variable("RANK"), _variable("TORCHELASTIC_RESTART_COUNT")
    if rank >= world:
        raise TrainingError(f"RANK is {rank}, but WORLD_SIZE is {world}: start several processes with torchrun.")
    chosen = choose_device(device, _variable("LOCAL_RANK") if world > 1 else 0)
    if world > 1 and not distributed.is_initialized():
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        # torchrun's agent keeps one store for all lives of its workers. Without a prefix of its own, a restarted
        # worker may read the address of a dead one there, and fail to connect (seen with PyTorch 2.13 and gloo).
        try:
            store, _, _ = next(rendezvous("env://"))
        except ValueError as error:  # no MASTER_ADDR, say
            raise TrainingError(
                f"WORLD_SIZE is {world}, but: {error}. Start several processes with torchrun."
            ) from None
        store = PrefixStore(f"life {restarts}", store)
        backend = "nccl" if chosen.type == "cuda" else "gloo"
        distributed.init_process_group(backend, store=store, rank=rank, world_size=world)
    return Process(chosen, rank, world, restarts)


def _variable(name: str, default: int = 0) -> int:
    """A whole number that torchrun put into the environment."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise TrainingError(f"The environment variable {name} must be a whole number, got {text!r}: unset it.")
    return int(text)


@contextmanager
def catch_stop(active: bool, announce: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Catch Ctrl-C and SIGTERM; yields a function that says whether one came, to call between two steps.

    So a step is never cut in half. That a stop was asked for is announced at once: a step may take a while. A second
    Ctrl-C stops at once. Not active under torchrun, whose agent ends its workers itself, nor outside the main thread.
    """
    asked = threading.Event()
    if not active or threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        # Who reads our output through a pipe, as `| tee`, may have died of the same Ctrl-C: rich then wants to exit.
        # Or rich is just importing a part of itself, which it cannot do twice at once.
        with suppress(Exception, SystemExit):
            announce("stopping after this step …")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def wake(device: torch.device, amp: bool) -> Iterator[None]:
    """Meanwhile, a thread starts the GPU, which takes seconds and needs neither data nor model; its error comes last.

    Call it after the seeds are set: seeds set while a context is being made would be lost.
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


def prefetch(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """The same batches; on a GPU each is made on a stream of its own, beside the step before it."""
    return _make_aside(batches, device) if device.type == "cuda" else batches


def _make_aside(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
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
