"""The adjoint with σ or its mask: the same as the plain formulas, on any device; the kernel in Triton's interpreter."""

import os
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import conv2d, conv_transpose2d

from kerneq.operators import BoundOperator

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=cuda)]
LAST = torch.channels_last


def problem(device, dtype, batch=3, features=128, state=128, side=8):
    torch.manual_seed(0)
    make = lambda *shape: torch.randn(*shape, device=device, dtype=torch.float64)  # noqa: E731
    v, w = make(batch, features, side, side), make(features, state, 3, 3) / (9 * features) ** 0.5
    z, g = make(batch, state, side, side), make(batch, state, side, side)
    return tuple(t.to(dtype).to(memory_format=LAST) for t in (v, w, z, g))


def close(got, want, dtype):
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-3, torch.bfloat16: 1e-2}[dtype]  # TF32 on a GPU
    assert (got.double() - want).norm() <= tolerance * want.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("side", [4, 8, 12, 32])
def test_relu_and_mask_after_the_adjoint_are_what_their_formulas_say(device, dtype, side):
    v, w, z, g = problem(device, dtype, side=side)
    operator = BoundOperator(w, 3)
    exact = conv_transpose2d(v.double(), w.double(), padding=1)
    close(operator.adjoint_relu(v, None), exact.relu(), dtype)
    close(operator.adjoint_relu(v, g), (exact + g.double()).relu(), dtype)
    for sign in (1, -1):
        close(operator.adjoint_masked(v, z, None, sign), torch.where(z > 0, sign * exact, 0.0), dtype)
        close(operator.adjoint_masked(v, z, g, sign), torch.where(z > 0, g.double() + sign * exact, 0.0), dtype)
        product = conv2d(z.double(), w.double(), padding=1)
        close(operator(z), product, dtype)
        close(operator.added(v, z, sign), v.double() + sign * product, dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_the_relu_is_differentiated_where_a_graph_is_wanted(device):
    v, w, _, g = problem(device, torch.float32)
    v.requires_grad_(), w.requires_grad_()
    found = torch.autograd.grad(BoundOperator(w, 3).adjoint_relu(v, g).square().sum(), (v, w))
    want = torch.autograd.grad((conv_transpose2d(v, w, padding=1) + g).relu().square().sum(), (v, w))
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_the_kernel_multiplies_adds_and_masks_at_every_size_it_takes():
    pytest.importorskip("triton")
    code = """
import torch
from torch.nn.functional import conv2d, conv_transpose2d
from kerneq.convolution.fused_triton import product
torch.manual_seed(0)
def last(*shape): return torch.randn(*shape).to(memory_format=torch.channels_last)
def same(a, b): torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
for batch, side in ((1, 16), (3, 8), (9, 4)):
    w = last(64, 128, 3, 3)
    v, z, g = last(batch, 64, side, side), last(batch, 128, side, side), last(batch, 128, side, side)
    exact = conv_transpose2d(v, w, padding=1)
    same(product(v, w, True, None, 1, z), torch.where(z > 0, exact, 0.0))
    same(product(v, w, True, g, -1, z), torch.where(z > 0, g - exact, 0.0))
    w = last(128, 64, 3, 3)
    same(product(v, w, False, None, 1, None), conv2d(v, w, padding=1))
    same(product(v, w, False, g, -1, None), g - conv2d(v, w, padding=1))
"""
    in_interpreter(code)


def test_the_residual_in_one_pass_is_the_residual():
    pytest.importorskip("triton")
    code = """
import torch
from kerneq.solvers.residual_triton import residual_and_gap
torch.manual_seed(0)
for shape in ((3, 7), (2, 5, 60, 70), (1, 100_000)):
    z, f = torch.randn(shape), torch.randn(shape)
    residual, gap = residual_and_gap(z, f)
    exact = (f - z).double().flatten(1).norm(dim=1)
    torch.testing.assert_close(gap.double(), exact, rtol=1e-5, atol=0)
    torch.testing.assert_close(residual.double(), exact / f.double().flatten(1).norm(dim=1), rtol=1e-5, atol=0)
nothing = torch.zeros(2, 9)
residual, gap = residual_and_gap(torch.ones(2, 9), nothing)
assert residual.isfinite().all() and (residual > 1e6).all() and torch.equal(gap, torch.full((2,), 3.0))
assert residual_and_gap(nothing, nothing)[0].eq(0).all()
assert residual_and_gap(nothing, nothing + torch.nan)[0].isnan().all()
"""
    in_interpreter(code)


def in_interpreter(code):
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
