"""What a machine can do at best, and what a step asks of it."""

from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode

from kerneq.bench.timing import measure


def limits(device: torch.device, quick: bool) -> dict[str, float]:
    """What this machine can do: copy bandwidth (bytes/s, read + written) and matrix products (FLOP/s)."""
    cuda = device.type == "cuda"
    dtype, side, numbers = (torch.bfloat16, 8192, 2**30) if cuda else (torch.float32, 1024, 2**24)
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    source = torch.randn(numbers, device=device, dtype=dtype)
    target = torch.empty_like(source)
    budget = 0.05 if quick else 0.3
    product = measure(lambda: a @ b, device, budget, warmup=2)
    copy = measure(lambda: target.copy_(source), device, budget, warmup=2)
    moved = 2 * numbers * source.element_size()
    return {"copy": moved / copy.seconds, "matmul": 2 * side**3 / product.seconds}


def in_words(best: dict[str, float], device: torch.device) -> str:
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    products = f"{dtype} matrix products {best['matmul'] / 1e12:.3g} TFLOP/s"
    return f"This machine, measured in this run: copy {best['copy'] / 1e9:.0f} GB/s, {products}."


def convolution_flops(step: Callable[[], object]) -> int:
    """Floating-point operations of all convolutions of one call on a CPU, backward ones included.

    On a GPU the count would miss those inside fused kernels. The first call settles what is settled once.
    """
    step()
    with FlopCounterMode(display=False) as counter:
        step()
    counts = counter.get_flop_counts().get("Global", {})
    return sum(count for operation, count in counts.items() if "conv" in str(operation))


def flops_of_an_image(make: Callable[[int], Callable[[], object]], batch: int) -> int:
    """What one image more than `batch` adds: without what a step does once, whatever its batch."""
    return convolution_flops(make(batch + 1)) - convolution_flops(make(batch))
