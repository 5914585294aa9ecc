"""How time and memory of one layer, forward and backward, grow with batch, picture size, steps and width."""

from collections.abc import Iterator
from typing import Any

import torch

from kerneq.bench.memory import peak_memory
from kerneq.bench.table import Result
from kerneq.bench.timing import in_layout, measure
from kerneq.cells import ConvCell
from kerneq.equilibrium import Equilibrium
from kerneq.gradients import Implicit, InFeatures
from kerneq.kernels import Gaussian
from kerneq.solvers import Picard

GPU = {"batch": (1, 4, 16, 64, 256, 1024), "picture": (16, 32, 64, 128, 256), "steps": (2, 4, 8, 16, 32)}
CPU = {"batch": (1, 2, 4, 8, 16), "picture": (16, 32, 64), "steps": (2, 4, 8, 16)}
WIDTHS = {"width": (64, 128, 256, 512)}


def bench_scaling(device: torch.device, quick: bool) -> Iterator[Result]:
    cuda = device.type == "cuda"
    base = {"batch": 64 if cuda else 4, "picture": 32, "steps": 4, "width": 256 if cuda else 64}
    grid: dict[str, tuple[int, ...]] = (GPU if cuda else CPU) | (WIDTHS if cuda else {"width": (32, 64, 128)})
    for quantity, values in grid.items():
        rows: list[dict[str, Any]] = []
        for value in values[:2] if quick else values:
            work = _work(device=device, **(base | {quantity: value}))
            timing = measure(work, device, budget=0.05 if quick else 0.5, warmup=1)
            peak = peak_memory(work, device)
            first = rows[0] if rows else None
            rows.append(
                {
                    quantity: value,
                    "time (ms)": 1e3 * timing.seconds,
                    "× the first": 1e3 * timing.seconds / first["time (ms)"] if first else 1.0,
                    "peak (MiB)": peak / 2**20,
                }
            )
        fixed = ", ".join(f"{name} {value}" for name, value in base.items() if name != quantity)
        precision = "bfloat16" if cuda else "float32"
        yield Result("scaling", f"forward + backward of one layer by {quantity}; {fixed}; {precision}", rows)


def _work(device: torch.device, batch: int, picture: int, steps: int, width: int) -> Any:
    torch.manual_seed(0)
    cell = ConvCell(Gaussian(0.2), inputs=width // 4, state=width, features=width // 4).to(device)
    backward = Implicit(InFeatures(Picard()), 1e-3, steps, steps, on_failure="return")
    equilibrium = Equilibrium(cell, solver=Picard(), gradient=backward, max_steps=steps, check_every=steps)
    layer = in_layout(equilibrium.train(), channels_last=True)
    x = torch.randn(batch, width // 4, picture, picture, device=device).to(memory_format=torch.channels_last)

    def work() -> None:
        layer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            value = layer(x).value
        torch.autograd.backward(value, torch.ones_like(value))

    return work
