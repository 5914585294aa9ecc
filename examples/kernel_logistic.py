"""Kernel logistic regression as an equilibrium: fitted by Newton's method, and the same function as a layer.

The layer takes the labels Y to the prediction, so that it can be differentiated by them: which of the labels does the
probability at one point rest on?
"""

import argparse

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import make_moons

from kerneq import kglm


def draw_moons(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    X, y = make_moons(n, noise=0.25, random_state=seed)
    return torch.tensor(X), torch.tensor(y, dtype=torch.float64)


def main(samples: int) -> None:
    X, y = draw_moons(samples, seed=0)
    X2, y2 = draw_moons(1000, seed=1)
    glm = kglm.KernelGLM(kglm.SquaredExponential(0.5), kglm.Bernoulli(), lam=0.5).fit(X, y)
    accuracy = ((glm.predict(X2) > 0.5) == (y2 > 0.5)).double().mean()
    print(f"{glm.result.steps} Newton steps; {accuracy:.1%} of 1000 new points right")

    layer = glm.as_equilibrium(X2)  # an nn.Module: Y ↦ f(X2)
    print(f"as an equilibrium of {samples} numbers: {layer.guarantee}")
    with torch.no_grad():
        by_layer = layer.mean(y[None])[0]
    print(f"{'x':>15s} {'fitted':>10s} {'equilibrium':>12s}")
    for x, fitted, found in zip(X2[:5], glm.predict(X2), by_layer, strict=False):
        print(f"({x[0]:6.2f}, {x[1]:5.2f}) {fitted:10.6f} {found:12.6f}")
    print(f"largest difference at the 1000 points: {(by_layer - glm.predict(X2)).abs().max():.1e}")

    point, labels = torch.tensor([[0.5, 0.25]], dtype=torch.float64), y.clone().requires_grad_()
    (influence,) = torch.autograd.grad(glm.as_equilibrium(point).mean(labels[None]).sum(), labels)
    across, up = torch.linspace(-1.8, 2.8, 80, dtype=torch.float64), torch.linspace(-1.3, 1.8, 80, dtype=torch.float64)
    grid = torch.cartesian_prod(across, up)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    drawn = left.contourf(across, up, glm.predict(grid).view(80, 80).T, 20, cmap="PuOr", vmin=0, vmax=1)
    figure.colorbar(drawn, ax=left)
    left.scatter(*X.T, c=y, cmap="PuOr", vmin=-0.3, vmax=1.3, edgecolors="black", s=18)
    left.set_title("probability of the second moon")
    figure.colorbar(right.scatter(*X.T, c=influence, cmap="viridis", edgecolors="grey", s=24), ax=right)
    right.plot(*point[0], "*", color="#D55E00", markersize=14)
    right.set_title("what each label adds to the probability at ★")
    figure.savefig("kernel_logistic.png", dpi=80)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=200)
    main(**vars(parser.parse_args()))
