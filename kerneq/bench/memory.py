"""Peak memory of a call: the allocator's own count on a GPU, the resident size of the process on a CPU."""

import gc
import os
import threading
from collections.abc import Callable

import torch

PAGE = os.sysconf("SC_PAGE_SIZE")


def peak_memory(work: Callable[[], object], device: torch.device) -> int:
    """Bytes above what was held before the call. On a CPU a thread samples the resident size, so it is a little low."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    before = highest = _resident()
    done = threading.Event()

    def sample() -> None:
        nonlocal highest
        while not done.wait(0.001):
            highest = max(highest, _resident())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        work()
    finally:
        done.set()
        thread.join()
    return highest - before


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * PAGE
