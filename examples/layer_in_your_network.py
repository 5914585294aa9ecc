"""A kerneq layer inside a network of your own, trained by a plain PyTorch loop on handwritten digits."""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import kerneq


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Patches of 16 features; L ≤ norm² = 1, so the equilibrium is unique whatever the input.
        kernel = kerneq.kernels.Gaussian(gamma=0.02, split=16, hidden=32)
        cell = kerneq.cells.DenseCell(kernel, inputs=64, state=128, features=64, norm=1.0)
        self.equilibrium = kerneq.Equilibrium(cell, tol=1e-3)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, kerneq.Solution]:
        solution = self.equilibrium(x)
        return self.head(solution.value), solution


def main(epochs: int) -> None:
    torch.manual_seed(0)
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32)
    x = (x - x.mean()) / x.std()
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x))
    train, test = order[:1500], order[1500:]

    network = Network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    for epoch in range(epochs):
        network.train()
        for rows in train[torch.randperm(len(train))].split(100):
            logits, _ = network(x[rows])
            optimizer.zero_grad()
            F.cross_entropy(logits, y[rows]).backward()
            optimizer.step()
        network.eval()
        with torch.no_grad():
            logits, solution = network(x[test])
        accuracy = float((logits.argmax(1) == y[test]).float().mean())
        # The solution states whether each sample converged: check it first when a model with an equilibrium misbehaves.
        print(f"epoch {epoch}: test accuracy {accuracy:.1%}; {solution}")
    with torch.no_grad():
        axes = kerneq.plot.solve(network.equilibrium(x[test], trace=True))
    axes[0].figure.savefig("layer_in_your_network.png", dpi=80)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    main(**vars(parser.parse_args()))
