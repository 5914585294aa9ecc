"""Prediction: latency of one picture, throughput of many."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kerneq.bench.peers import captured
from kerneq.bench.table import Result
from kerneq.bench.timing import Bench, Timing, Work, alternate, in_layout
from kerneq.models import build

TO_TOL = {"solver": {"name": "proximal"}, "tol": 1e-2, "max_steps": 30}
FIXED = {"solver": {"name": "picard"}, "max_steps": 4, "check_every": 4}


def bench_inference(bench: Bench) -> Iterator[Result]:
    models = _models(bench)
    for batch in (1, 32, 512) if bench.cuda else (1, 4 if bench.quick else 32):
        plain = {name: _predict(model, batch, bench, last) for name, (model, last) in models.items()}
        works: dict[str, Work] = dict(plain)
        notes = ["late: the 90th percentile of the calls."]
        if bench.cuda:
            fixed = {f"{name}, captured": work for name, work in plain.items() if "residual" not in name}
            graphs, failures = captured(fixed)
            works |= graphs
            notes += ["captured: the whole forward pass as one CUDA graph.", *failures]
        times = alternate(works, bench, f"prediction, batch {batch}")
        precision = "bfloat16, channels-last" if bench.cuda else "float32"
        title = f"Prediction, batch {batch}, 32 × 32, {precision}"
        yield Result("inference", title, _rows(times, batch), tuple(notes), {"table": "prediction", "batch": batch})


def _rows(times: dict[str, Timing], batch: int) -> list[dict[str, Any]]:
    """Each beside ResNet-18 run the same way, captured or not."""
    references = {True: times.get("resnet18, captured"), False: times["resnet18"]}
    rows = []
    for name, timing in times.items():
        reference = references["captured" in name]
        rows.append(
            {
                "model": name,
                "time (ms)": 1e3 * timing.seconds,
                "late (ms)": 1e3 * timing.late,
                "images/s": round(batch / timing.seconds),
                "÷ resnet18 likewise": timing.seconds / reference.seconds if reference else None,
            }
        )
    return rows


def _models(bench: Bench) -> dict[str, tuple[nn.Module, bool]]:
    """Each with whether its memory is channels-last."""
    small = {"width": 32, "features": (8,) * 6} if bench.quick else {}
    made = {
        "geq-5m, to a residual of 1e-2": (build("geq-5m", settings=TO_TOL | small), bench.cuda),
        "geq-5m, 4 steps": (build("geq-5m", settings=FIXED | small), bench.cuda),
        "resnet18": (build("resnet18"), bench.cuda),
    }
    if not bench.cuda:
        made["geq-5m, 4 steps, channels-last"] = (build("geq-5m", settings=FIXED | small), True)
    if not (bench.quick or bench.cuda):
        compiled = build("geq-5m", settings=FIXED)
        compiled.compile_map()
        made["geq-5m, 4 steps, compiled map"] = (compiled, False)
    return {name: (in_layout(model.to(bench.device).eval(), last), last) for name, (model, last) in made.items()}


def _predict(model: nn.Module, batch: int, bench: Bench, last: bool) -> Callable[[], Tensor]:
    layout = torch.channels_last if last else torch.contiguous_format
    x = torch.randn(batch, 3, 32, 32, device=bench.device).to(memory_format=layout)

    @torch.no_grad()
    def work() -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            logits: Tensor = model(x)
        return logits

    return work
