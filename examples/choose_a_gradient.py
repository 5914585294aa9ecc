"""The gradient rules: how far each is from the true gradient of one loss, and what it costs in time and memory."""

import argparse
import os
import time
from collections.abc import Callable

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch: its profiler is talkative

import matplotlib.pyplot as plt
import torch
from torch import nn

import kerneq as kq
from kerneq.gradients import AbstractGradient, Implicit, Neumann, Phantom, Point, Reversible, Unrolled


def make_function(rate: float) -> tuple[nn.Module, kq.maps.Map]:
    f, x = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Tanh()), torch.randn(64, 128) / 4
    nn.init.orthogonal_(f[0].weight, rate)
    return f, lambda z: f(z) + x


def make_equation(norm: float) -> tuple[nn.Module, kq.maps.Map]:
    kernel = kq.kernels.Gaussian(gamma=0.02, split=8, hidden=16)
    cell = kq.cells.DenseCell(kernel, inputs=16, state=128, features=64, norm=norm).eval()
    with torch.no_grad():
        cell.operator.weight.mul_(10)  # so that the bound on ‖W‖ bites
    return cell, cell.bind(torch.randn(64, 16))


def peak(call: Callable[[], torch.Tensor]) -> float:
    """Return the MiB that a call holds at most, from the profiler: PyTorch's CPU allocator has no counters."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return float(torch.tensor([0, *sizes]).cumsum(0).max()) / 2**20


def main(norm: float, rate: float | None) -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model, f = make_equation(norm) if rate is None else make_function(rate)
    wanted, solver = torch.rand(64, 128), kq.solvers.Proximal() if rate is None else kq.solvers.Anderson()
    at = Point(kq.solve(f, torch.zeros(64, 128), solver, tol=1e-12, max_steps=500).value)

    def differentiate(rule: AbstractGradient) -> torch.Tensor:  # of Unrolled and Reversible with all their steps
        loss = (rule.attach(f, at).z - wanted).square().sum()
        found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True)
        return torch.cat([g.flatten() for g in found if g is not None])

    truth = differentiate(Unrolled(steps=400))  # at a price no training could pay
    rules = [Implicit(tol=1e-6), Implicit(tol=1e-3), Neumann(0), Neumann(5), Neumann(20), Phantom(1, 1.0)]
    rules += [Phantom(5), Phantom(20), Unrolled(5), Unrolled(20)]
    rules += [] if rate is None and norm > 1 else [Reversible(5), Reversible(20), Reversible(40, 0.5)]
    print("rule                     relative error       time      memory")
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for rule in rules:
        error, started = float((differentiate(rule) - truth).norm() / truth.norm()), time.perf_counter()
        differentiate(rule)
        spent = 1e3 * (time.perf_counter() - started)
        settings = [rule.tol] if isinstance(rule, Implicit) else list(vars(rule).values())[:2]
        name = f"{type(rule).__name__}({', '.join(f'{setting:g}' for setting in settings)})"
        print(f"{name:24s} {error:14.1e} {spent:7.1f} ms {peak(lambda rule=rule: differentiate(rule)):7.2f} MiB")
        axes.loglog(spent, error, "o", color="C3" if isinstance(rule, Implicit) else "C0")
        axes.annotate(name, (1.04 * spent, error), fontsize=7)
    axes.set(xlabel="time (ms)", ylabel="relative error of the gradient")
    figure.savefig("choose_a_gradient.png", dpi=80)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--norm", type=float, default=1.2, help="bound on ‖W‖‖W_h‖ of an equation; L is its square")
    parser.add_argument("--rate", type=float, help="instead, a function of one's own that contracts by this rate")
    main(**vars(parser.parse_args()))
