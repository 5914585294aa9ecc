"""Kernel GLMs: time and memory at scale, the exact fits beside scikit-learn's, and how few centres are enough."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

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
ONCE = "Each fit is timed once, from the data to the fitted model, the choice of centres included."


def bench_kglm(setup: Setup) -> Iterator[Result]:
    """Kernel GLMs at scale, beside scikit-learn, and against the exact fit."""
    _fit("logistic", kglm.Nystrom(kglm.Matern(), 5), *make_data("logistic", 50, setup.device))  # imports, kernels
    yield _measure_scale(setup)
    yield _measure_exact(setup)
    yield _measure_centres(setup)


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
    """Return the seconds of one call, and what it returned."""
    begin = time.perf_counter()
    found = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin, found


def _measure_scale(setup: Setup) -> Result:
    """Time, memory and passes of low-rank fits as n and m grow."""
    grid = [(10_000, 500), (30_000, 1000), (100_000, 2000)]
    if setup.cuda:
        grid = [(100_000, 2000), (1_000_000, 2000), (1_000_000, 10_000)]
    rows = []
    for n, m in [(500, 20)] if setup.quick else grid:
        for name in FAMILIES:
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
    return Result(
        "kglm", "Kernel GLMs of low rank as samples and centres grow; float64", rows, notes, {"table": "scale"}
    )


def _measure_exact(setup: Setup) -> Result:
    """Exact fits beside scikit-learn's, in the same process, in turns."""
    rows = []
    for n in (200,) if setup.quick else (1000, 4000, 10_000):
        for name, theirs in (("ridge", "KernelRidge"), ("logistic", "GaussianProcessClassifier")):
            setup.progress(f"exact {name}, n = {n}")
            X, Y = make_data(name, n, setup.device)
            points, targets = X.cpu().numpy(), Y.cpu().numpy()
            kernel = kglm.SquaredExponential(LENGTH)
            seconds, glm = _time(partial(_fit, name, kernel, X, Y), setup.device)
            rival: Any = GaussianProcessClassifier(RBF(LENGTH), optimizer=None)
            if name == "ridge":
                rival = KernelRidge(alpha=1.0, kernel="rbf", gamma=0.5 / LENGTH**2)
            other, _ = _time(partial(rival.fit, points, targets), torch.device("cpu"))
            mode = torch.as_tensor(rival.predict(points) if name == "ridge" else rival.predict_proba(points)[:, 1])
            gap = (glm.predict().cpu() - mode).abs().max().item() if name == "ridge" else None
            row = {"targets": name, "n": n, "time (s)": seconds, "beside": theirs, "its time (s)": other}
            rows.append(row | {"ratio": seconds / other, "largest difference": gap})
    notes = (
        DATA,
        ONCE,
        "GaussianProcessClassifier with its kernel fixed; its probabilities are averaged over f, ours not.",
    )
    return Result("kglm", "Exact kernel GLMs beside scikit-learn's; float64", rows, notes, {"table": "exact"})


def _measure_centres(setup: Setup) -> Result:
    """How near the low-rank fit is to the exact one as centres are added, by rule."""
    n = 300 if setup.quick else 20_000 if setup.cuda else 5000
    X, Y = make_data("logistic", 2 * n, setup.device)
    X, held_out, Y, truth = X[:n], X[n:], Y[:n], Y[n:]
    setup.progress(f"exact logistic, n = {n}")
    exact = _fit("logistic", kglm.SquaredExponential(LENGTH), X, Y)
    base, rows = exact.loss(held_out, truth), []
    for m in (10, 30) if setup.quick else (50, 100, 200, 400, 800, 1600):
        for rule in ("kmeans", "leverage", "uniform"):
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
    return Result("kglm", title, rows, notes, {"table": "centres"})
