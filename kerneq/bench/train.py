"""A training step of GEQ-5M by gradient rule, and of ResNet-18, in the same loop; on a GPU also where its time goes."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kerneq.bench.limits import convolution_flops, flops_of_an_image, in_words, limits
from kerneq.bench.memory import peak_memory
from kerneq.bench.peers import captured
from kerneq.bench.profile import Profile, profile_of
from kerneq.bench.table import Result
from kerneq.bench.timing import Bench, Work, alternate, in_layout
from kerneq.cells.base import OBSERVED
from kerneq.models import build

FIXED = {"solver": {"name": "picard"}, "max_steps": 4, "check_every": 4}
PICARD = {"name": "in-features", "solver": {"name": "picard"}}
# 4 + 4: four evaluations forward; backward four products with the adjoint (the source and the recovery are one).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "geq-5m, implicit in features, 4 + 4": ("geq-5m", FIXED | {"gradient": {"solver": PICARD, "max_steps": 3}}),
    "geq-5m, phantom, 4 + 4": ("geq-5m", FIXED | {"gradient": {"name": "phantom", "steps": 4}}),
    "geq-5m, as published": (
        "geq-5m",
        {"solver": {"name": "anderson"}, "gradient": {"name": "phantom", "steps": 5}},
    ),
    "resnet18": ("resnet18", {}),
}
LOOKS = "geq-5m, as published"  # its solver looks at the residual, so no graph holds it
SMALL = {"width": 32, "features": (8,) * 6}


@dataclasses.dataclass(frozen=True)
class Step:
    """What one training step of a model takes."""

    eager: float  # seconds
    captured: float | None  # as a CUDA graph
    flops: int | None  # of its convolutions, where that is known
    peak: int
    profile: Profile | None

    @property
    def seconds(self) -> float:
        return self.captured or self.eager


def bench_train(bench: Bench) -> Iterator[Result]:
    best = limits(bench.device, bench.quick)
    for batch in (512, 128) if bench.cuda else (2 if bench.quick else 16,):
        steps: dict[str, Step] = {}
        failures: tuple[str, ...] = ()
        for name in CASES:
            steps[name], missed = _measure(name, batch, bench)
            failures += missed
        yield _times(steps, batch, best, bench, failures)
        if bench.cuda:
            yield _parts(steps, batch, best)


def _measure(name: str, batch: int, bench: Bench) -> tuple[Step, tuple[str, ...]]:
    model, settings = CASES[name]
    if bench.quick and model != "resnet18":
        settings = settings | SMALL
    what = f"training step, batch {batch}, {name}"
    bench.say(what)
    step = _make_step(model, settings, batch, bench.device)
    step()
    peak = peak_memory(step, bench.device)
    works: dict[str, Work] = {"eager": step}
    failures: tuple[str, ...] = ()
    if bench.cuda and name != LOOKS:
        graphs, failures = captured({"captured": step})
        works |= graphs
    times = {key: timing.seconds for key, timing in alternate(works, bench, what).items()}
    profile = None
    if bench.cuda:
        bench.say(f"{what}: kernels")
        alone = settings | {"overlap": False} if model.startswith("geq") else settings
        profile = profile_of(_make_step(model, alone, batch, bench.device))
    bench.say(f"{what}: operations")
    return Step(times["eager"], times.get("captured"), _flops(name, settings, batch, bench), peak, profile), failures


def _flops(name: str, settings: dict[str, Any], batch: int, bench: Bench) -> int | None:
    """Of the convolutions of a step. On a GPU counted by a twin on the CPU, which cannot know how far a solve looks."""
    if not bench.cuda:
        return convolution_flops(_make_step(CASES[name][0], settings, batch, bench.device))
    return None if name == LOOKS else batch * _flops_of_an_image(name)


@functools.cache
def _flops_of_an_image(name: str) -> int:
    model, settings = CASES[name]
    return flops_of_an_image(lambda size: _make_step(model, settings, size, torch.device("cpu")), OBSERVED + 1)


def _times(
    steps: dict[str, Step], batch: int, best: dict[str, float], bench: Bench, failures: tuple[str, ...]
) -> Result:
    reference = steps["resnet18"]
    rows = []
    for name, step in steps.items():
        row: dict[str, Any] = {
            "model": name,
            "time (ms)": 1e3 * step.seconds,
            "images/s": round(batch / step.seconds),
            "÷ resnet18": step.seconds / reference.seconds,
        }
        if bench.cuda:
            row["uncaptured (ms)"] = 1e3 * step.eager
        row |= {
            "peak (MiB)": step.peak / 2**20,
            "GFLOP/image": step.flops / batch / 1e9 if step.flops else None,
            "TFLOP/s": step.flops / step.seconds / 1e12 if step.flops else None,
            "% of matmul": 100 * step.flops / step.seconds / best["matmul"] if step.flops else None,
        }
        rows.append(row)
    precision = "bfloat16, channels-last, one CUDA graph where it can be" if bench.cuda else "float32"
    notes = (in_words(best, bench.device), "GFLOP, TFLOP/s: of the convolutions, over the whole step.", *failures)
    title = f"Training step, batch {batch}, 32 × 32, {precision}"
    return Result("train", title, rows, notes, {"table": "step", "batch": batch})


def _parts(steps: dict[str, Step], batch: int, best: dict[str, float]) -> Result:
    rows = []
    for name, step in steps.items():
        if step.profile is None:
            continue
        total, convolutions = step.profile.total, step.profile.seconds["convolution"]
        rate = step.flops / convolutions / best["matmul"] if convolutions and step.flops else None
        rows.append(
            {"model": name, "kernels": step.profile.kernels, "card time (ms)": 1e3 * total}
            | {f"{part} %": 100 * seconds / total for part, seconds in step.profile.seconds.items()}
            | {"not convolution (ms)": 1e3 * (total - convolutions)}
            | {"convolutions, % of matmul": 100 * rate if rate else None}
        )
    notes = (
        "Sums over all kernels of one step, branches one after another; a step whose branches overlap is shorter.",
        "convolutions, % of matmul: their rate while they run, over that of a large matrix product.",
    )
    return Result(
        "train", f"Where the card's time goes, batch {batch}", rows, notes, {"table": "parts", "batch": batch}
    )


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
