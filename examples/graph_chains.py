"""A graph network of unbounded depth: the class of a chain is known at its first node alone."""

import argparse

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import kerneq as kq


class Neighbours(nn.Module):
    """f(z, x, A) = tanh(A z Wᵀ + x Uᵀ) (IGNN: Gu et al., 2020); ‖A‖ ≤ 1 and ‖W‖ ≤ `bound`, so it is a contraction."""

    def __init__(self, features: int, state: int, bound: float = 0.99):
        super().__init__()
        self.recur = nn.utils.parametrizations.spectral_norm(nn.Linear(state, state, bias=False))
        self.inject, self.bound = nn.Linear(features, state, bias=False), bound

    def forward(self, z: Tensor, x: Tensor, A: Tensor) -> Tensor:
        return torch.tanh(self.bound * A @ self.recur(z) + self.inject(x))


def make_chains(count: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the features (nodes, 8) and classes of `count` chains, and their normalised adjacency, sparse."""
    labels = torch.arange(count) % 2
    x = torch.zeros(count, length, 8)
    x[:, 0] = torch.randn(count, 8) / 4 + nn.functional.one_hot(labels, 8)
    left = torch.arange(count * length).view(count, length)[:, :-1].flatten()
    edges = torch.cat([torch.stack([left, left + 1]), torch.stack([left + 1, left])], 1)
    degree = torch.bincount(edges[0], minlength=count * length)
    weights = (degree[edges[0]] * degree[edges[1]]).rsqrt()
    A = torch.sparse_coo_tensor(edges, weights, (count * length,) * 2, check_invariants=True).coalesce()
    return x.flatten(0, 1), labels.repeat_interleave(length), A


def train(length: int, steps: int, Layer=kq.Equilibrium) -> tuple[nn.Module, tuple[Tensor, ...], str]:
    torch.manual_seed(0)
    (x, y, A), (x_test, y_test, A_test) = make_chains(20, length), make_chains(40, length)
    f, head = Neighbours(8, 16), nn.Linear(16, 2)
    rule = kq.gradients.Implicit(tol=1e-3, max_steps=300)
    # Nodes meet in f: the graph is one state without a batch.
    layer = Layer(f, init=lambda x, A: x.new_zeros(len(x), 16), batched=False, max_steps=300, gradient=rule)
    optimizer = torch.optim.Adam([*f.parameters(), *head.parameters()], lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(head(layer(x, A).value), y).backward()
        optimizer.step()
    with torch.no_grad():
        right = head(layer.eval()(x_test, A_test).value).argmax(1) == y_test
    layer.right = right.view(-1, length).float().mean(0)  # by distance from the known node
    return layer, (x, A), f"{right.float().mean():.1%}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=30)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    layer, inputs, right = train(options.length, options.steps)
    print(f"{right} of the nodes of new chains right\n{layer(*inputs)}")
    figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
    axes.plot(100 * layer.right, ".-", color="#CC3388")
    axes.set(xlabel="nodes away from the one with features", ylabel="right (%)", ylim=(0, 103))
    figure.savefig("graph_chains.png", dpi=80)
