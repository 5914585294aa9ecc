"""Kernel GLMs: time and memory at scale, the exact fits beside scikit-learn's, and how few centres are enough."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF
from sklearn.kernel_ridge import KernelRidge
from torch import Tensor

from kerneq import kglm

from .measure import Setup
from .results import Result

DIMENSIONS = 10
LENGTH = 3.0
FAMILIES: dict[str, kglm.AbstractFamily] = {
    "logistic": kglm.Bernoulli(),
    "counts": kglm.Poisson(),
    "10 classes": kglm.Categorical(10),
}
DATA = (
    "Data: 10 standard normal coordinates, targets drawn from a smooth function of them; SE kernel of length 3, λ = 1."
)
ONCE = (
    "Each fit is timed once, from the data to the fitted model, the choice of centres included: on a CPU in seconds of "
    "the processor, over all threads."
)


def bench_scale(setup: Setup) -> Iterator[Result]:
    """Kernel GLMs of low rank: time, memory and passes of every family at size."""
    _warm_up(setup)
    yield _measure_scale(setup)


def bench_exact(setup: Setup) -> Iterator[Result]:
    """Exact kernel GLMs beside scikit-learn's."""
    _warm_up(setup)
    for n in (200,) if setup.quick else (1000, 2000, 4000, 10_000):
        yield _measure_exact(setup, n)


def bench_growth(setup: Setup) -> Iterator[Result]:
    """Kernel GLMs of low rank: how time grows with samples and with centres."""
    _warm_up(setup)
    for axis in ("n", "centres"):
        yield _measure_growth(setup, axis)


def bench_centres(setup: Setup) -> Iterator[Result]:
    """Kernel GLMs of low rank: how near they are to the exact fit as centres are added."""
    _warm_up(setup)
    yield _measure_centres(setup)


def _warm_up(setup: Setup) -> None:
    _fit("logistic", kglm.Nystrom(kglm.Matern(), 5), *make_data("logistic", 50, setup.device))  # imports, kernels


def make_data(name: str, n: int, device: torch.device, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return coordinates (n, 10) and targets (n,) of a known smooth function."""
    g = torch.Generator().manual_seed(0)
    X = torch.randn(n, DIMENSIONS, generator=g, dtype=dtype)
    f = 2 * (2 * X[:, 0]).sin() + X[:, 1] * X[:, 2] - X[:, 3]
    if name == "logistic":
        Y = torch.bernoulli(f.sigmoid(), generator=g)
    elif name == "counts":
        Y = torch.poisson((0.5 * f).clamp(max=4).exp(), generator=g)
    elif name == "ridge":
        Y = f + 0.5 * torch.randn(n, generator=g, dtype=dtype)
    else:
        shifts = torch.stack([f * (1 + 0.3 * k) + X[:, k] for k in range(DIMENSIONS)], 1)
        Y = torch.multinomial(shifts.softmax(1), 1, generator=g)[:, 0].to(dtype)
    return X.to(device), Y.to(device)


def _fit(name: str, kernel: Any, X: Tensor, Y: Tensor) -> kglm.KernelGLM:
    family = kglm.Gaussian() if name == "ridge" else FAMILIES[name]
    return kglm.KernelGLM(kernel, family, lam=1.0).fit(X, Y)


def _time(work: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Return the seconds of one call, on a CPU the processor's, and what it returned."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    begin = clock()
    found = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - begin, found


def _measure_scale(setup: Setup) -> Result:
    """Time, memory and passes of low-rank fits of every family."""
    grid = [("logistic", 100_000, 2000), ("counts", 30_000, 1000), ("10 classes", 30_000, 1000)]
    if setup.cuda:
        grid = [(name, n, m) for name in FAMILIES for n, m in ((100_000, 2000), (1_000_000, 2000), (1_000_000, 10_000))]
    rows = []
    for name, n, m in [(name, 500, 20) for name in FAMILIES] if setup.quick else grid:
        setup.progress(f"{name}, n = {n}, {m} centres")
        X, Y = make_data(name, n, setup.device)
        plan = kglm.Nystrom(kglm.SquaredExponential(LENGTH), m)
        seconds, glm = _time(partial(_fit, name, plan, X, Y), setup.device)
        fit = glm.result
        row: dict[str, Any] = {"targets": name, "n": n, "centres": m, "time (s)": seconds, "steps": fit.steps}
        row |= {"passes": fit.passes, "converged": str(bool(fit.converged.all()))}
        row["training loss"] = glm.loss(X[:20_000], Y[:20_000])
        row["peak (MiB)"] = torch.cuda.max_memory_allocated() / 2**20 if setup.cuda else None
        rows.append(row)
    notes = (DATA, ONCE, "passes: products with all of k(X, C), which is kept where it fits in memory.")
    return Result("kglm-scale", "Kernel GLMs of low rank; float64", rows, notes, {"table": "scale"})


def _measure_growth(setup: Setup, axis: str) -> Result:
    """The time of logistic fits as n grows, or m, and its slope in logarithms."""
    pairs = [(n, 500) for n in (5000, 10_000, 20_000, 40_000)]
    if axis == "centres":
        pairs = [(20_000, m) for m in (250, 500, 1000, 2000)]
    rows: list[dict[str, Any]] = []
    for n, m in [(400, 20), (800, 20 if axis == "n" else 40)] if setup.quick else pairs:
        setup.progress(f"n = {n}, {m} centres")
        X, Y = make_data("logistic", n, setup.device)
        plan = kglm.Nystrom(kglm.SquaredExponential(LENGTH), m)
        seconds, glm = _time(partial(_fit, "logistic", plan, X, Y), setup.device)
        rows.append({"n": n, "centres": m, "time (s)": seconds, "steps": glm.result.steps, "passes": glm.result.passes})
    slope = np.polyfit(np.log([row[axis] for row in rows]), np.log([row["time (s)"] for row in rows]), 1)[0]
    notes = (DATA, ONCE, f"time ~ {axis}^{slope:.2f}, by least squares in logarithms.")
    return Result(
        "kglm-growth", f"Logistic fits as {axis} grows; float64", rows, notes, {"table": "growth", "of": axis}
    )


def _measure_exact(setup: Setup, n: int) -> Result:
    """Exact fits beside scikit-learn's, in the same process, in turns."""
    rows = []
    for name in ("ridge", "logistic"):
        setup.progress(f"exact {name}, n = {n}")
        X, Y = make_data(name, n, setup.device)
        points, targets = X.cpu().numpy(), Y.cpu().numpy()
        seconds, glm = _time(partial(_fit, name, kglm.SquaredExponential(LENGTH), X, Y), setup.device)
        rival: Any = GaussianProcessClassifier(RBF(LENGTH), optimizer=None)
        if name == "ridge":
            rival = KernelRidge(alpha=1.0, kernel="rbf", gamma=0.5 / LENGTH**2)
        other, _ = _time(partial(rival.fit, points, targets), torch.device("cpu"))
        row = {"targets": name, "n": n, "time (s)": seconds, "beside": type(rival).__name__, "its time (s)": other}
        gap = None
        if name == "ridge":
            gap = (glm.predict(X[:500]).cpu() - torch.as_tensor(rival.predict(points[:500]))).abs().max().item()
        rows.append(row | {"ratio": seconds / other, "largest difference": gap})
    notes = (
        DATA,
        ONCE,
        "GaussianProcessClassifier with its kernel fixed; its probabilities are averaged over f, ours not.",
    )
    return Result(
        "kglm-exact", f"Exact kernel GLMs beside scikit-learn's, n = {n}; float64", rows, notes, {"table": "exact"}
    )


def _measure_centres(setup: Setup) -> Result:
    """How near the low-rank fit is to the exact one as centres are added, by rule."""
    n = 300 if setup.quick else 20_000 if setup.cuda else 6000
    X, Y = make_data("logistic", 2 * n, setup.device)
    X, held_out, Y, truth = X[:n], X[n:], Y[:n], Y[n:]
    setup.progress(f"exact logistic, n = {n}")
    exact = _fit("logistic", kglm.SquaredExponential(LENGTH), X, Y)
    base, rows = exact.loss(held_out, truth), []
    for m in (10, 30) if setup.quick else (50, 100, 200, 400, 800, 1600):
        for rule in ("kmeans", "uniform"):
            setup.progress(f"{rule}, {m} centres")
            plan = kglm.Nystrom(kglm.SquaredExponential(LENGTH), m, rule)
            seconds, glm = _time(partial(_fit, "logistic", plan, X, Y), setup.device)
            stated = glm.reduced.approximation(500)
            right = ((glm.predict(held_out) > 0.5) == (truth > 0.5)).double().mean().item()
            row = {"rule": rule, "centres": m, "time (s)": seconds, "held-out loss": glm.loss(held_out, truth)}
            row |= {"over exact (%)": 100 * (row["held-out loss"] / base - 1), "held-out accuracy (%)": 100 * right}
            row |= {"missed variance": stated.trace / n, "‖f − f*‖, stated": stated.fit}
            row["max |p − p*|"] = (glm.predict(held_out) - exact.predict(held_out)).abs().max().item()
            rows.append(row)
    notes = (DATA, f"The exact fit's held-out loss is {base:.5g}; missed variance: the mean of k(x, x) − k̃(x, x).")
    title = f"Nyström against the exact fit, logistic, n = {n}; float64"
    return Result("kglm-centres", title, rows, notes, {"table": "centres"})
