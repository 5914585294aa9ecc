"""How everything here is measured: time, memory, floating-point operations, kernels, and the machine's own limits."""

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

Call = Callable[[], object]
MAX_CALLS = 200  # in one turn
SPREAD = "spread: the middle half of the calls, relative to the median."  # a note for tables that have this column


@dataclasses.dataclass(frozen=True)
class Setup:
    """The device of a benchmark, whether it is short, and a function that shows its progress."""

    device: torch.device
    quick: bool
    progress: Callable[[str], None]

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def rounds(self) -> int:
        """Turns per call."""
        return 1 if self.quick else (2 if self.cuda else 3)

    @property
    def budget(self) -> float:
        """Seconds for each call over all rounds: GPU time is scarce and timings there vary little. 0: one call."""
        return 0.0 if self.quick else (0.2 if self.cuda else 0.6)


# Time


@dataclasses.dataclass(frozen=True)
class Timing:
    """The distribution of the times of one call."""

    seconds: float  # median
    spread: float  # interquartile range, relative to the median
    p90: float  # 90th percentile, seconds

    @classmethod
    def of(cls, times: list[float]) -> "Timing":
        if len(times) == 1:
            return cls(times[0], 0.0, times[0])
        low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
        return cls(middle, (high - low) / middle, statistics.quantiles(times, n=10, method="inclusive")[8])


def columns(timing: Timing | None, captured: bool = False) -> dict[str, float | None]:
    """A timing in a row of a table, or the gap where there is none."""
    time, spread = ("captured (ms)", "captured spread (%)") if captured else ("time (ms)", "spread (%)")
    return {time: 1e3 * timing.seconds, spread: 100 * timing.spread} if timing else {time: None, spread: None}


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one call takes."""

    eager: Timing  # launched kernel by kernel
    captured: Timing | None  # as one CUDA graph; None on a CPU, or where it cannot be one
    peak: int  # bytes of memory

    @property
    def best(self) -> Timing:
        return self.captured or self.eager


def compare(
    calls: Mapping[str, Call], setup: Setup, what: str, to_capture: Mapping[str, Callable[[], Tensor]] | None = None
) -> tuple[dict[str, Cost], tuple[str, ...]]:
    """Measure the cost of each call in the same run; on a GPU also of those in `to_capture`, as CUDA graphs.

    Returns the costs by name, and a sentence for each call that could not be captured.
    """
    graphs: dict[str, Callable[[], Tensor]] = {}
    failures = []
    if setup.cuda and to_capture is not None:
        for name, work in to_capture.items():
            try:
                graphs[f"{name}, captured"] = capture(work)
            except RuntimeError as error:  # a property of this call: the others are still measured
                failures.append(f"{name} was not captured: {str(error).splitlines()[0]}")
    times = time_in_turns({**calls, **graphs}, setup, what)
    costs = {}
    for name, call in calls.items():
        setup.progress(f"{what}: {name}, memory")
        costs[name] = Cost(times[name], times.get(f"{name}, captured"), measure_peak_memory(call, setup.device))
    return costs, tuple(failures)


def time_in_turns(calls: Mapping[str, Call], setup: Setup, what: str) -> dict[str, Timing]:
    """Time the calls in turns, after one to warm up, so that a busy moment of the machine affects all of them."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(setup.rounds):
        for name, call in calls.items():
            setup.progress(f"{what}: {name}, round {turn + 1} of {setup.rounds}")
            if turn == 0:
                call()
            times[name] += _sample(call, setup.device, setup.budget / setup.rounds)
    return {name: Timing.of(found) for name, found in times.items()}


def _sample(call: Call, device: torch.device, budget: float) -> list[float]:
    """Seconds of each call, device included, for about `budget` seconds in all; at least one."""
    _synchronize(device)
    times: list[float] = []
    begin = time.perf_counter()
    while not times or (time.perf_counter() - begin < budget and len(times) < MAX_CALLS):
        start = time.perf_counter()
        call()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return times


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Form: as a CUDA graph, in a memory layout


def capture(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """`call` as one CUDA graph; call the result to replay it. It may not read a tensor's value on the host."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # libraries choose their algorithms
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


def store_channels_last(module: nn.Module) -> nn.Module:
    """The module with its four-dimensional weights channels-last, as training and prediction store them."""
    return module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


# Memory


def measure_peak_memory(call: Call, device: torch.device) -> int:
    """Bytes above what was held before the call, as PyTorch's allocators count them."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    # The CPU allocator keeps no counters; the profiler records every allocation (+) and release (−).
    results = profile.profiler.kineto_results if profile.profiler is not None else None
    changes = [event for event in results.events() if event.name() == "[memory]"] if results is not None else []
    held = highest = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest


# Floating-point operations, and what the machine can do at best


def count_convolution_flops(call: Call) -> int:
    """Floating-point operations of all convolutions of one call on a CPU, backward ones included.

    On a GPU the count would miss those inside fused kernels. The first call does the work that is done once.
    """
    call()
    with FlopCounterMode(display=False) as counter:
        call()
    counts = counter.get_flop_counts().get("Global", {})
    return sum(count for operation, count in counts.items() if "conv" in str(operation))


def count_flops_per_image(make: Callable[[int], Call]) -> int:
    """The operations that one more image adds to `make(batch)`, without those a step does once per batch."""
    batch = 33  # in training a cell also observes the first 32 images of a batch, which must not count as growth
    return count_convolution_flops(make(batch + 1)) - count_convolution_flops(make(batch))


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a machine can do at best, measured in the same run as what is compared with it."""

    copy: float  # bytes/s, read + written
    matmul: float  # FLOP/s of a large matrix product
    dtype: str

    def __str__(self) -> str:
        products = f"{self.dtype} matrix products {self.matmul / 1e12:.3g} TFLOP/s"
        return f"This machine, measured in this run: copy {self.copy / 1e9:.0f} GB/s, {products}."


def measure_limits(setup: Setup) -> Limits:
    """Copy bandwidth and matrix products of this machine: bfloat16 on a GPU, float32 on a CPU."""
    dtype, side, numbers = (torch.bfloat16, 8192, 2**30) if setup.cuda else (torch.float32, 1024, 2**24)
    a, b = (torch.randn(side, side, device=setup.device, dtype=dtype) for _ in range(2))
    source = torch.randn(numbers, device=setup.device, dtype=dtype)
    target = torch.empty_like(source)
    calls = {"copy": lambda: target.copy_(source), "matmul": lambda: a @ b}
    times = time_in_turns(calls, setup, "limits of this machine")
    moved, flops = 2 * numbers * source.element_size(), 2 * side**3
    name = str(dtype).removeprefix("torch.")
    return Limits(moved / times["copy"].seconds, flops / times["matmul"].seconds, name)


# Kernels of a GPU

PARTS = ("convolution", "batch norm", "patch step", "other")
# What the names of cuDNN's, cuBLAS's and CUTLASS's kernels have in common; the few matrix products count with them.
CONVOLUTIONS = ("conv", "cutlass", "xmma", "gemm", "dgrad", "wgrad", "fprop", "cudnn")


@dataclasses.dataclass(frozen=True)
class Profile:
    """Where the time of a step goes on a GPU, by kind of kernel."""

    kernels: int
    seconds: dict[str, float]  # by part

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def profile_kernels(call: Call) -> Profile:
    """One call on a GPU, after one to warm up."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    seconds, kernels = dict.fromkeys(PARTS, 0.0), 0
    for event in profile.events() or []:
        if str(event.device_type).endswith("CUDA"):
            kernels += 1
            seconds[classify_kernel(event.name.lower())] += event.device_time_total / 1e6
    return Profile(kernels, seconds)


def classify_kernel(kernel: str) -> str:
    """The part that a kernel of this (lower-case) name belongs to."""
    if kernel.startswith("norm_") or any(word in kernel for word in ("bn_", "batchnorm", "batch_norm")):
        return "batch norm"
    if any(word in kernel for word in CONVOLUTIONS):
        return "convolution"
    return "patch step" if kernel.startswith("radial_") else "other"
