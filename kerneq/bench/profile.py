"""Where the time of a step goes on a card, by kind of kernel."""

import dataclasses
from collections.abc import Callable

import torch

PARTS = ("convolution", "batch norm", "patch step", "other")
# What the names of cuDNN's, cuBLAS's and CUTLASS's kernels have in common; the few matrix products count with them.
CONVOLUTIONS = ("conv", "cutlass", "xmma", "gemm", "dgrad", "wgrad", "fprop", "cudnn")


@dataclasses.dataclass(frozen=True)
class Profile:
    kernels: int
    seconds: dict[str, float]  # by part

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def profile_of(step: Callable[[], object]) -> Profile:
    """One step, after one to warm up."""
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        step()
        torch.cuda.synchronize()
    seconds, kernels = dict.fromkeys(PARTS, 0.0), 0
    for event in profile.events() or []:
        if str(event.device_type).endswith("CUDA"):
            kernels += 1
            seconds[part_of(event.name.lower())] += event.device_time_total / 1e6
    return Profile(kernels, seconds)


def part_of(kernel: str) -> str:
    """The part a kernel of this (lower-case) name belongs to; ours are `norm_*` and `radial_*`."""
    if kernel.startswith("norm_") or any(word in kernel for word in ("bn_", "batchnorm", "batch_norm")):
        return "batch norm"
    if any(word in kernel for word in CONVOLUTIONS):
        return "convolution"
    return "patch step" if kernel.startswith("radial_") else "other"
