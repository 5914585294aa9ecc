"""Training that starts every solve at the sample's equilibrium of the epoch before, kept for the whole data set."""

import argparse

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import kerneq as kq


class Block(nn.Module):
    """f(z, x) = tanh(Wz + Ux)."""

    def __init__(self, inputs: int, state: int):
        super().__init__()
        self.recur = nn.utils.parametrizations.spectral_norm(nn.Linear(state, state))
        self.inject = nn.Linear(inputs, state)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.9 * self.recur(z) + self.inject(x))


def train(epochs: int, reuse: bool) -> tuple[list[float], float]:
    """Return the mean steps of a solve in each epoch, and the share of unseen digits that are named right."""
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 8 - 1, torch.tensor(digits.target)
    order = torch.randperm(len(x))
    x, y, x_test, y_test = x[order[:1500]], y[order[:1500]], x[order[1500:]], y[order[1500:]]
    layer, head = kq.Equilibrium(Block(64, 64), init=lambda x: x.new_zeros(len(x), 64), tol=1e-4), nn.Linear(64, 10)
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=1e-3)
    starts, means = torch.zeros(len(x), 64), []  # one start a sample, wherever the sample comes in an epoch
    for _ in range(epochs):
        steps = []
        for rows in torch.randperm(len(x)).split(100):
            solution = layer(x[rows], z0=starts[rows])
            if reuse:
                starts[rows] = solution.detach().value
            optimizer.zero_grad()
            nn.functional.cross_entropy(head(solution.value), y[rows]).backward()
            optimizer.step()
            steps.append(solution.steps.float().mean())
        means.append(float(torch.stack(steps).mean()))
    with torch.no_grad():
        right = head(layer.eval()(x_test).value).argmax(1) == y_test
    return means, float(right.float().mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
    for name, colour in (("zero", "#E69F00"), ("the last equilibrium", "#CC3388")):
        means, right = train(options.epochs, name != "zero")
        print(
            f"start at {name}: {means[0]:.1f} steps a solve in epoch 1, {means[-1]:.1f} at the end; {right:.1%} right"
        )
        axes.plot(range(1, len(means) + 1), means, ".-", color=colour, label=name)
    axes.set(xlabel="epoch", ylabel="steps of a solve", ylim=(0, None))
    axes.legend(title="start at")
    figure.savefig("reuse_starts.png", dpi=80)
