"""Export a model to ONNX and run it by onnxruntime, without PyTorch; with --aot it is compiled by AOTInductor, too.

A program has no loop that ends where a solve has converged: every solve takes the same number of steps. The picture
shows how many are enough: how far the probabilities are from those of a solve to the end.
"""

import argparse
import logging
import tempfile
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import onnxruntime  # pip install onnx onnxscript onnxruntime
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import kerneq as kq


def train() -> tuple[nn.Sequential, Tensor]:
    """Return a network that has learnt to read digits, and digits that it has not seen."""
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 8 - 1, torch.tensor(digits.target)
    cell = kq.cells.DenseCell(kq.kernels.Gaussian(gamma=0.02, split=16), inputs=64, state=128, features=64)
    # memory=0: a step without Anderson's history, whose small linear systems ONNX has no operator for.
    network = nn.Sequential(kq.Equilibrium(cell, solver=kq.solvers.Proximal(memory=0)), kq.Value(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    for rows in torch.randint(1500, (40, 100)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x[rows]), y[rows]).backward()
        optimizer.step()
    return network.eval(), x[1500:]


def main(steps: list[int], aot: bool) -> None:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # PyTorch's exporter speaks about itself,
    warnings.simplefilter("ignore", FutureWarning)  # and warns of itself
    network, x = train()
    network.requires_grad_(False)
    layer, errors, batch = network[0], {}, torch.export.Dim("batch", min=1)
    with kq.solving(network, tol=1e-6):
        wanted = network(x).softmax(1)
    with tempfile.TemporaryDirectory() as folder:
        for layer.max_steps in steps:
            program = torch.export.export(network, (x,), dynamic_shapes=({0: batch},), strict=False)
            file = Path(folder) / "model.onnx"
            torch.onnx.export(program, dynamo=True, input_names=["x"], verbose=False).save(file)
            session = onnxruntime.InferenceSession(file)
            (logits,) = session.run(None, {"x": x[:100].numpy()})  # any number of digits
            error = float((torch.tensor(logits).softmax(1) - wanted[:100]).abs().max())
            errors[layer.max_steps] = error
            print(f"ONNX, {layer.max_steps:2d} steps: {file.stat().st_size / 1024:.0f} KiB, off by {error:.1e} at most")
        if aot:  # needs a C++ compiler; the package runs in C++ as well
            file = torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/model.pt2")
            error = float((torch._inductor.aoti_load_package(file)(x).softmax(1) - wanted).abs().max())
            print(f"AOTInductor, {layer.max_steps} steps: off by {error:.1e} at most")
    figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
    axes.loglog(errors.keys(), errors.values(), "o-", color="#CC3388", base=2)
    axes.set(xlabel="steps of every solve", ylabel="largest error of a probability", yscale="log")
    figure.savefig("export_model.png", dpi=80)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--aot", action="store_true", help="compile it by AOTInductor, too: a minute")
    main(**vars(parser.parse_args()))
