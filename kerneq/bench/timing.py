"""Measuring: times of repeated calls, side by side, and calls captured as CUDA graphs."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

Work = Callable[[], object]
MOST = 200  # calls in one turn


@dataclasses.dataclass(frozen=True)
class Timing:
    seconds: float  # median
    spread: float  # of the middle half, relative to the median
    late: float  # the 90th percentile

    @classmethod
    def of(cls, times: list[float]) -> "Timing":
        if len(times) == 1:
            return cls(times[0], 0.0, times[0])
        low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
        return cls(middle, (high - low) / middle, statistics.quantiles(times, n=10, method="inclusive")[8])


@dataclasses.dataclass(frozen=True)
class Bench:
    """Where a benchmark runs, how thoroughly, and whom it tells what it is doing."""

    device: torch.device
    quick: bool
    say: Callable[[str], None]

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def rounds(self) -> int:
        """Turns that each work gets."""
        return 1 if self.quick else (2 if self.cuda else 3)

    @property
    def budget(self) -> float:
        """Seconds for each work over all rounds: time on a GPU is dear and steady, on a CPU neither."""
        return 0.05 if self.quick else (0.2 if self.cuda else 0.6)


def measure(work: Work, device: torch.device, budget: float, warmup: int = 1) -> Timing:
    """The time of `work`, repeated for about `budget` seconds (at least twice) after warming up."""
    for _ in range(warmup):
        work()
    return Timing.of(sample(work, device, budget, least=2))


def alternate(works: Mapping[str, Work], bench: Bench, what: str) -> dict[str, Timing]:
    """Several works measured side by side, in turns, so that a busy moment of the machine hits all of them."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(bench.rounds):
        for name, work in works.items():
            bench.say(f"{what}: {name}, round {turn + 1} of {bench.rounds}")
            if turn == 0:
                work()
            times[name] += sample(work, bench.device, bench.budget / bench.rounds, least=1)
    return {name: Timing.of(found) for name, found in times.items()}


def sample(work: Work, device: torch.device, budget: float, least: int) -> list[float]:
    """Seconds of each call, device included, for about `budget` seconds in all."""
    synchronise(device)
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < least or (time.perf_counter() - begin < budget and len(times) < MOST):
        start = time.perf_counter()
        work()
        synchronise(device)
        times.append(time.perf_counter() - start)
    return times


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def capture(step: Callable[[], Tensor], warmup: int = 3) -> Callable[[], Tensor]:
    """`step` as one CUDA graph; call the result to replay it. It may not look at a tensor's value."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmup):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


def in_layout(module: nn.Module, channels_last: bool) -> nn.Module:
    """The module with its four-dimensional weights in this memory format."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return module.to(memory_format=layout)  # type: ignore[call-overload]
