"""Convolutions with what follows them: the same as the plain formulas, on any device."""

import pytest
import torch
from helpers import DEVICES
from interpreter import needs_triton, run_interpreted
from torch.nn.functional import conv2d, conv_transpose2d

from kerneq.linear_maps import Convolution

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
@pytest.mark.parametrize("side", [4, 8, 12])
def test_relu_and_mask_after_the_adjoint_are_what_their_formulas_say(device, dtype, side):
    v, w, z, g = problem(device, dtype, side=side)
    operator = Convolution(w)
    exact = conv_transpose2d(v.double(), w.double(), padding=1)
    close(operator.adjoint_relu(v, None), exact.relu(), dtype)
    close(operator.adjoint_relu(v, g), (exact + g.double()).relu(), dtype)
    for sign in (1, -1):
        close(operator.adjoint_masked(v, z, None, sign), torch.where(z > 0, sign * exact, 0.0), dtype)
        close(operator.adjoint_masked(v, z, g, sign), torch.where(z > 0, g.double() + sign * exact, 0.0), dtype)
        product = conv2d(z.double(), w.double(), padding=1)
        close(operator(z), product, dtype)
        close(operator.added(v, z, sign), v.double() + sign * product, dtype)


def test_the_gradient_of_the_weight_is_that_of_autograd():
    v, w, z, _ = problem("cpu", torch.float64, features=4, state=3, side=4)
    w.requires_grad_()
    (want,) = torch.autograd.grad(Convolution(w)(z), w, v)
    torch.testing.assert_close(Convolution(w.detach()).weight_gradient(z, v), want)


@pytest.mark.parametrize("device", DEVICES)
def test_the_relu_is_differentiated_where_a_graph_is_wanted(device):
    v, w, _, g = problem(device, torch.float32)
    v.requires_grad_(), w.requires_grad_()
    found = torch.autograd.grad(Convolution(w).adjoint_relu(v, g).square().sum(), (v, w))
    want = torch.autograd.grad((conv_transpose2d(v, w, padding=1) + g).relu().square().sum(), (v, w))
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


@needs_triton
def test_the_program_multiplies_adds_and_masks_at_every_size_it_takes():
    run_interpreted("interpreted_convolution.py")
