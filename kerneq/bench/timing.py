"""Measuring: medians of repeated calls, peak memory, and what a card can do at best."""

import dataclasses
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

Work = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Timing:
    seconds: float  # median
    spread: float  # of the middle half, relative to the median
    peak: int = 0  # bytes above what was held before; CUDA only


def measure(work: Work, device: torch.device, budget: float = 1.0, warmup: int = 2) -> Timing:
    """The median time of `work`, repeated for about `budget` seconds (at least twice) after warming up."""
    for _ in range(warmup):
        work()
    synchronise(device)
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 2 or (time.perf_counter() - begin < budget and len(times) < 200):
        start = time.perf_counter()
        work()
        synchronise(device)
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated(device) - held if device.type == "cuda" else 0
    low, middle, high = statistics.quantiles(times, n=4)
    return Timing(middle, (high - low) / middle, peak)


def alternate(works: dict[str, Work], device: torch.device, rounds: int, budget: float) -> dict[str, Timing]:
    """Several works measured side by side, in turns, so that a busy moment of the machine hits all of them."""
    found: dict[str, list[Timing]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            found[name].append(measure(work, device, budget=budget / rounds, warmup=1))
    return {name: min(timings, key=lambda t: t.seconds) for name, timings in found.items()}


def effort(device: torch.device, quick: bool) -> tuple[int, float]:
    """Rounds, and seconds for each work over all of them: time on a GPU is dear and steady, on a CPU neither."""
    if quick:
        return 1, 0.05
    return (3, 0.5) if device.type == "cuda" else (3, 1.0)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def limits(device: torch.device) -> dict[str, float]:
    """What this machine can do: copy bandwidth (bytes/s, read + written) and matrix products (FLOP/s)."""
    cuda = device.type == "cuda"
    dtype, side, numbers = (torch.bfloat16, 8192, 2**30) if cuda else (torch.float32, 1024, 2**24)
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    source = torch.randn(numbers, device=device, dtype=dtype)
    target = torch.empty_like(source)
    product = measure(lambda: a @ b, device, budget=0.3)
    copy = measure(lambda: target.copy_(source), device, budget=0.3)
    moved = 2 * numbers * source.element_size()
    return {"copy": moved / copy.seconds, "matmul": 2 * side**3 / product.seconds}


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
