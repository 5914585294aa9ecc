"""The paper's illustrations, drawn from computed values: Figures 1 (inpainting), 2 (fixed points), 4 (convolution), 7.

Nothing is sketched by hand: the picture of Figure 1 is inpainted both ways, the fixed points of Figure 2 are searched
for, the matrix of Figure 4 is multiplied and the filter convolved. Figure 7 has formulas only.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from common import Experiment, Figures, Job, Record, Result, main, subplots
from inpaint import Smooth, quartets
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from torch import Tensor
from torch.nn import functional as F

from kerneq.kglm import DeclarativeNode, Gaussian, Truncated, pixels
from kerneq.settings import setting

# Okabe and Ito's colours, which the colour-blind can tell apart
BLUE, ORANGE, GREEN, RED, YELLOW = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#F0E442"
PALE = {BLUE: "#E3F1FA", ORANGE: "#FDF3DC", GREEN: "#E0F4EE", RED: "#FBE6D8"}


@dataclasses.dataclass(frozen=True)
class Illustrations:
    """Sizes of the pictures in Figures 1 and 4; the papers' are 32."""

    side: int = setting(20, "of the picture of Figure 1, three channels", low=6)
    hole: int = setting(8, "side of its hole", low=1)
    size: int = setting(32, "side of the picture of Figure 4", low=12)
    radius: int = setting(5, "of the filter of Figure 4", low=1)
    device: str = setting("cpu", "auto, cpu, cuda or cuda:N")


@dataclasses.dataclass(frozen=True)
class Layer:
    """One panel of Figure 2: z ↦ H(z) on [−1, 1], and the largest |H′| there, in words."""

    formula: str
    H: Callable[[Tensor], Tensor]
    slope: str


LAYERS = (
    Layer("tanh(0.9z + 2)", lambda z: torch.tanh(0.9 * z + 2), "|H′| < 0.9: a contraction"),
    Layer("tanh(z)", torch.tanh, "|H′(0)| = 1: not a contraction"),
    Layer("tanh(−3z)", lambda z: torch.tanh(-3 * z), "|H′(0)| = 3: not a contraction"),
    Layer("tanh(3z)", lambda z: torch.tanh(3 * z), "|H′(0)| = 3: not a contraction"),
    Layer("ReLU(z + 0.2)", lambda z: F.relu(z + 0.2), "|H′| = 1: not a contraction"),
    Layer("ReLU(z)", F.relu, "|H′| = 1: not a contraction"),
)


def fixed_points(H: Callable[[Tensor], Tensor]) -> tuple[list[float], tuple[float, float] | None]:
    """The fixed points of H in [−1, 1]: single ones, by bisection, and an interval of them, if there is one."""
    grid = torch.linspace(-1, 1, 2002, dtype=torch.float64)  # an even number of points: 0 is none of them
    gap = H(grid) - grid
    fixed = grid[gap == 0]
    points = []
    for i in ((gap[:-1] * gap[1:]) < 0).nonzero().flatten().tolist():
        low, high = grid[i], grid[i + 1]
        for _ in range(60):
            middle = (low + high) / 2
            if (H(middle) - middle) * (H(low) - low) > 0:
                low = middle
            else:
                high = middle
        points.append(middle.item())
    return points, (fixed.min().item(), fixed.max().item()) if len(fixed) else None


def scene(side: int) -> Tensor:
    """A smooth picture in colour, by formula, as bytes (3, side, side)."""
    x, y = torch.meshgrid(*[torch.linspace(0, 5, side, dtype=torch.float64)] * 2, indexing="xy")
    waves = torch.stack([torch.sin(1.2 * x + 0.6 * y), torch.cos(x - 1.1 * y + 1), torch.sin(0.5 * x * y / 2 + 2)])
    return (255 * (0.5 + 0.45 * waves)).to(torch.uint8)


def run(settings: Illustrations, job: Job) -> Result:
    """All that the figures show."""
    inpainting = _inpaint(settings)
    job.report(0.5, f"Figure 1: (6) and (9) differ by {inpainting['difference']:.1e}")
    convolution = _convolve(settings)
    job.report(0.9, f"Figure 4: matrix and filter differ by {convolution['difference']:.1e}")
    found = [fixed_points(layer.H) for layer in LAYERS]
    return {"inpainting": inpainting, "fixed_points": found, "convolution": convolution}


@torch.no_grad()
def _inpaint(settings: Illustrations) -> Result:
    """The scene with a hole, filled by (6) and by (9)."""
    data = quartets(scene(settings.side)[None], settings.hole, moving=False, seed=0)
    node = DeclarativeNode(Smooth(lengthscale=5.0, variance=1.0), Gaussian(), lam=0.01)
    minimum = node(data.X, data.Y, data.X2)
    equilibrium = node.layer(data.X, data.X2)(data.Y)
    return {
        "target": data.filled(data.Y2)[0].tolist(),
        "minimum": data.filled(minimum)[0].tolist(),
        "equilibrium": data.filled(equilibrium)[0].tolist(),
        "inside": data.inside[0].tolist(),
        "difference": (minimum - equilibrium).abs().max().item(),
        "error": F.mse_loss(minimum, data.Y2).sqrt().item(),
        "pixels": [data.Y.shape[1], data.Y2.shape[1]],
    }


def _convolve(settings: Illustrations) -> Result:
    """One channel of the scene times the kernel matrix, and under the filter; the matrix's least eigenvalue."""
    kernel = Truncated(torch.full((1, 1), 10.0, dtype=torch.float64), settings.radius)  # exp(−‖Δ‖²/20)
    at = pixels(settings.size, settings.size, 1)
    K = kernel(at, at)
    picture = scene(settings.size)[2].double() / 255
    product = K @ picture.flatten()
    filtered = F.conv2d(picture[None, None], kernel.filters(), padding=settings.radius)[0, 0]
    return {
        "picture": picture.tolist(),
        "product": product.tolist(),
        "filtered": filtered.tolist(),
        "difference": (product - filtered.flatten()).abs().max().item(),
        "smallest": torch.linalg.eigvalsh(K).min().item(),
        "nonzero": (K != 0).double().mean().item(),
    }


def draw(records: Sequence[Record[Illustrations]]) -> Figures:
    """The four figures, by their numbers in the paper."""
    settings, result = records[0].settings, records[0].result
    return {
        "1": draw_networks(settings, result["inpainting"]),
        "2": draw_layers(result["fixed_points"]),
        "4": draw_convolution(settings, result["convolution"]),
        "7": draw_connections(),
    }


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty sheet whose coordinates are inches from the lower left."""
    figure = Figure(figsize=(width, height))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, width), ylim=(0, height))
    axis.set_axis_off()
    return figure, axis


def box(
    axis: Axes, x: float, y: float, width: float, height: float, lines: list[str], colour: str, last: str = "black"
) -> None:
    """A box with a bold first line and centred lines below it, spread evenly; `last` is the colour of the last one."""
    shape = FancyBboxPatch(
        (x, y),
        width,
        height,
        boxstyle="round,pad=0,rounding_size=0.08",
        facecolor=PALE[colour],
        edgecolor=colour,
        lw=1.5,
    )
    axis.add_patch(shape)
    for i, line in enumerate(lines):
        place = y + height * (1 - (i + 0.6) / (len(lines) + 0.2))
        weight = "bold" if i == 0 else "normal"
        ink = last if line is lines[-1] else "black"
        axis.text(x + width / 2, place, line, ha="center", va="center", fontsize=9, fontweight=weight, color=ink)


def arrow(
    axis: Axes, start: tuple[float, float], end: tuple[float, float], words: str = "", both: bool = False
) -> None:
    """An arrow, with words right of its middle, or above it where it is level."""
    style = "<|-|>" if both else "-|>"
    axis.add_patch(FancyArrowPatch(start, end, arrowstyle=style, mutation_scale=13, color="0.25", lw=1.3))
    x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
    level = start[1] == end[1]
    axis.text(
        x if level else x + 0.12, y + 0.06 if level else y, words, fontsize=8.5, color="0.15",
        ha="center" if level else "left", va="bottom" if level else "center",
    )  # fmt: skip


def show(axis: Axes, image: Tensor, x: float, y: float, side: float, title: str) -> None:
    """A picture (c, h, w), values clipped to [0, 1], in the square at (x, y)."""
    colours = image.clamp(0, 1).permute(1, 2, 0).numpy()
    axis.imshow(colours, extent=(x, x + side, y, y + side), interpolation="nearest", aspect="auto", vmin=0, vmax=1)
    axis.add_patch(Rectangle((x, y), side, side, fill=False, edgecolor="0.25", lw=1))
    axis.text(x + side / 2, y - 0.08, title, ha="center", va="top", fontsize=8.5)


def draw_networks(settings: Illustrations, result: Result) -> Figure:
    """Figure 1: an implicit module; the declarative network; the equilibrium model that is the same function."""
    figure, axis = canvas(9.6, 6.3)
    shape = (3, settings.side, settings.side)
    target, minimum, equilibrium = (torch.tensor(result[k]).view(shape) for k in ("target", "minimum", "equilibrium"))
    inside = torch.tensor(result["inside"]).view(shape)[0]
    yellow = torch.tensor([0.94, 0.89, 0.26])[:, None, None]
    given = torch.where(inside, yellow, target)

    box(
        axis,
        2.5,
        5.35,
        4.4,
        0.72,
        ["Implicit module", r"the solution of a problem posed by $Y$ and parameters"],
        ORANGE,
    )
    arrow(axis, (1.7, 5.71), (2.45, 5.71), r"$Y$")
    arrow(axis, (6.95, 5.71), (7.75, 5.71), r"$f^*(Y)$")
    for y, name, lines, image, colour in (
        (2.95, "minimum", [
            "Declarative network: the module minimises (problem 6)",
            r"$f^*=k(\tilde{X},X)\,\alpha^*$",
            r"$\alpha^*=\mathrm{arg\,min}_\alpha\;1^\top A(K\alpha)-\alpha^\top KT(Y)$",
            r"$\qquad\quad-\log q(K\alpha)+\frac{\lambda}{2}\alpha^\top K\alpha$",
        ], minimum, BLUE),
        (0.45, "equilibrium", [
            "Equilibrium model: the module finds a fixed point (9)",
            r"$f^*=V_1(z^*+\rho(z^*))+V_2T(Y)$",
            r"$z^*=\sigma(W_1z^*+W_2T(Y)+W_3\rho(z^*))$",
            r"$W_1=W_3=-K/\lambda,\;W_2=K/\lambda,\;V_2=-V_1=k(\tilde{X},X)/\lambda$",
        ], equilibrium, GREEN),
    ):  # fmt: skip
        show(axis, given, 0.3, y + 0.1, 1.4, r"$Y$ on $X$; hole $\tilde{X}$")
        arrow(axis, (1.75, y + 0.8), (2.45, y + 0.8), r"$Y$")
        box(axis, 2.5, y, 4.4, 1.6, lines, colour, last=RED if name == "equilibrium" else "black")
        arrow(axis, (6.95, y + 0.8), (7.85, y + 0.8), r"$f^*$, $F_\gamma$")
        show(axis, image, 7.9, y + 0.1, 1.4, f"by {'Newton' if name == 'minimum' else 'the fixed point'}")
    arrow(
        axis, (4.7, 2.92), (4.7, 2.08), f"the same function: they differ by {result['difference']:.0e} here", both=True
    )
    # what learns and what does not
    axis.text(
        4.8, 0.18, r"Here $F_\gamma$ is the identity. In (6) and (9) only $\gamma$ learns: no gradient reaches the "
        r"weights (red), which follow from kernel and coordinates.", fontsize=8.5, ha="center", va="center", color=RED,
    )  # fmt: skip
    given_values, missing = result["pixels"]
    words = (
        f"A picture by formula: {given_values} values given, {missing} in the hole (yellow), r.m.s. error "
        f"{result['error']:.3f}; values clipped to [0, 1] for drawing."
    )
    axis.text(4.8, 4.95, words, fontsize=8.5, ha="center")
    return figure


def draw_layers(found: list[Any]) -> Figure:
    """Figure 2: layers z ↦ H(z) with their fixed points."""
    figure, axes = subplots(2, 3, width=8.4, height=6.4)
    z = torch.linspace(-1, 1, 401, dtype=torch.float64)
    for i, (axis, layer, (points, interval)) in enumerate(zip(axes.flat, LAYERS, found, strict=True)):
        axis.plot(z, z, "--", color=ORANGE, lw=1.6, label="identity")
        axis.plot(z, layer.H(z), color=BLUE, lw=2, label="layer $H$")
        if interval:
            axis.plot(
                interval,
                interval,
                color=GREEN,
                lw=7,
                alpha=0.55,
                solid_capstyle="butt",
                label="an interval of fixed points",
            )
        if points:
            axis.plot(points, points, "o", color="black", ms=7, clip_on=False, zorder=5, label="a fixed point")
        count = "uncountably many" if interval else {0: "no", 1: "one"}.get(len(points), str(len(points)))
        noun = "fixed point" if len(points) == 1 and not interval else "fixed points"
        axis.set_title(f"({'abcdef'[i]}) {layer.formula}\n{layer.slope}\n{count} {noun}", fontsize=9)
        axis.set(xlim=(-1, 1), ylim=(-1.05, 1.25), xticks=[-1, 0, 1], yticks=[-1, 0, 1], xlabel="$z$")
        axis.set_box_aspect(0.85)
    axes[0, 0].set_ylabel("$H(z)$")
    axes[1, 0].set_ylabel("$H(z)$")
    handles = {h.get_label(): h for axis in axes.flat for h in axis.get_legend_handles_labels()[0]}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def draw_convolution(settings: Illustrations, result: Result) -> Figure:
    """Figure 4: the sparse kernel matrix times a flattened picture is a convolution with one filter."""
    figure, axis = canvas(10.2, 4.0)
    n, r = settings.size, settings.radius
    picture, filtered = torch.tensor(result["picture"]), torch.tensor(result["filtered"])
    product = torch.tensor(result["product"])
    at = pixels(n, n, 1)
    K = Truncated(torch.full((1, 1), 10.0, dtype=torch.float64), r)(at, at)
    high = filtered.max().item()

    def panel(
        values: Tensor, x: float, y: float, width: float, height: float, title: str, cmap: str, top: float
    ) -> None:
        axis.imshow(
            values.numpy(), extent=(x, x + width, y, y + height), cmap=cmap, vmin=0, vmax=top, aspect="auto",
            interpolation="antialiased",  # the matrix has more rows than the figure has dots
        )  # fmt: skip
        axis.add_patch(Rectangle((x, y), width, height, fill=False, edgecolor="0.25", lw=0.8))
        axis.text(x + width / 2, y + height + 0.07, title, ha="center", va="bottom", fontsize=8.5)

    panel(
        K, 0.25, 0.75, 2.6, 2.6, f"$K=k(X,X)$, {n * n} × {n * n}\n{result['nonzero']:.0%} of it not zero", "viridis", 1
    )
    panel(picture.flatten()[:, None], 3.05, 0.75, 0.22, 2.6, "$Y$", "gray", 1)
    axis.text(2.95, 2.05, "·", fontsize=16, ha="center", va="center")
    axis.text(3.47, 2.05, "=", fontsize=14, ha="center", va="center")
    panel(product[:, None], 3.67, 0.75, 0.22, 2.6, "$KY$", "gray", high)
    axis.text(4.35, 2.05, "=", fontsize=16, ha="center", va="center", fontweight="bold")
    axis.text(4.35, 1.75, f"to {result['difference']:.0e}", fontsize=8, ha="center", va="center")
    panel(picture, 4.85, 1.2, 1.7, 1.7, f"$Y$ as a picture, {n} × {n},\none place of the filter", "gray", 1)
    cell = 1.7 / n
    axis.add_patch(Rectangle(
        (4.85 + cell * (n // 2 - r), 1.2 + cell * (n // 2 - r)), cell * (2 * r + 1), cell * (2 * r + 1), fill=False,
        edgecolor=ORANGE, lw=2,
    ))  # fmt: skip
    table = K[(n // 2) * n + n // 2].view(n, n)[n // 2 - r : n // 2 + r + 1, n // 2 - r : n // 2 + r + 1]
    axis.text(6.8, 2.05, r"$\ast$", fontsize=16, ha="center", va="center")
    panel(table, 7.05, 1.6, 0.9, 0.9, f"filter,\n{2 * r + 1} × {2 * r + 1}", "viridis", 1)
    axis.text(8.15, 2.05, "=", fontsize=14, ha="center", va="center")
    panel(filtered, 8.35, 1.2, 1.7, 1.7, "$KY$ as a picture", "gray", high)
    words = (
        rf"Greys: $Y$ from 0 to 1, $KY$ from 0 to {high:.0f}; colours: $k$ from 0 (dark) to 1 (light). "
        rf"$k=\exp(-\|\Delta\|^2/20)$ for offsets $|\Delta|_\infty\leq{r}$, else zero: the image is padded with zeros."
        "\n"
        rf"The cut makes the matrix indefinite (least eigenvalue −{-result['smallest']:.2f}), so it is no kernel; "
        r"Truncated(…, definite=True) is one."
    )
    axis.text(5.1, 0.32, words, ha="center", va="center", fontsize=8.5)
    return figure


def draw_connections() -> Figure:
    """Figure 7: from the declarative network to a free equilibrium model, and what each step asks for."""
    figure, axis = canvas(9.0, 7.15)
    loss = r"$\min_{\gamma}\;\sum_s L(\tilde{Y}_s,\,F_\gamma(f_s^*))$"
    steps = [
        (BLUE, ["Declarative network (6)", loss,
            r"$\alpha_s^*=\mathrm{arg\,min}_\alpha\;J(\alpha;X_s,Y_s),\quad f_s^*=k(\tilde{X}_s,X_s)\,\alpha_s^*$"]),
        (GREEN, ["Equilibrium model, weights from the coordinates (9)", loss,
            r"$z_s^*=\sigma(W_{1s}z_s^*+W_{2s}T(Y_s)+W_{3s}\rho(z_s^*)),\quad "
            r"f_s^*=V_{1s}(z_s^*+\rho(z_s^*))+V_{2s}T(Y_s)$"]),
        (GREEN, ["Equilibrium model, fixed weights (Corollary 6)", loss,
            r"$z_s^*=\sigma(W_1z_s^*+W_2T(Y_s)+W_3\rho(z_s^*)),\quad f_s^*=V_1(z_s^*+\rho(z_s^*))+V_2T(Y_s)$"]),
        (ORANGE, ["Equilibrium model, free weights (3)",
            r"$\min_{\gamma,\theta,V_1,V_2,b}\;\sum_s L(\tilde{Y}_s,\,F_\gamma(f_s^*))$",
            r"$z_s^*=g_\theta(z_s^*;Y_s),\quad f_s^*=V_1z_s^*+V_2Y_s+b$"]),
    ]  # fmt: skip
    names = (
        "DeclarativeNode(…)", "DeclarativeNode(…, constraint=\"equilibrium\")", "node.layer(X, X2), frozen",
        "node.layer(X, X2), trained",
    )  # fmt: skip
    between = (
        ("equivalent (Theorem 3, Corollary 5). The paper asks for $K\\succ0$ and "
         "$\\|K/\\lambda\\|\\sup A''(1+\\rho')<1$;\n"
         "$K\\succeq0$ is enough, for every $\\lambda>0$", True),
        ("shared coordinates, $X_s=X$ and $\\tilde{X}_s=\\tilde{X}$", False),
        ("$W$ and $V$ let go as $\\theta$: the kernel is their initialisation", False),
    )  # fmt: skip
    height, gap = 1.18, 0.72
    for i, ((colour, lines), name) in enumerate(zip(steps, names, strict=True)):
        y = 7.15 - 0.15 - height - i * (height + gap)
        box(axis, 0.9, y, 7.2, height, [*lines, ""], colour)
        axis.text(4.5, y + 0.15, name, fontsize=8, family="monospace", ha="center", va="center", color="0.3")
        if i < 3:
            words, both = between[i]
            arrow(axis, (1.6, y - 0.03), (1.6, y - gap + 0.03), words, both)
    return figure


def summarise(settings: Illustrations, result: Result) -> list[str]:
    """What the figures state in numbers."""
    counts = ["interval" if interval else len(points) for points, interval in result["fixed_points"]]
    return [
        f"Figure 1: (6) and (9) differ by {result['inpainting']['difference']:.1e}",
        f"Figure 2: fixed points {', '.join(map(str, counts))}",
        f"Figure 4: matrix and filter differ by {result['convolution']['difference']:.1e}",
    ]


EXPERIMENT = Experiment("illustrations", Illustrations, run, draw, summarise, label=lambda settings: "figure")

if __name__ == "__main__":
    main(EXPERIMENT)
