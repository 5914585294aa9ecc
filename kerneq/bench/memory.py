"""Peak memory of a call, as PyTorch's allocators count it."""

import gc
from collections.abc import Callable

import torch


def peak_memory(work: Callable[[], object], device: torch.device) -> int:
    """Bytes above what was held before the call."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    # The CPU allocator keeps no counters; the profiler records every allocation (+) and release (−).
    results = profile.profiler.kineto_results if profile.profiler is not None else None
    changes = [event for event in results.events() if event.name() == "[memory]"] if results is not None else []
    held = highest = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest
