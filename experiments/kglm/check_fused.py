"""Do the Triton programs of `conv_triton.py` and `dense_triton.py` agree with plain PyTorch on this GPU, and how fast?

python experiments/kglm/check_fused.py dense | ours | scripts
"""

import argparse
import sys
import time

import torch
from bank import AbstractBank, ConvBank, DenseBank, Iteration
from torch import Tensor


def dense(device: torch.device, models: int, count: int) -> tuple[DenseBank, Tensor, Tensor]:
    """Models of width 100 with data of their own."""
    g = torch.Generator().manual_seed(0)
    weights = [scale * torch.randn(models, 100, 100, generator=g) for scale in (0.05, 0.1, 0.1, 0.1)]
    bank = DenseBank(weights, torch.tanh, Iteration(tol=1e-4, max_steps=50, relaxation=0.7))
    y, x = (torch.randn(models, count, 100, generator=g).to(device) for _ in range(2))
    return bank.to(device), y, x


def conv(device: torch.device, models: int, count: int, scripts: bool) -> tuple[ConvBank, Tensor, Tensor]:
    """Models of 5 × 5 filters and pictures of 32 × 32."""
    g = torch.Generator().manual_seed(0)
    weights = [scale * torch.randn(models, 3, 3, 5, 5, generator=g) for scale in (0.03, 0.1, 0.1, 0.1)]
    iteration = Iteration(tol=1e-4, max_steps=30, rescue=not scripts)
    bank = ConvBank(weights, torch.relu, iteration, rectified=scripts)
    y, x = (torch.rand(count, 3, 32, 32, generator=g).to(device) for _ in range(2))
    return bank.to(device), y, x.expand(models, *x.shape)


def gradients(bank: AbstractBank, loss: Tensor) -> list[Tensor]:
    """Of every parameter."""
    return list(torch.autograd.grad(loss.sum(), list(bank.parameters())))


def main(kind: str) -> None:
    """Compare on a small problem, then time a large one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    make = {
        "dense": dense,
        "ours": lambda *sizes: conv(*sizes, scripts=False),
        "scripts": lambda *sizes: conv(*sizes, scripts=True),
    }[kind]
    start = time.perf_counter()
    bank, y, x = make(device, 3, 10)
    fused, plain = bank.error(y, x), AbstractBank.error(bank, y, x)
    pairs = zip([fused, *gradients(bank, fused)], [plain, *gradients(bank, plain)], strict=True)
    gaps = [((a - b).abs().max() / b.abs().max()).item() for a, b in pairs]
    with torch.no_grad():
        gaps.append(((bank.error(y, x) - plain).abs().max() / plain.abs().max()).item())
    print(f"{kind}: largest relative differences {' '.join(f'{gap:.1e}' for gap in gaps)}", flush=True)
    print(f"{kind}: compiled and compared in {time.perf_counter() - start:.0f} s", flush=True)
    if device.type == "cuda":
        bank, y, x = make(device, 300, 20000) if kind == "dense" else make(device, 250, 10)
        for _ in range(4):
            torch.cuda.synchronize()
            start = time.perf_counter()
            bank.error(y, x).sum().backward()
            torch.cuda.synchronize()
            print(f"{kind}: a training step of {bank.models} models {1000 * (time.perf_counter() - start):.1f} ms")
    if not max(gaps) < 2e-2:
        sys.exit(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("dense", "ours", "scripts"))
    main(parser.parse_args().kind)
