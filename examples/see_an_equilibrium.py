"""Watch each solver approach one equilibrium: the residual of every step, and the energy E of the hidden problem."""

import argparse

import torch

import kerneq
from kerneq.solvers import Anderson, Broyden, Picard, Proximal


def main(steps: int, norm: float) -> dict[str, list[tuple[float, float]]]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    kernel = kerneq.kernels.Gaussian(gamma=0.02, split=4, hidden=16)
    cell = kerneq.cells.DenseCell(kernel, inputs=8, state=32, features=16, norm=norm).eval()
    with torch.no_grad():
        cell.operator.weight.mul_(10)  # so that the bound on ‖W‖ bites and L = norm²
        f = cell.bind(torch.randn(1, 8))
    print(f"L = {float(f.bound):.2f}: plain iteration is sure to converge below 1; strong convexity ends at 2.24")
    print("E is infinite where the state has a negative entry, which Anderson and Broyden do not mind")

    traces: dict[str, list[tuple[float, float]]] = {}
    for solver in (Picard(), Picard(relaxation=0.5), Anderson(), Broyden(), Proximal(memory=0), Proximal()):
        with torch.no_grad():
            at = f.evaluate(torch.zeros(1, 32), drive=True, energy=True)
            memory = solver.init(f, at.z)
            trace = []
            for _ in range(steps):
                residual = float((at.image - at.z).norm() / at.image.norm())
                trace.append((residual, float(at.energy)))
                z, memory = solver.step(f, at, memory)
                at = f.evaluate(z, drive=True, energy=True)
        traces[repr(solver)] = trace

    for name, trace in traces.items():
        fell = all(after <= before + 1e-12 for (_, before), (_, after) in zip(trace, trace[1:], strict=False))
        print(f"\n{name}: E {'fell at every step' if fell else 'rose at some step'}")
        for step, (residual, energy) in enumerate(trace):
            print(f"  {step:3d}  residual {residual:8.1e}  E {energy:.9f}")
    return traces


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--norm", type=float, default=2.0, help="bound on ‖W‖‖W_h‖; L is its square")
    main(**vars(parser.parse_args()))
