"""The Triton programs of the banks against plain PyTorch, in Triton's interpreter; run by test_bank.py."""

import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments" / "kglm"))
sys.path.insert(0, str(Path(__file__).parents[2]))

import conv_triton
import dense_triton
from bank import AbstractBank, ConvBank, DenseBank, Iteration

warnings.simplefilter("ignore")  # NumPy's, where a model overflows on purpose


def gaussian(*shape, seed, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def compare(bank, errors, y, target):
    parameters = [bank.W1, bank.W2, bank.V1, bank.V2, *((bank.b, bank.c) if isinstance(bank, DenseBank) else ())]
    plain, fused = AbstractBank.error(bank, y, target), errors(tuple(parameters))
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-6)
    wanted, got = (torch.autograd.grad(loss.sum(), parameters) for loss in (plain, fused))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())


for rectified in (False, True):
    weights = [gaussian(2, 3, 3, 3, 3, seed=seed, scale=0.01 if seed == 1 else 0.2) for seed in (1, 2, 3, 4)]
    way = Iteration(tol=1e-5, max_steps=9, rescue=not rectified)
    bank = ConvBank(weights, torch.relu, way, rectified=rectified)
    y, x = (gaussian(1, 3, 8, 8, seed=seed).abs() for seed in (5, 6))
    assert conv_triton.fits(y, bank.W1)
    compare(bank, lambda w: conv_triton.errors(w, y, x, way, rectified), y, x.expand(2, 1, 3, 8, 8))  # noqa: B023

with torch.no_grad():  # one model diverges: it keeps its best iterate, or fails, and the other does not see it
    weights[0][1] = gaussian(3, 3, 3, 3, seed=7, scale=1e6)
    for rescue in (True, False):
        tame, wild = conv_triton.errors(weights, y, x, Iteration(tol=1e-5, max_steps=9, rescue=rescue), rectified=True)
        assert tame.isfinite() and bool(wild.isfinite()) is rescue

weights = [gaussian(2, 20, 20, seed=seed, scale=0.05 if seed == 1 else 0.2) for seed in (1, 2, 3, 4)]
dense = DenseBank(weights, torch.tanh, Iteration(tol=1e-6, max_steps=40, relaxation=0.9))
torch.nn.init.normal_(dense.b)
y, x = gaussian(2, 70, 20, seed=5), gaussian(2, 70, 20, seed=6)
begin = gaussian(2, 70, 20, seed=7)
for start in (None, begin):
    compare(dense, lambda w: dense_triton.errors(w, y, x, start, dense.iteration)[0], y, x)  # noqa: B023
torch.testing.assert_close(begin, dense(y)[1].value, rtol=0, atol=1e-4)  # a start becomes the equilibrium
