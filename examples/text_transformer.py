"""A transformer of one block, iterated to its equilibrium, that learns Python's own documentation."""

import argparse
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import kerneq as kq


class Block(nn.Module):
    """f(z, x): causal attention and a feed-forward network on z + x."""

    def __init__(self, size: int):
        super().__init__()
        self.block = nn.TransformerEncoderLayer(size, 4, 2 * size, dropout=0.0, batch_first=True)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(z.shape[1])
        return self.block(z + x, src_mask=mask, is_causal=True)


class Model(nn.Module):
    def __init__(self, Layer, size: int, length: int):
        super().__init__()
        self.letters, self.places = nn.Embedding(128, size), nn.Embedding(length, size)
        self.layer, self.head = Layer(Block(size)), nn.Linear(size, 128)

    def embed(self, text: Tensor) -> Tensor:
        return self.letters(text) + self.places.weight[: text.shape[1]]

    def forward(self, text: Tensor) -> Tensor:  # (batch, length) -> the loss of every next letter, in bits
        logits = self.head(self.layer(self.embed(text[:, :-1])).value)
        return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()) / torch.tensor(2.0).log()


def train(length: int, steps: int, Layer=kq.Equilibrium) -> tuple[nn.Module, tuple[Tensor, ...], str]:
    torch.manual_seed(0)
    text = torch.frombuffer(bytearray("".join(topics.values()), "ascii", "replace"), dtype=torch.uint8).long()
    windows = text[: len(text) // (length + 1) * (length + 1)].view(-1, length + 1)
    windows = windows[torch.randperm(len(windows))]
    model = Model(Layer, 48, length)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for batch in windows[64:].split(16)[:steps]:
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
    with torch.no_grad():
        bits = model.eval()(windows[:64])
    return model.layer, (model.embed(windows[:16, :-1]).detach(),), f"{bits:.2f} bits"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    layer, inputs, bits = train(options.length, options.steps)
    solution = layer(*inputs, trace=True)
    print(f"{bits} a letter of unseen text, where guessing takes 7\n{solution}")
    figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
    axes.semilogy(solution.trace.residual.numpy(), color="#CC3388", alpha=0.5)
    axes.set(title="16 pieces of text", xlabel="step", ylabel="relative residual")
    figure.savefig("text_transformer.png", dpi=80)
