"""The Triton kernels against float64: in Triton's interpreter on any machine, and on the card where there
is one.

The interpreter must be chosen before Triton is imported, so it runs in a process of its own; it multiplies
bfloat16 matrices wrongly (as their bits), so half precision is float16 there.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from kerneq.kernels import fused_reference as reference
from kerneq.kernels.fused import patch_step

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed.")

INTERPRETED = """
import sys, torch
from kerneq.kernels import fused_launch, fused_reference

def error(got, exact):
    return (torch.linalg.norm(got.double() - exact) / torch.linalg.norm(exact)).item()

torch.manual_seed(0)
torch.set_num_threads(1)
for dtype, tol, last, split, patch, shape, with_v, negated in [
    (torch.float32, 1e-6, True, 8, 2, (3, 32, 8, 8), True, False),
    (torch.float32, 1e-6, True, 4, 4, (2, 12, 8, 12), True, True),  # 18 patches: a masked tile
    (torch.float32, 1e-6, False, 8, 2, (2, 24, 4, 8), True, False),
    (torch.float32, 1e-6, False, 4, 4, (2, 8, 8, 8), False, False),
    (torch.float32, 1e-6, True, 16, 1, (2, 32, 3, 3), True, False),
    (torch.float16, 2e-3, True, 8, 2, (2, 80, 4, 4), True, False),
]:
    n = split * patch * patch
    form = torch.channels_last if last else torch.contiguous_format
    a, v, u = (torch.randn(shape).to(dtype).to(memory_format=form) for _ in range(3))
    v = v if with_v else None
    half = torch.randn(n, n) / n
    Q, gamma, t = half @ half.T + 0.3 * torch.eye(n), torch.tensor(0.05), torch.randn(shape[0])
    exact = [None if x is None else x.double() for x in (u, t, a, v, Q, gamma)]
    m, S = fused_reference.forward(*exact[2:], split, patch, negated)
    grad, grad_Q, grad_gamma = fused_reference.pullback(*exact, split, patch, negated)
    got = fused_launch.forward(a, v, Q, gamma, split, patch, negated, True)
    got += fused_launch.backward(u, t, a, v, Q, gamma, split, patch, negated, [True, with_v, True, True])
    expected = [m, S, grad, grad if negated else -grad, grad_Q, grad_gamma]
    errors = [error(x, y) for x, y in zip(got, expected) if x.numel()]
    assert len(errors) == 5 + with_v and max(errors) < tol, (dtype, last, split, patch, errors)
    assert got[0].stride() == a.stride() and got[0].dtype == dtype
    print("agreed", max(errors))
"""


def test_the_kernels_interpreted_agree_with_float64():
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("agreed") == 6


def gradients(inputs: list[Tensor], u: Tensor, negated: bool) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    m, S = patch_step(*leaves, split=8, patch=2, similarity=True, negated=negated)
    return [m, S, *torch.autograd.grad((m, S), leaves, (u.to(m.dtype), torch.ones_like(S)))]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="There is no CUDA card here.")
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("negated", [False, True])
def test_the_kernels_on_the_card_agree_with_float64(dtype, tol, last, negated):
    torch.manual_seed(0)
    form = torch.channels_last if last else torch.contiguous_format
    a, v, u = (torch.randn(4, 80, 16, 16, device="cuda").to(dtype).to(memory_format=form) for _ in range(3))
    half = torch.randn(32, 32, device="cuda") / 32
    Q, gamma = half @ half.T + 0.3 * torch.eye(32, device="cuda"), torch.tensor(0.05, device="cuda")
    got = gradients([a, v, Q, gamma], u, negated)
    expected = gradients([x.double() for x in (a, v, Q, gamma)], u, negated)
    assert reference.is_channels_last(got[0]) == last
    for x, y in zip(got, expected, strict=True):
        assert torch.linalg.norm(x.double() - y) < tol * torch.linalg.norm(y)
