"""Implicit, phantom or unrolled: how far each is from the true gradient of one loss, and what it costs."""

import argparse
import time

import torch

import kerneq
from kerneq.gradients import AbstractGradient, Implicit, Phantom, Point, Unrolled


def main(norm: float) -> dict[str, float]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    kernel = kerneq.kernels.Gaussian(gamma=0.02, split=8, hidden=16)
    cell = kerneq.cells.DenseCell(kernel, inputs=16, state=128, features=64, norm=norm).eval()
    with torch.no_grad():
        cell.operator.weight.mul_(10)  # so that the bound on ‖W‖ bites and L = norm²
    x, wanted = torch.randn(64, 16), torch.rand(64, 128)

    def gradient_of(rule: AbstractGradient) -> tuple[torch.Tensor, float]:
        layer = kerneq.Equilibrium(cell, gradient=rule, tol=1e-12, max_steps=300)
        cell.zero_grad()
        value = layer(x).value
        started = time.perf_counter()
        (rule.attach(cell.bind(x), Point(value)).z - wanted).square().sum().backward()
        spent = time.perf_counter() - started
        return torch.cat([p.grad.flatten() for p in cell.parameters() if p.grad is not None]), spent

    # Backpropagation through a long solve is the truth here, at a price no training could pay.
    truth, _ = gradient_of(Unrolled(steps=300))
    rules = {
        "Implicit(tol=1e-9)": Implicit(tol=1e-9),
        "Implicit(tol=1e-3)": Implicit(tol=1e-3),
        "Phantom(1, 1.0), Jacobian-free": Phantom(1, 1.0),
        "Phantom(5), as in the papers": Phantom(5),
        "Phantom(20)": Phantom(20),
        "Unrolled(5)": Unrolled(5),
        "Unrolled(20)": Unrolled(20),
    }
    errors: dict[str, float] = {}
    print(f"L ≤ {norm**2:.2f}\n{'rule':32s} {'relative error':>14s} {'ms':>8s}")
    for name, rule in rules.items():
        found, spent = gradient_of(rule)
        errors[name] = float((found - truth).norm() / truth.norm())
        print(f"{name:32s} {errors[name]:14.1e} {spent * 1e3:8.1f}")
    return errors


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--norm", type=float, default=1.2, help="bound on ‖W‖‖W_h‖; L is its square")
    main(parser.parse_args().norm)
