"""What the tests of the zoo share: its names by family, a picture each accepts, a short training."""

import copy
import functools

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from kerneq.models import MODELS, build

TINY = [name for name in MODELS if name.endswith("-tiny")]
# One of each kind: another kernel or γ in the same network is a matter of the tests of kernels and solvers.
KINDS = ["geq-dense-tiny", "geq-tiny", "mopteq-sigmoid-tiny", "mdeq-tiny", "resnet-tiny"]
# Strides of the stem, pooling to the smallest branch, and patches all have to divide the picture.
SIDES = {"geq-5m": 16, "geq-6m-imagenet": 64, "mdeq-10m-imagenet": 32}


def pictures(name: str, batch: int = 2) -> Tensor:
    side = SIDES.get(name, 8)
    return torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(1))


def digits() -> tuple[Tensor, Tensor]:
    found = load_digits()
    pixels = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1)
    return (pixels - pixels.mean()) / pixels.std(), torch.tensor(found.target)


def train(model: nn.Module, steps: int, batch: int = 32) -> list[float]:
    """A plain loop on the digits; the loss of every step."""
    x, y = digits()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    losses = []
    model.train()
    for step in range(steps):
        rows = order[torch.arange(step * batch, (step + 1) * batch) % len(x)]
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@functools.cache
def _trained(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = build(name, channels=1)
    train(model, steps=4)
    model.zero_grad()
    return model.eval()


def trained(name: str) -> nn.Module:
    """A model of one-channel digits whose batch norms and norm estimates have left their initial values."""
    return copy.deepcopy(_trained(name))
