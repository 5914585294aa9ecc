"""Watch an equilibrium being found: the state of one equation settles by Proximal, and does not by plain iteration.

L = 4 here, where plain iteration may fail. The state is drawn as ‖z‖ at every pixel of a digit, beside the residual
and the energy E of every step. Writes equilibrium.png, and equilibrium.gif, which moves.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.animation import FuncAnimation, PillowWriter

import kerneq as kq

SOLVERS = {"plain iteration": (kq.solvers.Picard(), "#E69F00"), "Proximal": (kq.solvers.Proximal(), "#CC3388")}


@torch.no_grad()
def main(steps: int, output: Path) -> None:
    torch.manual_seed(34)
    torch.set_default_dtype(torch.float64)
    picture = kq.data.load("digits", "test").pixels[:1] / 255.0
    x = 3 * torch.nn.functional.interpolate(picture, scale_factor=4, mode="bicubic")
    cell = kq.cells.ConvCell(kq.kernels.Gaussian(), inputs=1, state=16, features=16, norm=2.0).eval()
    cell.operator.weight.mul_(10)  # so that the bound on ‖W‖ bites: L = norm² = 4
    traces = {}
    for name, (solver, _) in SOLVERS.items():
        layer = kq.Equilibrium(cell, solver=solver, tol=1e-12, max_steps=steps).eval()
        traces[name] = layer(x, trace=range(1, steps + 1)).trace
    frames = {name: [z[0].norm(dim=0).numpy() for z in trace.states.values()] for name, trace in traces.items()}
    lowest, high = float(traces["Proximal"].energy.min()), float(frames["Proximal"][-1].max())

    figure, places = plt.subplots(1, 5, figsize=(13, 2.8), layout="constrained")
    places[0].imshow(x[0, 0].numpy(), cmap="magma")
    pictures = [axes.imshow(frames["Proximal"][0], cmap="magma", vmin=0, vmax=high) for axes in places[1:3]]
    for axes, title in zip(places, ("the input x", *SOLVERS, "residual", "energy E above its lowest"), strict=True):
        axes.set_title(title, color=SOLVERS[title][1] if title in SOLVERS else "black")
        axes.axis("on" if axes in places[3:] else "off")
    curves = []
    for axes, part, least in ((places[3], "residual", 0.0), (places[4], "energy", lowest)):
        for name, (_, colour) in SOLVERS.items():
            values = (getattr(traces[name], part).flatten() - least).numpy()
            curves.append((axes.semilogy(values, ".-", color=colour, label=name)[0], values))
        axes.set(xlabel="step", ylim=(1e-8, None))

    def show(step: int) -> None:
        for image, name in zip(pictures, SOLVERS, strict=True):
            image.set_data(frames[name][step])
        for line, values in curves:
            line.set_data(range(step + 1), values[: step + 1])

    output.mkdir(parents=True, exist_ok=True)
    moving = FuncAnimation(figure, show, frames=len(frames["Proximal"]))
    moving.save(output / "equilibrium.gif", PillowWriter(fps=2), dpi=60)
    figure.savefig(output / "equilibrium.png", dpi=80)
    for name, trace in traces.items():
        said = "fell at every step" if (trace.energy.diff(dim=0) <= 1e-12).all() else "rose at some step"
        print(f"{name}: E {said}; residual {trace.residual[-1].item():.1e} after {steps} steps")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--output", type=Path, default=Path("."), help="the folder for the two pictures")
    main(**vars(parser.parse_args()))
