"""Watch an equilibrium being found: the state settling, its residual and energy E, and the way down a landscape of E.

Two equations with L = 4, where plain iteration fails: one on the picture of a digit, drawn as ‖z‖ at every pixel, and
one whose state is two numbers, so that E can be drawn. Writes equilibrium.png, and equilibrium.gif, which moves.
"""

import argparse
import io
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

import kerneq as kq
from kerneq.equation import Equation

SOLVERS = {"Picard": kq.solvers.Picard(), "Proximal": kq.solvers.Proximal()}
COLOURS = {"Picard": "#E69F00", "Proximal": "#CC3388"}
Trace = list[tuple[torch.Tensor, float, float]]  # before each step: the state, its residual, its energy


def bind(cell: kq.cells.DenseCell | kq.cells.ConvCell, x: torch.Tensor) -> Equation:
    cell.operator.weight.mul_(10)  # so that the bound on ‖W‖ bites: L = norm² = 4
    return cell.eval().bind(x)


def watch(f: Equation, z: torch.Tensor, solver: kq.solvers.AbstractSolver, steps: int) -> Trace:
    space, trace = solver.space(f), []  # a solver may iterate another variable than z
    at = space.start(z)
    memory = solver.init(space, at.z)
    for _ in range(steps + 1):
        image = f(z)
        trace.append((z, float((image - z).norm() / image.norm()), float(f.energy(z))))
        following, memory = solver.step(space, at, memory)
        z = space.answer(at, following)
        at = space.evaluate(following)
    return trace


def draw_picture(axes: Axes, pixels: torch.Tensor, high: float, title: str) -> None:
    axes.imshow(pixels.numpy(), cmap="magma", vmin=0, vmax=high)
    axes.set_title(title)
    axes.axis("off")


def draw_curves(axes: Axes, curves: dict[str, list[float]], steps: int, title: str) -> None:
    for name, values in curves.items():
        axes.semilogy(values[: steps + 1], ".-", color=COLOURS[name], label=name)
    ends = [value for values in curves.values() for value in values if value > 0]
    axes.set(title=title, xlabel="step", xlim=(-0.5, len(next(iter(curves.values()))) - 0.5))
    axes.set_ylim(max(min(ends), 1e-8) / 3, 3 * max(ends))
    axes.legend(loc="lower left")


def draw_landscape(axes: Axes, f: Equation, traces: dict[str, Trace], steps: int) -> None:
    ends = (1.1 * torch.cat([z for trace in traces.values() for z, _, _ in trace]).amax(0)).tolist()
    across, up = (torch.linspace(0, end, 101) for end in ends)  # below zero E is infinite
    grid = torch.cartesian_prod(across, up)
    energy = f.rows(torch.zeros(len(grid), dtype=torch.int64)).energy(grid).view(101, 101).T
    height = (energy - energy.min()).sqrt()  # the root shows the bottom, too
    axes.contourf(across.numpy(), up.numpy(), height.numpy(), 20, cmap="GnBu_r")
    for name, trace in traces.items():
        axes.plot(*torch.cat([z for z, _, _ in trace[: steps + 1]]).T.numpy(), ".-", color=COLOURS[name], label=name)
    axes.plot(*traces["Proximal"][-1][0][0].tolist(), "*", color="#D55E00", markersize=12, label="z*")
    axes.set(
        title="E(z₁, z₂)", xlabel="z₁", ylabel="z₂", xlim=(-0.05 * ends[0], ends[0]), ylim=(-0.05 * ends[1], ends[1])
    )
    axes.legend(loc="upper right")


@torch.no_grad()
def main(steps: int, output: Path) -> None:
    torch.manual_seed(34)
    torch.set_default_dtype(torch.float64)
    kernel = kq.kernels.Gaussian(gamma=0.02, split=1, hidden=4)
    small = bind(kq.cells.DenseCell(kernel, inputs=2, state=2, features=4, norm=2.0), 3 * torch.randn(1, 2))
    picture = kq.data.load("digits", "test").pixels[:1] / 255.0
    x = torch.nn.functional.interpolate(picture, scale_factor=4, mode="bicubic")
    large = bind(kq.cells.ConvCell(kq.kernels.Gaussian(), inputs=1, state=16, features=16, norm=2.0), 3 * x)
    paths = {name: watch(small, torch.zeros(1, 2), solver, steps) for name, solver in SOLVERS.items()}
    states = {name: watch(large, torch.zeros(1, 16, 32, 32), solver, steps) for name, solver in SOLVERS.items()}
    lowest = min(energy for _, _, energy in states["Proximal"])
    frames = {name: [z[0].norm(dim=0) for z, _, _ in trace] for name, trace in states.items()}  # ‖z‖ at every pixel
    high = float(frames["Proximal"][-1].max())
    curves = {name: [residual for _, residual, _ in trace] for name, trace in states.items()}
    falls = {name: [energy - lowest for _, _, energy in trace] for name, trace in states.items()}
    output.mkdir(parents=True, exist_ok=True)

    figure = Figure(figsize=(12, 8.5), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(1.1, 1))
    places = top.add_gridspec(2, 6)
    draw_picture(top.add_subplot(places[:, 0]), x[0, 0], 1.0, "the input x")
    for row, name in enumerate(SOLVERS):
        for column, step in enumerate(sorted({*range(1, min(5, steps)), steps}), start=1):
            draw_picture(top.add_subplot(places[row, column]), frames[name][step], high, f"{name}, step {step}")
    residuals, energies, landscape = bottom.subplots(1, 3)
    draw_curves(residuals, curves, steps, "relative residual ‖f(z) − z‖ / ‖f(z)‖")
    draw_curves(energies, falls, steps, "energy above the lowest found")
    draw_landscape(landscape, small, paths, steps)
    figure.savefig(output / "equilibrium.png", dpi=80)

    images = []
    for step in range(steps + 1):
        figure = Figure(figsize=(10, 2.9), layout="constrained")
        first, second, residuals, landscape = figure.subplots(1, 4)
        for axes, name in ((first, "Picard"), (second, "Proximal")):
            draw_picture(axes, frames[name][step], high, f"{name}, step {step}")
        draw_curves(residuals, curves, step, "relative residual")
        draw_landscape(landscape, small, paths, step)
        buffer = io.BytesIO()
        figure.savefig(buffer, dpi=72)
        images.append(Image.open(buffer).convert("P", palette=Image.Palette.ADAPTIVE, colors=64))
    waits = [600] * steps + [3000]
    images[0].save(output / "equilibrium.gif", save_all=True, append_images=images[1:], duration=waits, loop=0)
    for name, trace in states.items():
        fell = all(after <= before + 1e-12 for (_, _, before), (_, _, after) in zip(trace, trace[1:], strict=False))
        rose = "fell at every step" if fell else "rose at some step"
        print(f"{name}: E {rose}; residual {trace[-1][1]:.1e} after {steps} steps")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--output", type=Path, default=Path("."), help="the folder for the two pictures")
    main(**vars(parser.parse_args()))
