"""A picture as a function of the coordinates, by an equilibrium of 128 numbers a pixel."""

import argparse

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_sample_image
from torch import Tensor, nn

import kerneq as kq


class Wave(nn.Module):
    """f(z, x) = sin(Wz + Ux) for random Fourier features x of a pixel's coordinates."""

    def __init__(self, waves: int, state: int):
        super().__init__()
        self.recur = nn.utils.parametrizations.spectral_norm(nn.Linear(state, state, bias=False))
        self.inject = nn.Linear(2 * waves, state)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.sin(0.7 * self.recur(z) + self.inject(x))  # 0.7: a contraction, whatever W learns


def load_picture(size: int) -> Tensor:
    picture = torch.tensor(load_sample_image("china.jpg")).float().movedim(2, 0)[None, :, 40:296, 200:456] / 255
    return nn.functional.interpolate(picture, (size, size), mode="area")[0].flatten(1).T  # (pixels, 3)


def train(
    size: int, steps: int, pictures: dict[str, Tensor], Layer=kq.Equilibrium
) -> tuple[nn.Module, tuple[Tensor, ...], str]:
    torch.manual_seed(0)
    target, axis = load_picture(size), torch.linspace(-1, 1, size)
    angles = torch.cartesian_prod(axis, axis) @ torch.randn(2, 64) * 8
    x = torch.cat([angles.sin(), angles.cos()], 1)
    layer, head = Layer(Wave(64, 128)), nn.Linear(128, 3)
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        error = (head(layer(x).value) - target).square().mean()
        error.backward()
        optimizer.step()
    pictures["learnt"] = pictures.get("learnt", head(layer(x).value).detach().clamp(0, 1).view(size, size, 3))
    return layer, (x,), f"{-10 * error.log10().item():.1f} dB"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=48)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    pictures = {"the picture": load_picture(options.size).view(options.size, options.size, 3)}
    layer, inputs, fidelity = train(options.size, options.steps, pictures)
    print(f"fidelity (PSNR): {fidelity}\n{layer(*inputs)}")
    figure, places = plt.subplots(1, len(pictures), figsize=(5.4, 3), layout="constrained")
    for axes, (name, picture) in zip(places, pictures.items(), strict=True):
        axes.imshow(picture.numpy(), cmap="gray")
        axes.set(title=name, xticks=[], yticks=[])
    figure.savefig("implicit_picture.png", dpi=80)
