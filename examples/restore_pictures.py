"""Blurred pictures, and pictures with holes, restored by the equilibrium of a learned denoiser."""

import argparse

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_sample_image
from torch import Tensor, nn
from torch.nn.functional import conv2d, interpolate, pad

import kerneq as kq


def blur(z: Tensor) -> Tensor:
    """Return the pictures seen through a lens out of focus; the map is its own adjoint."""
    return conv2d(pad(z, (2, 2, 2, 2), "circular"), torch.ones(1, 1, 5, 5) / 25)


class Restore(nn.Module):
    """f(z, y, mask): a step towards what was seen, the blur of z or its pixels where the mask is 1; then a denoiser."""

    def __init__(self, width: int = 24):
        super().__init__()
        first, last = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 1, 3, padding=1)
        nn.init.zeros_(last.weight)  # at first there is next to no noise
        self.noise = nn.Sequential(first, nn.Softplus(), nn.Conv2d(width, width, 3, padding=1), nn.Softplus(), last)

    def forward(self, z: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
        z = z - (blur(blur(z) - y) if mask is None else mask * z - y)
        return 0.95 * z - self.noise(z)


def cut(name: str, count: int) -> Tensor:
    """Return random pieces (count, 1, 24, 24) of a photograph, about zero."""
    grey = torch.tensor(load_sample_image(name)).float().mean(2)[None, None] / 255 - 0.5
    grey = interpolate(grey, scale_factor=0.3, mode="area")[0, 0]
    rows, columns = (torch.randint(side - 24, (count,)).tolist() for side in grey.shape)
    return torch.stack([grey[i : i + 24, j : j + 24] for i, j in zip(rows, columns, strict=True)])[:, None]


def psnr(found: Tensor, wanted: Tensor) -> float:
    return -10 * (found - wanted).square().mean().log10().item()


def train(
    holes: bool, steps: int, shown: dict[str, Tensor], Layer=kq.Equilibrium
) -> tuple[nn.Module, tuple[Tensor, ...], str]:
    torch.manual_seed(0)
    layer = Layer(Restore(), max_steps=100, gradient=kq.gradients.Implicit(tol=1e-3))
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-3)
    for step in range(steps + 1):
        x = cut("china.jpg", 16) if step < steps else cut("flower.jpg", 32)
        mask = (torch.rand_like(x) < 0.5).float() if holes else None
        y = blur(x) + 0.01 * torch.randn_like(x) if mask is None else mask * x
        found = layer.train(step < steps)(y, mask).value
        if step < steps:
            optimizer.zero_grad()
            (found - x).square().mean().backward()
            optimizer.step()
    shown |= {"seen": y[0, 0], "restored": found.detach()[0, 0], "the truth": x[0, 0]}
    return layer, (y[:16], None if mask is None else mask[:16]), f"{psnr(y, x):.1f} to {psnr(found, x):.1f} dB"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--holes", action="store_true", help="half of the pixels are missing; otherwise a blur")
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    shown: dict[str, Tensor] = {}
    layer, inputs, gain = train(options.holes, options.steps, shown)
    print(f"pieces of another photograph: {gain}\n{layer(*inputs)}")
    figure, places = plt.subplots(1, len(shown), figsize=(8.1, 3), layout="constrained")
    for axes, (name, picture) in zip(places, shown.items(), strict=True):
        axes.imshow(picture.numpy(), cmap="gray")
        axes.set(title=name, xticks=[], yticks=[])
    figure.savefig("restore_pictures.png", dpi=80)
