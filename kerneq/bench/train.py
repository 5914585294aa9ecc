"""A training step of GEQ-5M by gradient rule, and of ResNet-18, in the same loop; on a GPU also where its time goes."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kerneq.bench.table import Result
from kerneq.bench.timing import capture, in_layout, limits, measure
from kerneq.models import build

FIXED = {"solver": "picard", "max_steps": 4, "check_every": 4}
# 4 + 4: four evaluations forward; backward four products with the adjoint (the source and the recovery are one).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "geq-5m, implicit in features, 4 + 4": ("geq-5m", FIXED | {"gradient_solver": "picard", "gradient_steps": 3}),
    "geq-5m, phantom, 4 + 4": ("geq-5m", FIXED | {"gradient": "phantom", "gradient_steps": 4}),
    "geq-5m, as published": ("geq-5m", {"solver": "anderson", "gradient": "phantom", "gradient_steps": 5}),
    "resnet18": ("resnet18", {}),
}
PARTS = ("convolution", "batch norm", "patch step", "other")


def bench_train(device: torch.device, quick: bool) -> Iterator[Result]:
    cuda = device.type == "cuda"
    best = limits(device)
    for batch in (512, 128) if cuda else (4 if quick else 16,):
        rows = []
        for name, (model, settings) in CASES.items():
            if quick and name != "resnet18":
                settings = settings | {"width": 32, "features": (8,) * 6}
            captured = cuda and name != "geq-5m, as published"  # its solver looks at the residual
            rows.append(_row(name, model, settings, batch, device, captured))
        reference = rows[-1]["time (ms)"]
        rows = [row | {"÷ resnet18": row["time (ms)"] / reference} for row in rows]
        precision = "bfloat16, channels-last, a CUDA graph where captured" if cuda else "float32"
        title = f"training step, batch {batch}, 32 × 32, {precision}"
        machine = (
            f"This machine: copy {best['copy'] / 1e9:.0f} GB/s, matrix products {best['matmul'] / 1e12:.3g} TFLOP/s."
        )
        shares = "Shares: of the card's time in all kernels, branches one after another." if cuda else ""
        yield Result("train", title, rows, tuple(note for note in (machine, shares) if note))


def _row(
    name: str, model: str, settings: dict[str, Any], batch: int, device: torch.device, captured: bool
) -> dict[str, Any]:
    step = _make_step(model, settings, batch, device)
    eager = measure(step, device, budget=1.0)
    timing = measure(capture(step), device, budget=1.0) if captured else eager
    row = {
        "model": name,
        "time (ms)": 1e3 * timing.seconds,
        "images/s": round(batch / timing.seconds),
        "eager (ms)": 1e3 * eager.seconds,
        "peak (MiB)": eager.peak / 2**20,
    }
    if device.type == "cuda":
        alone = settings | {"overlap": False} if model.startswith("geq") else settings
        row |= {f"{part} %": share for part, share in _shares(_make_step(model, alone, batch, device)).items()}
    return row


def _make_step(model: str, settings: dict[str, Any], batch: int, device: torch.device) -> Callable[[], Tensor]:
    torch.manual_seed(0)
    layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
    network = in_layout(build(model, settings=settings).to(device).train(), device.type == "cuda")
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4)
    x = torch.randn(batch, 3, 32, 32, device=device).to(memory_format=layout)
    y = torch.randint(10, (batch,), device=device)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = cross_entropy(network(x), y, label_smoothing=0.1)
        torch.autograd.backward(loss)
        optimizer.step()
        return loss.detach()

    return step


def _shares(step: Callable[[], Tensor]) -> dict[str, float]:
    """How the card's time divides among kinds of kernels."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        step()
        torch.cuda.synchronize()
    times = dict.fromkeys(PARTS, 0.0)
    for event in profile.events() or []:
        if str(event.device_type).endswith("CUDA"):
            times[_part(event.name.lower())] += event.device_time_total
    total = sum(times.values())
    return {part: 100 * seconds / total for part, seconds in times.items()}


def _part(kernel: str) -> str:
    if "bn_" in kernel or "batchnorm" in kernel or "batch_norm" in kernel:
        return "batch norm"
    if any(word in kernel for word in ("conv", "cutlass", "xmma", "gemm", "dgrad", "wgrad", "fprop", "cudnn")):
        return "convolution"
    return "patch step" if kernel in ("forward", "backward") else "other"
