"""Deblurring with a certified denoiser: one answer for every picture, whatever the weights, and a bound on its error.

The denoiser D(z) = (z + N(z)) / 2 lengthens no difference, as its chain N of `kq.Resolvent` lengthens none. Nor does a
step against the blur, so f(z) = 0.98 D(z − blur(blur z − y)) contracts by 0.98, and a solve is off by 50 times its last
step at most. `restore_pictures` has a denoiser without such a promise.
"""

import argparse

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_sample_image
from torch import Tensor, nn
from torch.nn.functional import conv2d, interpolate, pad

import kerneq as kq


class Denoiser(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        sizes = {"inputs": width, "state": width, "features": width, "norm": 3.0}
        cells = [kq.cells.ConvCell(kq.kernels.Squared(), **sizes, bias=True, inject=nn.Identity()) for _ in range(2)]
        self.chain, self.width = nn.ModuleList(kq.Resolvent(cell) for cell in cells), width

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return D(z) for z (batch, 1, side, side), and (batch,) how far unfinished solves may have moved it."""
        wide, error = pad(z, (0, 0, 0, 0, 0, self.width - 1)), torch.zeros(len(z))  # channels of zeros lengthen nothing
        for layer in self.chain:
            solution = layer(wide, solution=True)
            wide, error = solution.value, error + solution.error_bound
        return (z + wide[:, :1]) / 2, error / 2


def blur(z: Tensor) -> Tensor:
    return conv2d(pad(z, (2, 2, 2, 2), "circular"), torch.ones(1, 1, 5, 5) / 25)  # its own adjoint, of norm 1


def cut(name: str, count: int, side: int) -> Tensor:
    """Return random pieces (count, 1, side, side) of a photograph, about zero."""
    grey = torch.tensor(load_sample_image(name)).float().mean(2)[None, None] / 255 - 0.5
    grey = interpolate(grey, scale_factor=0.3, mode="area")[0, 0]
    corners = torch.stack([torch.randint(length - side, (count,)) for length in grey.shape], 1).tolist()
    return torch.stack([grey[i : i + side, j : j + side] for i, j in corners])[:, None]


def main(steps: int) -> None:
    torch.manual_seed(0)
    denoiser = Denoiser()
    optimizer = torch.optim.Adam(denoiser.parameters(), lr=1e-2)
    for _ in range(steps):
        x = cut("china.jpg", 8, 20)
        optimizer.zero_grad()
        (denoiser(x + 0.05 * torch.randn_like(x))[0] - x).square().mean().backward()
        optimizer.step()

    x = cut("flower.jpg", 2, 48)
    y = blur(x) + 0.01 * torch.randn_like(x)
    with torch.no_grad(), kq.solving(denoiser.eval(), tol=1e-6):
        found = kq.fixed_point(lambda z, y: 0.98 * denoiser(z - blur(blur(z) - y))[0], y, y, tol=1e-5, max_steps=200)
        image, error = denoiser((z := found.value) - blur(blur(found.value) - y))
        bound = ((0.98 * image - z).flatten(1).norm(dim=1) + 0.98 * error) / (1 - 0.98)
    seen, restored = (-10 * (p - x).square().mean().log10() for p in (y, z))
    print(f"seen {seen:.1f} dB, restored {restored:.1f} dB; {found}")
    print(f"z* is not further than {bound.max() / 48:.1e}, root mean square, for pixels in [-0.5, 0.5]")
    figure, places = plt.subplots(1, 3, figsize=(8.1, 3), layout="constrained")
    for axes, (name, picture) in zip(places, {"seen": y, "restored": z, "the truth": x}.items(), strict=True):
        axes.imshow(picture[0, 0].detach().numpy(), cmap="gray")
        axes.set(title=name, xticks=[], yticks=[])
    figure.savefig("certified_deblurring.png", dpi=80)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    main(parser.parse_args().steps)
