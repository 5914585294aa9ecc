"""The models as the papers have them: sizes, OptEq's own form, and a γ that acts at initialisation."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from zoo_helpers import pictures

import kerneq
from kerneq.kernels import AbstractKernel, Linear, Polynomial, Sigmoid
from kerneq.models import build, find, parameters

pytestmark = pytest.mark.usefixtures("float64")

PUBLISHED = {  # parameters in millions with the stem 3 → w → w, on ImageNet sizes followed by two w → w of stride 2
    ("geq-5m", "paper", 10): 5.04,
    ("mopteq-8m", "paper", 10): 7.85,
    ("geq-8m", "paper", 10): 7.87,
    ("geq-6m-imagenet", "imagenet", 100): 5.82,
    ("geq-13m-imagenet", "imagenet", 100): 13.02,
}


@pytest.mark.parametrize(("name", "stem", "classes"), PUBLISHED)
def test_the_papers_stem_gives_the_published_sizes(name, stem, classes):
    model = build(name, classes=classes, settings={"stem": stem})
    assert round(parameters(model) / 1e6, 2) == PUBLISHED[name, stem, classes]


def test_the_imagenet_stem_ends_at_a_quarter_of_the_side():
    stem = build("geq-tiny", settings={"stem": "imagenet"}).stem
    assert stem(torch.randn(2, 3, 64, 64)).shape == (2, 32, 16, 16)


def logits(gamma: float, **settings: float) -> Tensor:
    torch.manual_seed(0)
    solve = {"tol": 1e-13, "max_steps": 300}
    model = build("kerdeq-tiny", settings={"kernel": {"gamma": gamma}} | settings | solve)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eps = 1e-30
    with torch.no_grad():
        return model(pictures("kerdeq-tiny"))


def test_gamma_acts_at_initialisation_only_where_the_scale_of_a_does_not_follow_it():
    torch.testing.assert_close(logits(0.1), logits(10.0), rtol=0, atol=1e-9)  # fact 10
    assert float((logits(0.1, length=1.0) - logits(10.0, length=1.0)).abs().max()) > 1e-2
    torch.testing.assert_close(logits(0.5, length=1.0), logits(0.5), rtol=0, atol=0)  # KerDEQ's γ: one start


def unrolled(kernel: AbstractKernel, W: Tensor, a: Tensor) -> Tensor:
    """v = Wσ(…) by 400 plain iterations, W scaled and a shortened as the kernel's bound asks, all with a graph."""
    y = torch.zeros_like(a)
    for _ in range(400):
        v = F.conv2d(y, W, padding=1)
        t = (a * y).flatten(1).sum(1)[:, None, None, None]
        factor = {
            Linear: lambda t: 1 + 0 * t,
            Polynomial: lambda t: 2 * (t + 1),
            Sigmoid: lambda t: 1 - t.relu().tanh() ** 2,
        }
        y = torch.relu(factor[type(kernel)](t) * a + F.conv_transpose2d(v, W, padding=1))
    return F.conv2d(y, W, padding=1)


@pytest.mark.parametrize("kernel", [Linear(), Polynomial(), Sigmoid()], ids=lambda kernel: type(kernel).__name__)
def test_opteqs_own_form_agrees_with_an_unrolled_reference_and_so_do_its_gradients(kernel):
    torch.manual_seed(0)
    cell = kerneq.cells.ConvCell(kernel, inputs=4, state=3, features=5, norm=0.9, output="features")
    torch.nn.init.normal_(cell.operator.weight)  # far past the bound, so that the scaling has a gradient, too
    gradient = kerneq.gradients.Implicit(tol=1e-12, max_steps=500)
    layer = kerneq.Equilibrium(cell, gradient=gradient, tol=1e-13, max_steps=500)
    x = torch.randn(2, 4, 6, 6, requires_grad=True)
    wanted = [x, cell.operator.weight, *cell.inject.parameters()]
    probe = torch.randn(2, 5, 6, 6)

    # The norm of the real convolution: its matrix, column by column.
    weight, a = cell.operator.weight, cell.inject(x)
    basis = torch.eye(3 * 36).view(-1, 3, 6, 6)
    norm = torch.linalg.matrix_norm(F.conv2d(basis, weight, padding=1).flatten(1), ord=2)
    curved = not isinstance(kernel, Linear)
    W = weight * (0.9 * kernel.operator_share**0.5) / norm
    if curved:
        typical = 1.25 * a[0].numel() ** 0.5
        a = a * (kernel.max_length(0.9) / a.flatten(1).norm(dim=1).clamp_min(typical))[:, None, None, None]
    reference = unrolled(kernel, W, a)

    value = layer(x).value
    assert value.shape == (2, 5, 6, 6)
    torch.testing.assert_close(value, reference, rtol=1e-8, atol=1e-9)
    found = torch.autograd.grad((value * probe).sum(), wanted)
    right = torch.autograd.grad((reference * probe).sum(), wanted)
    for one, other in zip(found, right, strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-6
    if not curved:  # form (1): v = Wσ(Wᵀv + Ux + b), W̃ = Wᵀ
        again = F.conv2d(torch.relu(F.conv_transpose2d(value, W, padding=1) + a), W, padding=1)
        torch.testing.assert_close(again, value, rtol=1e-8, atol=1e-9)
    with torch.no_grad():
        torch.testing.assert_close(layer(x).value, reference, rtol=1e-8, atol=1e-9)


def test_the_published_polynomial_kernel_makes_a_network_with_constant_logits():
    model = build("mopteq-polynomial-tiny", settings={"kernel": {"offset": 0.0}})
    assert not model(pictures("mopteq-polynomial-tiny", batch=4)).std(0).any()
    assert build("mopteq-polynomial-tiny")(pictures("mopteq-polynomial-tiny", batch=4)).std(0).min() > 1e-3


@pytest.mark.parametrize("name", ["mopteq-tiny", "mopteq-polynomial-tiny", "mopteq-sigmoid-tiny"])
def test_on_large_pictures_too_no_branch_disappears_in_the_epsilon_of_its_batch_norm(name):
    """The curved kernels make a short, the shorter its entries the more there are of them; their branches undo it."""
    torch.manual_seed(0)
    model = build(name)
    for branch, x in zip(model.branches, model.levels(model.stem(torch.randn(8, 3, 64, 64))), strict=True):
        assert branch(x)[0].std((0, 2, 3)).median() > 0.95


def test_mopteq_has_the_widths_of_geq_and_its_state_in_the_mid_channels():
    mopteq, geq = find("mopteq-8m").config, find("geq-8m").config
    assert (mopteq.width, mopteq.features, mopteq.scales) == (geq.width, geq.features, geq.scales)
    for branch, mid in zip(build("mopteq-8m").branches, geq.features, strict=True):
        assert branch.equilibrium.cell.inject[0].weight.shape[:2] == (mid, 320)  # U
        assert branch.equilibrium.cell.operator.weight.shape[:2] == (320, mid)  # W̃ᵀ
    assert find("mopteq-8m").equation == "z = relu(Ux + b + WᵀWz); output v = Wz"
    with pytest.raises(ValueError, match="`output` must be state or features, got 'mid'"):
        kerneq.cells.ConvCell(Linear(), inputs=1, state=1, features=1, output="mid")
