"""Batch norm of our own: PyTorch's, with the ReLU in the same pass on the card.

Triton's interpreter must be chosen before Triton is imported, so it runs in a process of its own.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from kerneq.models.norm import BatchNorm, differentiable, synchronised

with_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed.")

START = """
import torch
from torch.nn.functional import batch_norm
from kerneq.models import norm_launch
from kerneq.models.norm import _Norm

torch.manual_seed(0)
torch.set_num_threads(1)

def error(got, exact):
    return (torch.linalg.norm(got.double() - exact) / torch.linalg.norm(exact)).item()

def maps(shape, dtype, mean=0.0):
    x = (torch.randn(shape) + mean).to(dtype).to(memory_format=torch.channels_last)
    state = [torch.randn(shape[1]), torch.rand(shape[1]) + 0.5, torch.tensor(3)]
    return x, torch.randn(shape[1]), torch.randn(shape[1]), state
"""
AGREEMENT = """
Tiling = norm_launch.Tiling
for dtype, tol, shape, mean, tiling in [
    (torch.float32, 1e-6, (4, 64, 8, 8), 0.0, Tiling()),  # two whole tiles a program
    (torch.float32, 1e-6, (3, 24, 5, 7), 3.0, Tiling()),  # missing pixels and channels
    (torch.float32, 1e-6, (3, 192, 3, 5), 0.0, Tiling(unroll=2, stages=1, warps=4)),  # three blocks of channels
    (torch.float32, 2e-4, (4, 16, 12, 12), 1000.0, Tiling()),  # the mean alone rounds to 3e-5
    (torch.bfloat16, 4e-3, (4, 32, 13, 13), 1.0, Tiling(warps=2)),  # the interpreter cuts where cards round
    (torch.float16, 1e-3, (2, 512, 3, 3), 1.0, Tiling(channels=128)),
]:
    for relu in (False, True):
        x, weight, bias, state = maps(shape, dtype, mean)
        g = torch.randn(shape).to(dtype).to(memory_format=torch.channels_last)
        leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
        wanted_state = [state[0].double(), state[1].double()]
        y = batch_norm(leaves[0], *wanted_state, *leaves[1:], training=True)
        y = y.relu() if relu else y
        expected = [y, *torch.autograd.grad(y, leaves, g.double()), *wanted_state]
        out, stats = norm_launch.forward(x, weight, bias, *state, 0.1, 1e-5, relu, tiling, tiling)
        got = [out, *norm_launch.backward(g, x, stats, weight, bias, relu, tiling, tiling), *state[:2]]
        errors = [error(a, b) for a, b in zip(got, expected, strict=True)]
        assert max(errors) < tol, (dtype, shape, relu, errors)
        assert state[2] == 4
        assert out.stride() == got[1].stride() == x.stride() and out.dtype == got[1].dtype == dtype
        print("agreed", dtype, shape, relu, errors)
"""
VARIANCE = """
for outlier in (False, True):
    x, weight, bias, state = maps((4, 16, 12, 12), torch.float32)
    x = x / 10 + 1000
    if outlier:
        x[0, :, 0, 0] = -5000  # the pixel that the first program shifts its sums by
    _, stats = norm_launch.forward(x, weight, bias, *state, 0.1, 1e-5, False)
    exact = x.double().var((0, 2, 3), unbiased=False).add(1e-5).rsqrt()
    assert ((stats[1] / exact - 1).abs() < 1e-4).all(), (outlier, stats[1] / exact - 1)
    assert ((stats[0] - x.double().mean((0, 2, 3))).abs() < 1e-3).all()
"""
MASK = """
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    x, weight, bias, state = maps((4, 32, 9, 9), dtype)
    bias.zero_()
    x.copy_(x.round())  # many values at the mean, so outputs at the edge of the ReLU
    weight[:8] = 1e-8  # which float16 rounds to zero
    y, stats = norm_launch.forward(x, weight, bias, *state, 0.1, 1e-5, True)
    _, _, passed = norm_launch.backward(torch.ones_like(x), x, stats, weight, bias, True)
    assert torch.equal(passed, (y > 0).sum((0, 2, 3)).float()) and (y >= 0).all()
x[1, 3, 4, 5] = torch.nan
y, _ = norm_launch.forward(x, weight, bias, *state, 0.1, 1e-5, True)
assert y[:, 3].isnan().all() and not y[:, 4].isnan().any()
"""
TWICE = """
x, weight, bias, state = maps((3, 8, 4, 4), torch.float32)
g, h = torch.randn_like(x), torch.randn_like(x)
leaves = [t.requires_grad_() for t in (x, weight, bias)]

def second_order(y):
    first = torch.autograd.grad(y, leaves, g, create_graph=True)
    return [*first, *torch.autograd.grad(first[0], leaves[:2], h, retain_graph=True)]

y = _Norm.apply(*leaves, *state, 0.1, 1e-5, True)
wanted = second_order(batch_norm(x, None, None, weight, bias, training=True).relu())
for a, b in zip(second_order(y), wanted, strict=True):
    torch.testing.assert_close(a, b)
for a, b in zip(torch.autograd.grad(y, leaves, g.contiguous()), wanted[:3], strict=True):  # g in another layout
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
"""


@with_triton
@pytest.mark.parametrize(
    "code", [AGREEMENT, VARIANCE, MASK, TWICE], ids=["agree", "find-the-variance", "mask-alike", "differentiate-twice"]
)
def test_the_kernels_interpreted(code):
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, "-c", START + code], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("agreed") == (12 if code is AGREEMENT else 0)


def plain(channels: int, relu: bool) -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU() if relu else nn.Identity())


def passes(model: nn.Module, x: Tensor, g: Tensor) -> list[Tensor]:
    """Output and gradients in training, twice, then the output in evaluation."""
    found = []
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        found += [y, *torch.autograd.grad(y, [leaf, *model.parameters()], g)]
    return [*found, model.eval()(x)]


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_without_a_card_it_is_the_batch_norm_of_pytorch(relu, layout):
    torch.manual_seed(0)
    x, g = torch.randn(4, 6, 5, 5).to(memory_format=layout), torch.randn(4, 6, 5, 5)
    ours, theirs = BatchNorm(6, relu), plain(6, relu)
    kept = x.clone()
    for a, b in zip(passes(ours, x, g), passes(theirs, x, g), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(x, kept), "the input is not written to"
    for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
        assert torch.equal(a, b)


def test_states_pass_between_it_and_the_batch_norm_of_pytorch():
    torch.manual_seed(0)
    ours, theirs = BatchNorm(6, relu=True), nn.BatchNorm2d(6)
    nn.init.normal_(ours.weight)
    ours(torch.randn(4, 6, 5, 5))
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(4, 6, 5, 5)
    assert torch.equal(ours.eval()(x), theirs.eval()(x).relu())
    theirs.train()(x)
    ours.load_state_dict(theirs.state_dict())
    assert ours.num_batches_tracked == 2 and torch.equal(ours.running_var, theirs.running_var)
    assert "relu=True" in repr(ours)


def test_one_value_a_channel_is_refused_as_by_pytorch():
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        BatchNorm(6, relu=True)(torch.randn(1, 6, 1, 1))


@pytest.mark.parametrize("relu", [False, True])
def test_the_gradient_with_a_graph_has_the_right_derivative(relu):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    g = torch.randn(2, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *t: differentiable(t[0], t[1:], 1e-5, relu), (g, x, weight, bias))


def test_norms_over_all_processes_keep_their_relus():
    torch.manual_seed(0)
    model = nn.Sequential(BatchNorm(4, relu=True), nn.Conv2d(4, 4, 1), BatchNorm(4))
    x = torch.randn(3, 4, 5, 5)
    model(x)
    model.eval()
    wanted = model(x)
    found = synchronised(model)
    assert [type(found[0]), type(found[2])] == [nn.SyncBatchNorm] * 2
    assert torch.equal(found(x), wanted)
