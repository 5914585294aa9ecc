"""Saliency: closed forms of Grad-CAM and integrated gradients, weights by their formula, a model of one patch."""

import numpy as np
import pytest
import torch
from helpers import cell_of, input_of, patches
from torch import nn

from kerneq.equilibrium import Equilibrium, solving
from kerneq.gradients import Phantom, Unrolled
from kerneq.kernels import Gaussian
from kerneq.lab.evaluate.saliency import (
    all_maps,
    contact_sheet,
    draw_overlay,
    feature_layers,
    grad_cam,
    integrated_gradients,
    replace_pixels,
    weight_map,
)
from kerneq.models import build, classifier
from kerneq.solution import Solution


@pytest.fixture(autouse=True, scope="module")
def every_test_here(float64):
    """In float64 and on one thread."""


class Net(nn.Module):
    """stem → equilibrium → mean → head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 2, 3, padding=1)
        kernel = Gaussian(gamma=0.5, patch=2, split=2, hidden=6)
        self.equilibrium = Equilibrium(cell_of("conv", kernel, norm=1.2), gradient=Phantom(), tol=1e-8, max_steps=200)
        self.state = nn.Identity()
        self.head = nn.Linear(3, 4)

    def forward(self, x, solutions=False):
        solution: Solution = self.equilibrium(self.stem(x))
        logits = self.head(self.state(solution.value).mean((2, 3)))
        return (logits, {"branch0": solution}) if solutions else logits


@pytest.fixture(scope="module")
def net(every_test_here):
    torch.manual_seed(0)
    return Net().eval()


def test_grad_cam_of_a_linear_head_over_a_mean_is_the_weighted_sum_of_the_feature_maps(net):
    x, classes = input_of("conv"), torch.tensor([0, 1, 2, 3])
    found = grad_cam(net, x, classes, {"state": net.state})["state"]
    with solving(net, tol=1e-5):
        z = net.equilibrium(net.stem(x)).value
    expected = torch.relu(torch.einsum("bc,bchw->bhw", net.head.weight[classes], z)) / 16
    torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-7)  # the residual is 1e-5


def test_grad_cam_through_the_equilibrium_has_the_gradient_of_the_unrolled_iterations(net):
    x, classes = input_of("conv"), torch.tensor([0, 1, 2, 3])
    found = grad_cam(net, x, classes, {"stem": net.stem})["stem"]
    A = net.stem(x).detach().requires_grad_()
    with solving(net, gradient=Unrolled(100)):
        y = net.head(net.equilibrium(A).value.mean((2, 3))).gather(1, classes[:, None])
    (slope,) = torch.autograd.grad(y.sum(), A)
    expected = torch.relu((slope.mean((2, 3), keepdim=True) * A).sum(1))
    torch.testing.assert_close(found, expected.detach(), rtol=1e-3, atol=1e-6)
    assert all(parameter.requires_grad for parameter in net.parameters())


def test_maps_of_a_model_are_those_of_its_last_features_and_its_stem():
    torch.manual_seed(0)
    x = torch.randn(2, 1, 8, 8)
    geq, resnet = (build(name, classes=10, channels=1).eval() for name in ("geq-tiny", "resnet-tiny"))
    layers = feature_layers(geq, x)
    assert list(layers) == ["Grad-CAM", "Grad-CAM stem"]
    assert layers["Grad-CAM"] is geq.norm and layers["Grad-CAM stem"] is geq.stem
    assert feature_layers(resnet, x) == {"Grad-CAM": resnet.blocks}
    classes = torch.tensor([3, 5])
    maps = grad_cam(geq, x, classes, layers)
    assert all(found.shape == (2, 8, 8) and bool((found >= 0).all()) for found in maps.values())
    dense = build("geq-dense-tiny", classes=10, channels=1).eval()
    assert feature_layers(dense, x) == {} and all_maps(dense, x, classes)["integrated gradients"].shape == (2, 8, 8)


def test_the_weights_are_the_same_in_whatever_order_branches_are_solved(monkeypatch):
    """On a GPU they run side by side, and end in any order."""

    def first_one_last(functions, inputs, overlap):
        inputs = list(inputs)
        others = [function(x) for function, x in zip(functions[1:], inputs[1:], strict=True)]
        return [functions[0](inputs[0]), *others]

    geq, x = build("geq-tiny", classes=10, channels=3).eval(), torch.randn(2, 3, 8, 8)
    weights = weight_map(geq, x)
    monkeypatch.setattr(classifier, "run_on_streams", first_one_last)
    assert torch.equal(weight_map(geq, x), weights)


def test_integrated_gradients_of_a_linear_model_are_its_weights_times_the_picture():
    linear = nn.Sequential(nn.Flatten(), nn.Linear(32, 4)).eval()
    x, classes = input_of("conv"), torch.tensor([0, 1, 2, 3])
    expected = x * linear[1].weight[classes].view_as(x)
    torch.testing.assert_close(integrated_gradients(linear, x, classes, steps=3), expected.detach())


def test_integrated_gradients_account_for_the_whole_difference(net):
    x, classes = input_of("conv"), torch.tensor([0, 1, 2, 3])
    y, start = (net(p).gather(1, classes[:, None])[:, 0].detach() for p in (x, torch.zeros_like(x)))
    errors = [
        (integrated_gradients(net, x, classes, steps=steps).flatten(1).sum(1) - (y - start)).abs().max()
        for steps in (4, 32)
    ]
    assert errors[1] < 0.02 * (y - start).abs().max() and errors[1] < errors[0]  # the rest is quadrature


def test_the_weights_are_those_of_the_formula_averaged_over_channels(net):
    x = input_of("conv")
    found = weight_map(net, x)
    cell = net.equilibrium.cell
    f = cell.bind(net.stem(x))
    r = (f.binding.a - f.operator(net.equilibrium(net.stem(x)).value)).detach()
    rows = patches(r, 2, 2) @ cell.similarity.project.weight.mT  # (batch, 2 groups × 2 × 2 patches, hidden)
    weights = torch.exp(-0.5 * rows.square().sum(-1)).view(4, 2, 2, 2).mean(1).detach()
    torch.testing.assert_close(found[:, [0, 0, -1, -1], [0, -1, 0, -1]], weights.flatten(1))  # corners are not mixed
    assert weight_map(build("resnet-tiny", classes=10, channels=2).eval(), torch.randn(1, 2, 8, 8)) is None


def test_deletion_and_insertion_know_where_a_model_looks():
    class Patch(nn.Module):
        def forward(self, x):
            score = 8 * x[:, :, 2:4, 2:4].mean((1, 2, 3))
            return torch.stack([score, -score], dim=1)

    x, classes = torch.ones(2, 3, 8, 8), torch.zeros(2, dtype=torch.long)
    right = torch.zeros(2, 8, 8)
    right[:, 2:4, 2:4] = 1
    (low, high), (worst, least) = (replace_pixels(Patch(), x, classes, maps, steps=16) for maps in (right, -right))
    # The patch is 4 of 64 pixels: gone, or there, after the first of 16 parts; a half is left of the probability.
    sure = torch.sigmoid(torch.tensor(16.0))
    torch.testing.assert_close(low, ((sure + 0.5) / 2 + 15 * 0.5).expand(2) / 16)
    torch.testing.assert_close(high, ((sure + 0.5) / 2 + 15 * sure).expand(2) / 16)
    torch.testing.assert_close(worst, high)
    torch.testing.assert_close(least, low)


def test_an_overlay_is_darkest_where_the_map_is_lowest():
    picture = torch.full((1, 8, 8), 128, dtype=torch.uint8)
    heat = torch.zeros(8, 8)
    heat[6:, 6:] = 5.0
    seen = np.asarray(draw_overlay(picture, heat).convert("L"), dtype=float)
    assert seen.shape == (128, 128) and seen[120, 120] > seen[5, 5] + 50
    flat = np.asarray(draw_overlay(picture, torch.full((8, 8), 0.3)))
    assert (flat == flat[0, 0]).all()  # a map that says nothing divides nothing by zero
    sheet = contact_sheet(picture[None].expand(3, -1, -1, -1), ["a", "b", "c"], {"weights": heat.expand(3, -1, -1)})
    assert sheet.width > 2 * 112 and sheet.height > 3 * 112
