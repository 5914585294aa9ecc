"""How far each pixel has moved between two pictures: an update of two states, hidden and flow."""

import argparse

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kerneq as kq

State = tuple[Tensor, Tensor]  # hidden (batch, 24, side, side), flow (batch, 2, side, side) in pixels


def warp(picture: Tensor, flow: Tensor) -> Tensor:
    """Return the picture seen at every pixel plus its flow."""
    side = picture.shape[-1]
    axis = torch.arange(side, dtype=flow.dtype)
    at = torch.stack(torch.meshgrid(axis, axis, indexing="xy")) + flow
    return F.grid_sample(picture, (2 * at / (side - 1) - 1).movedim(1, 3), padding_mode="border", align_corners=True)


class Update(nn.Module):
    """f((hidden, flow), first, second): what is wrong at where the flow points makes a new hidden and a new flow."""

    def __init__(self) -> None:
        super().__init__()
        normed = nn.utils.parametrizations.spectral_norm  # what moves too much has no equilibrium
        self.mix, self.head = normed(nn.Conv2d(24 + 2 + 2, 24, 5, padding=2)), normed(nn.Conv2d(24, 2, 3, padding=1))

    def forward(self, z: State, first: Tensor, second: Tensor) -> State:
        hidden, flow = z
        hidden = torch.tanh(self.mix(torch.cat([hidden / 2, flow / 2, first, warp(second, flow) - first], 1)))
        return hidden, self.head(hidden)


def make_pairs(count: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return two pictures of random blobs and the flow between them, by up to some three pixels."""
    second = F.interpolate(torch.randn(count, 1, side // 4, side // 4), (side, side), mode="bicubic")
    flow = F.interpolate(torch.rand(count, 2, 2, 2) * 5 - 2.5, (side, side), mode="bilinear", align_corners=True)
    return warp(second, flow), second, flow


def train(
    side: int, steps: int, shown: dict[str, Tensor], Layer=kq.Equilibrium
) -> tuple[nn.Module, tuple[Tensor, ...], str]:
    torch.manual_seed(0)
    layer = Layer(
        Update(), init=lambda one, two: (one.new_zeros(len(one), 24, side, side), torch.cat([one * 0] * 2, 1))
    )
    optimizer = torch.optim.Adam(layer.parameters(), lr=3e-3)
    for _ in range(steps):
        first, second, flow = make_pairs(8, side)
        optimizer.zero_grad()
        (layer(first, second).value[1] - flow).norm(dim=1).mean().backward()
        optimizer.step()
    first, second, flow = make_pairs(32, side)
    with torch.no_grad():
        found = layer.eval()(first, second).value[1]
    shown |= {"first picture": first[0, 0], "true flow, across": flow[0, 0], "found": found[0, 0]}
    return layer, (first[:8], second[:8]), f"{(found - flow).norm(dim=1).mean():.2f} pixels"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", type=int, default=24)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    shown: dict[str, Tensor] = {}
    layer, inputs, error = train(options.side, options.steps, shown)
    print(f"error on new pairs: {error}\n{layer(*inputs)}")
    figure, places = plt.subplots(1, len(shown), figsize=(8.1, 3), layout="constrained")
    for axes, (name, picture) in zip(places, shown.items(), strict=True):
        axes.imshow(picture.numpy(), cmap="gray")
        axes.set(title=name, xticks=[], yticks=[])
    figure.savefig("flow_two_states.png", dpi=80)
