"""The functions of `kerneq.theory` against closed forms, explicit matrices and a trained layer."""

import math

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import kerneq
from kerneq.cells import ConvCell, DenseCell
from kerneq.kernels import Cauchy, Gaussian, Linear, Multiquadric, Sigmoid
from kerneq.lab import verify as theory
from kerneq.lab.verify import Constants

pytestmark = pytest.mark.usefixtures("float64")


def test_the_infinitely_wide_features_are_the_gaussian_kernel():
    torch.manual_seed(0)
    a, v, gamma = torch.randn(20, 3), torch.randn(20, 3), 0.4
    few = theory.proposition1(a, v, gamma, order=4)
    phi = theory.feature_map(a, gamma, 4), theory.feature_map(v, gamma, 4)
    assert phi[0].shape == (20, 1 + 3 + 9 + 27 + 81)
    torch.testing.assert_close((phi[0] * phi[1]).sum(1), few.corrected)
    assert ((few.kernel - few.corrected).abs() <= few.error).all() and (few.error > 0).all()
    torch.testing.assert_close(theory.proposition1(a, v, gamma, order=60).corrected, few.kernel, rtol=1e-10, atol=1e-14)
    v.requires_grad_()
    (slope,) = torch.autograd.grad(theory.proposition1(a, v, gamma, 4).corrected.sum(), v)
    torch.testing.assert_close(slope, few.slope)


@pytest.mark.parametrize("kernel", [Gaussian, Multiquadric, Cauchy])
def test_the_lipschitz_constant_is_attained(kernel):
    """K is the largest ‖(I + BᵀNB)⁻¹BᵀN‖, N with eigenvalues −c and 1 and ‖B‖ = w: two dimensions are enough."""
    c = max(0.0, -kernel.lowest)
    for w in (0.2, 0.9, 1.4, 2.0):
        K = theory.input_lipschitz(w, kernel.lowest)
        if c * w**2 >= 1:
            assert K == math.inf
            continue
        t, size = torch.meshgrid(torch.linspace(0, 1, 201), torch.linspace(0, w, 201), indexing="ij")
        y = size[..., None] * torch.stack([t.sqrt(), (1 - t).sqrt()], dim=-1)  # B = yeᵀ: one column
        N = torch.tensor([1.0, -c])
        found = ((N * y).norm(dim=-1) / (1 + (N * y * y).sum(-1))).max()
        assert found <= K * (1 + 1e-12) and found == pytest.approx(K, rel=1e-3)
    assert theory.input_lipschitz(100.0, Multiquadric.lowest) == 0.5


def test_the_corrected_similarities_have_the_right_limits():
    x1, x2 = torch.tensor([1.0, 0.5]), torch.tensor([0.3, -2.0])
    none = theory.proposition4(Constants(W=0.0, gamma=1.0), x1, x2, 0.1, rows=7, smallest=0.0)
    assert none.opteq.corrected == pytest.approx(theory.lemma3(x1, x2, 0.1, rows=7).corrected)
    assert none.geq.corrected == 0
    # many rows of variance 1/n: ‖U(x₁ − x₂)‖ → ‖x₁ − x₂‖, and the published decay −γ/4 comes back
    c = Constants(W=0.5, gamma=0.7)
    many = theory.proposition4(c, x1, x2, 1e-6, rows=10**6, smallest=1.0).geq.corrected
    apart = float((x1 - x2).square().sum())
    expected = 0.25 * math.exp(0.0625 / (2 * math.e) - 0.7 / 4 * apart) * float(x1.norm() * x2.norm())
    assert many == pytest.approx(expected, rel=1e-4)
    with pytest.raises(ValueError, match="one Gaussian for all features, got 4 patches"):
        theory.proposition4(Constants(W=0.5, patches=4), x1, x2, 1.0, 2, 0.0)


def test_the_margin_loss_counts_what_is_not_clear_enough():
    logits = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.5, 0.0], [0.0, 1.0, 0.9]])
    labels = torch.tensor([0, 0, 2])
    assert theory.margin_loss(logits, labels, 0.0) == pytest.approx(1 / 3)
    assert theory.margin_loss(logits, labels, 0.7) == pytest.approx(2 / 3)
    assert theory.margin_loss(logits, labels, 1.0) == 1.0


def test_the_generalisation_bounds_fall_with_the_samples_and_need_the_size_of_the_weights():
    c = Constants(W=0.9, U=0.9, b=0.5, head=0.9, beta=0.7, width=20, size=30.0, published_size=25.0)
    few, many = (theory.proposition2(c, margin=1.0, samples=M, delta=0.05) for M in (10**4, 10**12))
    for one, other in ((few.geq, many.geq), (few.opteq, many.opteq)):
        assert one.published > other.published and one.corrected > other.corrected > other.published
    assert many.geq.corrected < 1 < few.geq.corrected  # non-trivial only far beyond any data set
    assert theory.theorem2(c, 1.0, 10**4, 0.05).geq.corrected == few.geq.corrected
    with pytest.raises(ValueError, match="measure a DenseCell together with its head"):
        theory.proposition2(Constants(W=0.9), 1.0, 100, 0.05)


def test_the_constants_of_a_cell_are_those_of_its_matrices():
    torch.manual_seed(0)
    cell, head = DenseCell(Gaussian(0.3, split=3, hidden=4), inputs=3, state=5, features=6, norm=0.8), nn.Linear(5, 2)
    x = torch.randn(40, 3)
    c = theory.measure(cell, x, head)
    with torch.no_grad():
        f = cell.bind(x)
        fold = torch.block_diag(*[cell.similarity.project.weight] * 2)  # (8, 6): W_hᵀ on both patches
        W, U, b = fold @ f.operator.weight, fold @ cell.inject.weight, fold @ cell.inject.bias
        z = kerneq.solve(f, None, kerneq.solvers.Proximal(), tol=1e-12, max_steps=1000).value
        r = (f.binding.a - f.operator(z)) @ fold.mT
        beta = torch.exp(-0.3 * r.view(40, 2, 4).square().sum(2)).max()
    assert c.W >= torch.linalg.matrix_norm(W, 2) - 1e-12 and c.U >= torch.linalg.matrix_norm(U, 2) - 1e-12
    assert c.beta == pytest.approx(float(beta)) and c.patches == 2 and c.gamma == pytest.approx(0.3)
    assert c.outputs == pytest.approx(float(z.norm(dim=1).max())) and c.outputs <= c.drive / 2
    squares = [float(t.square().sum()) for t in (W, U, b, head.weight.detach(), head.bias.detach())]
    assert c.size == pytest.approx(sum(squares)) and c.width == 8
    assert c.published_size == pytest.approx(sum(squares) - squares[0] + float((W.mT @ W).square().sum()))
    cell.inject.bias = head.bias = None
    bare = theory.measure(cell, x, head)
    assert bare.b == 0 and bare.size == pytest.approx(sum(squares) - squares[2] - squares[4])
    opteq = theory.measure(DenseCell(Linear(), inputs=3, state=5, features=6, norm=0.8), x)
    assert opteq.beta == 1 and opteq.gamma == 0 and math.isnan(opteq.size)
    with pytest.raises(TypeError, match="radial kernels and the linear one, got Sigmoid"):
        theory.measure(DenseCell(Sigmoid(), inputs=3, state=5, features=6), x)


def test_the_constants_of_a_convolutional_cell():
    torch.manual_seed(0)
    inject = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)).eval()
    cell = ConvCell(Gaussian(0.3, patch=2, split=2), inputs=1, state=3, features=4, inject=inject).eval()
    x = torch.randn(5, 1, 4, 4)
    c = theory.measure(cell, x)
    with torch.no_grad():
        columns = inject(torch.eye(16).view(16, 1, 4, 4)) - inject(torch.zeros(1, 1, 4, 4))
        exact = torch.linalg.matrix_norm(columns.flatten(1), 2) * cell.similarity.gain()
    assert c.U == pytest.approx(float(exact), rel=1e-4) and c.patches == 8


def test_the_bounds_hold_for_a_layer_trained_on_digits():
    torch.manual_seed(0)
    pictures, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(pictures)[:300]
    x, y = nn.functional.normalize(x - x.mean(0), dim=1), torch.from_numpy(labels)[:300]
    cell, head = DenseCell(Gaussian(0.5, hidden=16), inputs=64, state=32, features=16, norm=1.2), nn.Linear(32, 10)
    layer = kerneq.Equilibrium(cell.eval(), tol=1e-4, max_steps=50)  # whose norm is then that of the weights now
    optimiser = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=0.1)
    for _ in range(25):
        optimiser.zero_grad()
        nn.functional.cross_entropy(head(layer(x).value), y).backward()
        optimiser.step()
    c = theory.measure(cell, x, head)
    with torch.no_grad():
        z = kerneq.solve(cell.bind(x), None, kerneq.solvers.Proximal(), tol=1e-10, max_steps=500).value
        logits = head(z)
    assert (logits.argmax(1) == y).double().mean() > 0.8 and 0 < c.beta <= 1
    quotients = torch.pdist(z) / torch.pdist(x)
    assert quotients.max() <= theory.proposition3(c).geq.corrected < math.inf
    gap = theory.proposition2(c, margin=1.0, samples=300, delta=0.05).geq
    assert 1 < gap.corrected < math.inf and theory.margin_loss(logits, y, 0.0) < theory.margin_loss(logits, y, 1.0)
