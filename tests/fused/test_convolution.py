"""Convolutions with what follows them: the same as the plain formulas, on any device."""

import dataclasses

import pytest
import torch
from helpers import DEVICES
from interpreter import needs_triton, run_interpreted
from torch.nn.functional import conv2d, conv_transpose2d

from kerneq.cells import ConvCell
from kerneq.gradients.implicit import Adjoint
from kerneq.kernels import Linear, Squared
from kerneq.kernels.base import Slope
from kerneq.linear_maps import LinearMap
from kerneq.maps import Point

LAST = torch.channels_last


def problem(device, dtype, batch=3, features=128, state=128, side=8):
    torch.manual_seed(0)
    make = lambda *shape: torch.randn(*shape, device=device, dtype=torch.float64)  # noqa: E731
    v, w = make(batch, features, side, side), make(features, state, 3, 3) / (9 * features) ** 0.5
    z, g = make(batch, state, side, side), make(batch, state, side, side)
    return tuple(t.to(dtype).to(memory_format=LAST) for t in (v, w, z, g))


def equation(kernel, w, z):
    """With W as it is given."""
    f = ConvCell(kernel, inputs=1, state=z.shape[1], features=len(w)).to(z).eval().bind(z[:, :1])
    return dataclasses.replace(f, operator=LinearMap(w))


def close(got, want, dtype):
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-3, torch.bfloat16: 1e-2}[dtype]  # TF32 on a GPU
    assert (got.double() - want).norm() <= tolerance * want.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("side", [4, 8, 12])
def test_relu_and_mask_after_the_adjoint_are_what_their_formulas_say(device, dtype, side):
    v, w, z, g = problem(device, dtype, side=side)
    exact = conv_transpose2d(v.double(), w.double(), padding=1)
    product = conv2d(z.double(), w.double(), padding=1)
    for kernel, sign in ((Linear(), 1), (Squared(), -1)):
        f = equation(kernel, w, z)
        close(f.operator(z), product, dtype)
        close(f.image(Slope(None, v), drive=False)[0], exact.relu(), dtype)
        close(f.image(Slope(g, v), drive=False)[0], (exact + g.double()).relu(), dtype)
        adjoint = Adjoint.of(f, Point(z, v, z))
        close(adjoint.masked_adjoint(v, None), torch.where(z > 0, exact, 0.0), dtype)
        close(adjoint.masked_adjoint(v, g), torch.where(z > 0, g.double() + exact, 0.0), dtype)
        system = adjoint.in_features(g)  # y ↦ WDg + WDWᵀNy, N = ±1
        turned = conv2d(torch.where(z > 0, exact, 0.0), w.double(), padding=1)
        close(system.evaluate(v).image, system.source.double() + sign * turned, dtype)


def test_the_gradient_of_the_weight_is_that_of_autograd():
    v, w, z, _ = problem("cpu", torch.float64, features=4, state=3, side=4)
    w.requires_grad_()
    (want,) = torch.autograd.grad(LinearMap(w)(z), w, v)
    torch.testing.assert_close(LinearMap(w.detach()).weight_gradient(z, v), want)


@pytest.mark.parametrize("device", DEVICES)
def test_the_relu_is_differentiated_where_a_graph_is_wanted(device):
    v, w, _, g = problem(device, torch.float32)
    v.requires_grad_(), w.requires_grad_()
    image, _ = equation(Linear(), w, g).image(Slope(g, v), drive=False)
    found = torch.autograd.grad(image.square().sum(), (v, w))
    want = torch.autograd.grad((conv_transpose2d(v, w, padding=1) + g).relu().square().sum(), (v, w))
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


@needs_triton
def test_the_program_multiplies_adds_and_masks_at_every_size_it_takes():
    run_interpreted("interpreted_convolution.py")
