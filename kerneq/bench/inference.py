"""Prediction: latency of one picture, throughput of many."""

from collections.abc import Iterator

import torch

from kerneq.bench.table import Result
from kerneq.bench.timing import Work, alternate, effort, in_layout
from kerneq.models import build

TO_TOL = {"solver": "proximal", "tol": 1e-2, "max_steps": 30}
FIXED = {"solver": "picard", "max_steps": 4, "check_every": 4}


def bench_inference(device: torch.device, quick: bool) -> Iterator[Result]:
    cuda = device.type == "cuda"
    small = {"width": 32, "features": (8,) * 6} if quick else {}
    cases = {
        "geq-5m, to a residual of 1e-2": build("geq-5m", settings=TO_TOL | small),
        "geq-5m, 4 steps": build("geq-5m", settings=FIXED | small),
        "geq-5m, 4 steps, channels-last": build("geq-5m", settings=FIXED | small),
        "resnet18": build("resnet18"),
    }
    if not quick and not cuda:
        cases["geq-5m, 4 steps, compiled map"] = build("geq-5m", settings=FIXED)
        cases["geq-5m, 4 steps, compiled map"].compile_map()
    for batch in (1, 512) if cuda else (1, 4 if quick else 32):
        works: dict[str, Work] = {}
        for name, model in cases.items():
            last = cuda or "channels-last" in name
            layout = torch.channels_last if last else torch.contiguous_format
            x = torch.randn(batch, 3, 32, 32, device=device).to(memory_format=layout)
            works[name] = _predict(in_layout(model.to(device).eval(), last), x)
        times = alternate(works, device, *effort(device, quick))
        reference = times["resnet18"].seconds
        rows = [
            {
                "model": name,
                "time (ms)": 1e3 * timing.seconds,
                "images/s": round(batch / timing.seconds),
                "÷ resnet18": timing.seconds / reference,
            }
            for name, timing in times.items()
        ]
        precision = "bfloat16, channels-last" if cuda else "float32"
        yield Result("inference", f"prediction, batch {batch}, 32 × 32, {precision}, eager", rows)


def _predict(model: torch.nn.Module, x: torch.Tensor) -> Work:
    @torch.no_grad()
    def work() -> torch.Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            logits: torch.Tensor = model(x)
        return logits

    return work
