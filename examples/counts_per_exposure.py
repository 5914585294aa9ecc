"""Counts at scale: claims per year of 100 000 drivers by a Poisson kernel GLM, and the same model inside a network."""

import argparse
import time

import matplotlib.pyplot as plt
import torch

from kerneq import kglm


def draw_claims(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return age and power of the car (n, 2), years observed, claims, and the true rate per year."""
    g = torch.Generator().manual_seed(seed)
    X = torch.rand(n, 2, generator=g, dtype=torch.float64)
    years = 0.1 + 2 * torch.rand(n, generator=g, dtype=torch.float64)
    rate = true_rate(X)
    return X, years, torch.poisson(years * rate, generator=g), rate


def true_rate(X: torch.Tensor) -> torch.Tensor:
    return 0.3 * (1.5 * torch.cos(6 * X[:, 0]) + X[:, 1]).exp()  # the young and the old, and fast cars


def main(n: int, centres: int) -> None:
    X, years, claims, _ = draw_claims(n, seed=0)
    X2, years2, claims2, rate2 = draw_claims(5000, seed=1)
    plan = kglm.Nystrom(kglm.SquaredExponential(0.3), centres)
    glm = kglm.KernelGLM(plan, kglm.Poisson(), lam=1.0)

    begin = time.perf_counter()
    path = glm.path(X, claims, [10.0, 1.0, 0.1], offset=years.log(), validation=(X2, claims2, years2.log()))
    best = path.best
    print(f"{n} samples, {centres} centres, {len(path.models)} values of lam: {time.perf_counter() - begin:.1f} s")
    print(f"lam = {best.lam:g}; error of the rate: {((best.predict(X2) / rate2).log().abs().mean()):.1%} on average")

    stated = best.reduced.approximation()
    print(
        f"variance the centres miss: {stated.trace / n:.2e}; from the full kernel's fit at most {stated.fit:.3f} in f"
    )

    few, counts = X[:500], claims[:500]
    small = kglm.KernelGLM(kglm.Nystrom(kglm.SquaredExponential(0.3), 50), kglm.Poisson(), lam=1.0)
    small.fit(few, counts, offset=years[:500].log())
    layer = small.as_equilibrium(X2[:10])  # Y ↦ f(X2): an nn.Module
    same = torch.allclose(layer(counts[None])[0], small.canonical(X2[:10]), atol=1e-6)
    network = torch.nn.Sequential(layer, torch.nn.Linear(10, 2).double())
    network(counts[None]).square().sum().backward()
    print(
        f"as an equilibrium of {layer.cell.Phi.shape[1]} numbers the same function: {same}; it can be trained further"
    )

    figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
    age = torch.linspace(0, 1, 100, dtype=torch.float64)
    for power, colour in ((0.1, "#0072B2"), (0.9, "#D55E00")):
        at = torch.stack([age, torch.full_like(age, power)], 1)
        axes.plot(age, best.predict(at), color=colour, label=f"fitted, power {power}")
        axes.plot(age, true_rate(at), color=colour, linestyle=":", label="true")
    axes.set(xlabel="age (scaled)", ylabel="claims per year")
    axes.legend()
    figure.savefig("counts_per_exposure.png", dpi=80)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--centres", type=int, default=300)
    options = parser.parse_args()
    main(options.samples, options.centres)
