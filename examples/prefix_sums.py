"""As many steps as a problem needs: prefix sums of bits, learnt on short strings, solved on long ones."""

import argparse

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import kerneq as kq


class Recur(nn.Module):
    """f(z, x): what a GRU makes at every place of its bit and of the state of the place before. Padding has x = 0."""

    def __init__(self, size: int):
        super().__init__()
        self.gru = nn.GRUCell(1, size)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        before = nn.functional.pad(z, (0, 0, 1, 0))[:, :-1]
        return self.gru(x.flatten(0, 1), before.flatten(0, 1)).view_as(z) * x.abs()


def make_strings(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return bits (strings, longest, 1), -1 or 1, and 0 after the end, and whether the ones so far are odd."""
    bits = torch.randint(2, (len(lengths), int(lengths.max()), 1))
    inside = torch.arange(bits.shape[1])[:, None] < lengths[:, None, None]
    return (2.0 * bits - 1) * inside, bits.cumsum(1) % 2


def train(length: int, steps: int, Layer=kq.Equilibrium) -> tuple[nn.Module, tuple[Tensor, ...], str]:
    torch.manual_seed(0)
    picard = kq.solvers.Picard()  # a wave from left to right: the past steps, which Anderson mixes, say nothing of it
    start, rule = lambda x: x.new_zeros(*x.shape[:2], 16), kq.gradients.Implicit(picard)
    layer = Layer(Recur(16), init=start, solver=picard, gradient=rule, max_steps=(2 * length, 20 * length))
    layer.head = nn.Linear(16, 1)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    for _ in range(steps):
        x, y = make_strings(torch.randint(2, length + 1, (32,)))
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(layer.head(layer(x).value), y.float(), x.abs()).backward()
        optimizer.step()
    x, y = make_strings(torch.full((64,), 4 * length))
    return layer, (x[:, :length],), f"{find_right(layer.eval(), x, y).mean():.0%} at {4 * length} bits"


@torch.no_grad()
def find_right(layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return for each string whether all its prefix sums are right."""
    return (((layer.head(layer(x).value) > 0) == (y > 0)) | (x == 0)).flatten(1).all(1).float()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=12, help="of the longest string in training")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    layer, _, right = train(options.length, options.steps)
    print(f"strings right: {right}")
    lengths = torch.arange(2, 6 * options.length + 1).repeat_interleave(4)
    x, y = make_strings(lengths)
    layer.on_failure, steps, full = "return", layer(x).steps, find_right(layer, x, y)
    with kq.solving(max_steps=2 * options.length):  # which is not enough
        few = find_right(layer, x, y)
    print(f"2 to {lengths.max()} bits in one batch: {few.mean():.0%} right with the steps of training,")
    print(f"{full.mean():.0%} with {steps.min()} to {steps.max()} steps, as many as each string needs")
    figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
    axes.plot(lengths, steps, ".", color="#CC3388")
    axes.set(xlabel="bits of the string", ylabel="steps until it has converged")
    figure.savefig("prefix_sums.png", dpi=80)
