"""GEQ-5M beside ResNet-18: a training step in the same loop, on a GPU also where its time goes; and prediction."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import kerneq as kq

from .measure import (
    PARTS,
    SPREAD,
    Cost,
    Limits,
    Setup,
    columns,
    compare,
    count_convolution_flops,
    count_flops_per_image,
    measure_limits,
    profile_kernels,
    store_channels_last,
)
from .results import Result, ratio

# The settings of GEQ-5M, all here: they follow the fields of `[model]` in an experiment file.
FIXED: dict[str, Any] = {"solver": kq.solvers.Picard(), "max_steps": 4, "check_every": 4}
TO_TOL: dict[str, Any] = {"solver": kq.solvers.Proximal(), "tol": 1e-2, "max_steps": 30}
THREE_BACK = kq.gradients.Implicit(
    kq.solvers.InFeatures(kq.solvers.Picard()), tol=1e-3, max_steps=3, on_failure="return"
)
SMALL = {"width": 32, "features": (8,) * 6}  # for --quick
ONE_STREAM = {"overlap": False}  # branches one after another, so that their kernels do not overlap
# 4 + 4: four evaluations forward; backward four products with the adjoint (the source and the recovery are one).
TRAINED: dict[str, tuple[str, dict[str, Any]]] = {
    "geq-5m, implicit in features, 4 + 4": ("geq-5m", FIXED | {"gradient": THREE_BACK}),
    "geq-5m, phantom, 4 + 4": ("geq-5m", FIXED | {"gradient": kq.gradients.Phantom(4)}),
    "geq-5m, as published": ("geq-5m", {"solver": kq.solvers.Anderson(), "gradient": kq.gradients.Phantom()}),
    "resnet18": ("resnet18", {}),
}
ADAPTIVE = "geq-5m, as published"  # its solver checks the residual, so it cannot be a graph


def _build(name: str, settings: dict[str, Any], setup: Setup) -> nn.Module:
    small = SMALL if setup.quick and name != "resnet18" else {}
    return kq.models.build(name, settings=settings | small)


# Training


def bench_train(setup: Setup) -> Iterator[Result]:
    """A training step of GEQ-5M and of ResNet-18, and where its time goes."""
    limits = measure_limits(setup)
    for batch in (512, 128) if setup.cuda else (2 if setup.quick else 16,):
        what = f"training step, batch {batch}"
        steps = {name: _make_training_step(*case, batch, setup) for name, case in TRAINED.items()}
        fixed = {name: step for name, step in steps.items() if name != ADAPTIVE}
        costs, failures = compare(steps, setup, what, fixed)
        setup.progress(f"{what}: operations")
        flops = {name: _flops(name, batch, setup) for name in TRAINED}
        yield _make_step_table(costs, flops, batch, limits, setup, failures)
        if setup.cuda:
            setup.progress(f"{what}: kernels")
            yield _make_kernel_table(flops, batch, limits, setup)


def _make_training_step(model: str, settings: dict[str, Any], batch: int, setup: Setup) -> Callable[[], Tensor]:
    """Forward, backward and SGD on one batch of noise; returns the loss."""
    torch.manual_seed(0)
    device = setup.device
    network = store_channels_last(_build(model, settings, setup).to(device).train())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4)
    x = torch.randn(batch, 3, 32, 32, device=device).to(memory_format=torch.channels_last)
    y = torch.randint(10, (batch,), device=device)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=setup.cuda):
            loss = cross_entropy(network(x), y, label_smoothing=0.1)
        torch.autograd.backward(loss)
        optimizer.step()
        return loss.detach()

    return step


def _flops(name: str, batch: int, setup: Setup) -> int | None:
    """Operations of the convolutions of a step; for a GPU counted on a CPU copy, None where the solve is adaptive."""
    if not setup.cuda:
        return count_convolution_flops(_make_training_step(*TRAINED[name], batch, setup))
    return None if name == ADAPTIVE else batch * _flops_per_image(name, setup.quick)


@functools.cache
def _flops_per_image(name: str, quick: bool) -> int:
    on_cpu = Setup(torch.device("cpu"), quick, lambda doing: None)
    return count_flops_per_image(lambda batch: _make_training_step(*TRAINED[name], batch, on_cpu))


def _make_step_table(
    costs: dict[str, Cost],
    flops: dict[str, int | None],
    batch: int,
    limits: Limits,
    setup: Setup,
    failures: tuple[str, ...],
) -> Result:
    reference = costs["resnet18"].best.seconds
    rows = []
    for name, cost in costs.items():
        seconds, count = cost.best.seconds, flops[name]
        row: dict[str, Any] = {
            "model": name,
            **columns(cost.best),
            "images/s": round(batch / seconds),
            "÷ resnet18": seconds / reference,
        }
        if setup.cuda:
            row["uncaptured (ms)"] = 1e3 * cost.eager.seconds
        row["peak (MiB)"] = cost.peak / 2**20
        row["GFLOP/image"] = ratio(count, 1e9 * batch)
        row["TFLOP/s"] = ratio(count, 1e12 * seconds)
        row["% of matmul"] = ratio(count, limits.matmul * seconds / 100)
        rows.append(row)
    precision = "bfloat16, channels-last, one CUDA graph where it can be" if setup.cuda else "float32, channels-last"
    notes = (str(limits), "GFLOP, TFLOP/s: of the convolutions, over the whole step.", SPREAD, *failures)
    title = f"Training step, batch {batch}, 32 × 32, {precision}"
    return Result("train", title, rows, notes, {"table": "step", "batch": batch})


def _make_kernel_table(flops: dict[str, int | None], batch: int, limits: Limits, setup: Setup) -> Result:
    rows = []
    for name, (model, settings) in TRAINED.items():
        serial = settings | ONE_STREAM if model != "resnet18" else settings
        profile = profile_kernels(_make_training_step(model, serial, batch, setup))
        convolutions = profile.seconds["convolution"]
        row: dict[str, Any] = {"model": name, "kernels": profile.kernels, "card time (ms)": 1e3 * profile.total}
        for part in PARTS:
            row[f"{part} %"] = 100 * profile.seconds[part] / profile.total
        row["not convolution (ms)"] = 1e3 * (profile.total - convolutions)
        row["convolutions, % of matmul"] = ratio(flops[name], limits.matmul * convolutions / 100)
        rows.append(row)
    notes = (
        "Sums over all kernels of one step, branches one after another; a step whose branches overlap is shorter.",
        "convolutions, % of matmul: their rate while they run, over that of a large matrix product.",
    )
    title = f"Where the card's time goes, batch {batch}"
    return Result("train", title, rows, notes, {"table": "parts", "batch": batch})


# Prediction

TO_RESIDUAL = "geq-5m, to a residual of 1e-2"  # checks the residual: only `kq.capture` makes a graph of it


def bench_inference(setup: Setup) -> Iterator[Result]:
    """Latency and throughput of prediction."""
    models = _build_predictors(setup)
    for batch in (1, 32, 512) if setup.cuda else (1, 4 if setup.quick else 32):
        calls = {name: _make_prediction(model, batch, setup) for name, model in models.items()}
        fixed = {name: call for name, call in calls.items() if name != TO_RESIDUAL}
        if setup.cuda:
            fast = _make_prediction(kq.capture(models[TO_RESIDUAL]), batch, setup)
            for _ in range(2):  # the second call captures
                fast()
            calls[f"{TO_RESIDUAL}, captured"] = fast
        costs, failures = compare(calls, setup, f"prediction, batch {batch}", fixed)
        times = {name: cost.eager for name, cost in costs.items()}
        times |= {f"{name}, captured": cost.captured for name, cost in costs.items() if cost.captured}
        rows = []
        for name, timing in times.items():  # each beside ResNet-18 run the same way, captured or not
            reference = times.get("resnet18, captured" if "captured" in name else "resnet18")
            rows.append(
                {
                    "model": name,
                    **columns(timing),
                    "late (ms)": 1e3 * timing.p90,
                    "images/s": round(batch / timing.seconds),
                    "÷ resnet18 likewise": timing.seconds / reference.seconds if reference else None,
                }
            )
        notes = [SPREAD, "late: the 90th percentile of the calls."]
        if setup.cuda:
            notes.append("captured: the whole forward pass as one CUDA graph; to a residual: by `kq.capture`.")
        precision = "bfloat16" if setup.cuda else "float32"
        title = f"Prediction, batch {batch}, 32 × 32, {precision}, channels-last"
        yield Result("inference", title, rows, (*notes, *failures), {"table": "prediction", "batch": batch})


def _build_predictors(setup: Setup) -> dict[str, nn.Module]:
    made = {
        TO_RESIDUAL: _build("geq-5m", TO_TOL, setup),
        "geq-5m, 4 steps": _build("geq-5m", FIXED, setup),
        "resnet18": _build("resnet18", {}, setup),
    }
    if not (setup.quick or setup.cuda):
        compiled = _build("geq-5m", FIXED, setup)
        assert isinstance(compiled, kq.models.Classifier)
        compiled.compile_map()
        made["geq-5m, 4 steps, compiled map"] = compiled
    return {name: store_channels_last(model.to(setup.device).eval()) for name, model in made.items()}


def _make_prediction(model: nn.Module, batch: int, setup: Setup) -> Callable[[], Tensor]:
    x = torch.randn(batch, 3, 32, 32, device=setup.device).to(memory_format=torch.channels_last)

    @torch.no_grad()
    def predict() -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            logits: Tensor = model(x)
        return logits

    return predict
