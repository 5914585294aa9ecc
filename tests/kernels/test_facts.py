"""Facts 1, 2, 4, 8, 9 and 10 of docs/theory.md as properties of random problems."""

import dataclasses
import math

import pytest
import torch
from helpers import KERNELS, RADIAL, cell_of, descend, examples, input_of
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits

import kerneq
from kerneq.cells import ConvCell
from kerneq.gradients import Point
from kerneq.kernels import Gaussian, Linear, Multiquadric, Polynomial, Sigmoid
from kerneq.solvers import Anderson, Broyden, Newton, Picard, Proximal

pytestmark = pytest.mark.usefixtures("float64")
seeds = st.integers(0, 10**6)
gammas = st.floats(1e-3, 1e2)
CURVATURE = 2 * math.exp(-1.5)  # the largest of 2s e^{−s} − e^{−s}, at s = 3/2


def bound_at(cell, seed: int, scale: float = 1.0):
    """The equation at a random input, and a random state."""
    x = scale * input_of("dense", batch=1, seed=seed)
    return cell.eval().bind(x), torch.randn(1, 5) * scale


def jacobian(function, z: torch.Tensor) -> torch.Tensor:
    return torch.autograd.functional.jacobian(function, z).reshape(z.numel(), z.numel())


@pytest.mark.parametrize("kernel", RADIAL)
@examples
@given(seed=seeds, L=st.floats(0.1, 60), gamma=gammas, scale=st.floats(0.01, 30))
def test_facts_1_2_and_9_bound_the_slopes_of_every_radial_kernel_for_every_gamma_and_every_input(
    kernel, seed, L, gamma, scale
):
    """−∂²S/∂v² has the eigenvalues ω and ω + 2sω′: L and μ follow, and the Hessian stays between their bounds."""
    chosen = dataclasses.replace(RADIAL[kernel], gamma=gamma, split=3)
    f, z = bound_at(cell_of("dense", chosen, norm=math.sqrt(L), stretch=50.0, seed=seed), seed, scale)
    assert f.bound == pytest.approx(L) and f.convexity == pytest.approx(1 + min(0.0, chosen.lowest) * L)
    slope = jacobian(f.drive, z)
    torch.testing.assert_close(slope, slope.mT)
    assert torch.linalg.matrix_norm(slope, 2) <= L * (1 + 1e-9)
    assert torch.linalg.eigvalsh(torch.eye(5) - slope).min() >= f.convexity - 1e-9
    other = z + scale * torch.randn(z.shape)
    assert (f(z) - f(other)).norm() <= L * (z - other).norm() * (1 + 1e-9)


@examples
@given(seed=seeds, L=st.floats(0.1, 20), kernel=st.sampled_from(["linear", "quadratic", "sigmoid"]))
def test_the_stated_bound_is_a_lipschitz_constant_for_the_other_kernels_too(seed, L, kernel):
    cell = cell_of("dense", KERNELS[kernel], norm=math.sqrt(L), stretch=50.0, seed=seed)
    f, z = bound_at(cell, seed)
    assert torch.linalg.matrix_norm(jacobian(f.drive, z), 2) <= f.bound * (1 + 1e-9)
    assert kernel == "sigmoid" or f.bound <= L * (1 + 1e-9)
    hessian = torch.eye(5) - jacobian(f.drive, z)
    assert torch.linalg.eigvalsh(hessian).min() >= f.convexity - 1e-9


@pytest.mark.parametrize("kernel", RADIAL)
def test_the_formulas_and_constants_of_a_radial_kernel_belong_together(kernel):
    formula = type(RADIAL[kernel])
    s = torch.cat([torch.zeros(1), torch.logspace(-4, 8, 200001)]).requires_grad_()
    (height,) = torch.autograd.grad(formula.height(s).sum(), s)
    (slope,) = torch.autograd.grad(formula.weight(s).sum(), s)
    torch.testing.assert_close(formula.weight(s), -2 * height)
    torch.testing.assert_close(formula.slope(s), slope)
    s = s.detach()
    along = formula.weight(s) + 2 * s * formula.slope(s)
    assert torch.maximum(formula.weight(s), along.abs()).max() == pytest.approx(formula.steepest)
    assert along.min() == pytest.approx(formula.lowest, abs=1e-8) and (formula.weight(s) >= 0).all()


def multiquadric_from_afar(seed, gamma, norm, solver):
    """What a solver finds from three starts, the last of them hundreds of lengths away."""
    cell = cell_of("dense", Multiquadric(gamma=gamma, split=3), norm=norm, stretch=1000.0, seed=seed)
    f = cell.eval().bind(input_of("dense", batch=1, seed=seed).expand(3, -1))
    assert f.bound == pytest.approx(norm**2) and f.convexity == 1
    starts = torch.tensor([[0.0], [3.0], [300.0]]) * torch.rand(3, 5)
    return kerneq.solve(f, starts, solver, tol=1e-9, max_steps=20000, on_failure="raise")


@examples
@given(seed=seeds, gamma=gammas, norm=st.floats(1, 30))
def test_the_multiquadric_has_one_equilibrium_whatever_the_norm(seed, gamma, norm):
    found = multiquadric_from_afar(seed, gamma, norm, Newton())
    assert ((found.value - found.value[0]).norm(dim=1) <= found.error_bound + found.error_bound[0]).all()


def test_proximal_reaches_the_equilibrium_of_the_multiquadric_whatever_the_norm():
    for gamma, norm in ((0.01, 30.0), (1.0, 9.0), (86.0, 29.0)):
        found, exact = (multiquadric_from_afar(262, gamma, norm, solver) for solver in (Proximal(), Newton()))
        assert ((found.value - exact.value).norm(dim=1) <= found.error_bound + exact.error_bound).all()


@examples
@given(seed=seeds, c=st.floats(0.1, 10), kernel=st.sampled_from(sorted(RADIAL)))
def test_fact_10_gamma_is_a_unit_of_length(seed, c, kernel):
    """z solves the equation for (a, γ) exactly if cz solves it for (ca, γ/c²)."""
    one = cell_of("dense", dataclasses.replace(RADIAL[kernel], gamma=0.5), seed=seed)
    other = cell_of("dense", dataclasses.replace(RADIAL[kernel], gamma=0.5 / c**2), seed=seed)
    with torch.no_grad():
        other.inject.weight.copy_(c * one.inject.weight)
        other.inject.bias.copy_(c * one.inject.bias)
    x, z = input_of("dense"), torch.rand(4, 5)
    torch.testing.assert_close(other.eval().bind(x)(c * z), c * one.eval().bind(x)(z))


def test_the_constants_of_facts_1_and_2_cannot_be_improved():
    """W = W_h = I and one patch: at s = 3/2 the Hessian of −S is −2e^{−3/2} along r, and at r = 0 its norm is 1."""
    cell = kerneq.cells.DenseCell(Gaussian(gamma=1.0, hidden=2), inputs=2, state=2, features=2, norm=10.0)
    with torch.no_grad():
        for weight in (cell.operator.weight, cell.similarity.project.weight, cell.inject.weight):
            weight.copy_(torch.eye(2))
        cell.inject.bias.zero_()
    f = cell.eval().bind(torch.zeros(1, 2))
    at_edge = torch.eye(2) - jacobian(f.drive, torch.tensor([[math.sqrt(1.5), 0.0]]))
    assert torch.linalg.eigvalsh(at_edge).min() == pytest.approx(1 - CURVATURE)
    assert torch.linalg.matrix_norm(jacobian(f.drive, torch.zeros(1, 2)), 2) == pytest.approx(1.0)


@examples
@given(seed=seeds, gamma=st.floats(0.01, 2))
def test_between_contraction_and_the_convexity_limit_the_equilibrium_is_unique(seed, gamma):
    cell = cell_of("dense", Gaussian(gamma=gamma), norm=math.sqrt(2.2), stretch=50.0, seed=seed)
    f = cell.eval().bind(input_of("dense", batch=1, seed=seed).expand(3, -1))
    assert f.bound > 1 and f.convexity > 0
    starts = torch.tensor([[0.0], [3.0], [30.0]]) * torch.rand(3, 5)
    found = kerneq.solve(f, starts, Proximal(), tol=1e-11, max_steps=5000)
    assert found.converged.all()
    torch.testing.assert_close(found.value, found.value[:1].expand(3, -1), rtol=1e-6, atol=1e-7)


@examples
@given(
    seed=seeds,
    kernel=st.sampled_from(["linear", "quadratic", "sigmoid", "gaussian", "cubic"]),
    steps=st.integers(1, 12),
    which=st.sampled_from([Picard(), Picard(0.6), Proximal(), Proximal(memory=0), Anderson(), Broyden()]),
)
def test_fact_4_the_stated_error_bound_really_bounds_the_distance_to_the_equilibrium(seed, kernel, steps, which):
    norm = 1.4 if kernel == "gaussian" else 0.9
    cell = cell_of("dense", KERNELS[kernel], norm=norm, stretch=50.0, seed=seed)
    x = input_of("dense", seed=seed)
    with torch.no_grad():
        f = cell.eval().bind(x)
        s = kerneq.solve(f, None, which, tol=1e-10, max_steps=steps)
    distance = (s.value - descend(cell, x)).norm(dim=1)
    assert s.error_bound is not None and (distance <= s.error_bound + 1e-9).all()


def test_fact_4_bounds_the_image_by_l_over_mu_and_says_nothing_without_convexity():
    cell, x = cell_of("dense", KERNELS["gaussian"], norm=1.2, stretch=50.0), input_of("dense")
    f, z = cell.eval().bind(x), torch.rand(4, 5)
    distance = (f(z) - descend(cell, x)).norm(dim=1)
    assert (distance <= f.bound / f.convexity * (f(z) - z).norm(dim=1)).all()
    wide = cell_of("dense", KERNELS["gaussian"], norm=2.0, stretch=50.0)
    f = wide.eval().bind(x)
    assert f.convexity < 0 and kerneq.solve(f, None, Proximal()).error_bound.isinf().all()
    assert kerneq.solve(torch.cos, torch.zeros(1, 2), Picard()).error_bound is None


@pytest.mark.parametrize("which", [Picard(0.05), Anderson(), Broyden()], ids=repr)
def test_fact_4_holds_for_a_layer_that_gives_features_whatever_the_norm_of_w(which):
    """It is ‖W‖‖W_h‖ that is bounded: beside a small W_h, W is large, and stretches the error of z."""
    cell = cell_of("dense", Multiquadric(split=3), norm=2.0, stretch=50.0)
    cell.similarity.project.weight.data.mul_(0.01)
    cell.gives = "features"
    x = input_of("dense")
    with torch.no_grad():
        exact = cell.eval().output(cell.bind(x), Point(descend(cell, x)))
        s = kerneq.Equilibrium(cell, solver=which, tol=1e-10, max_steps=3, on_failure="return")(x)
    distance = (s.value - exact).norm(dim=1)
    assert s.error_bound is not None and (distance <= s.error_bound + 1e-9).all()


@examples
@given(seed=seeds, degree=st.integers(2, 4))
def test_fact_8_as_published_zero_is_an_equilibrium_of_every_input_and_the_only_one(seed, degree):
    cell = cell_of("dense", Polynomial(degree=degree, offset=0.0), seed=seed)
    x = 10 * input_of("dense", seed=seed)
    with torch.no_grad():
        f = cell.bind(x)
        assert torch.equal(f(torch.zeros(4, 5)), torch.zeros(4, 5))
        away = torch.rand(4, 5)
        # E, not the residual relative to ‖z‖ → 0, tells which point is best here.
        s = kerneq.solve(f, away, Proximal(), tol=1e-9, max_steps=150)
    assert s.value.norm(dim=1).max() < 1e-6
    speaking = cell_of("dense", Polynomial(degree=degree, offset=1.0), seed=seed).bind(x)
    assert speaking(torch.zeros(4, 5)).abs().max() > 0


def energy(kernel, a: torch.Tensor, W: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """E of an inner kernel for given a and W, without the cell's own shortening of a."""
    return 0.5 * z.square().sum(1) - kernel.value(z @ a) - 0.5 * (z @ W.mT).square().sum(1)


@examples
@given(seed=seeds, size=st.floats(0.1, 3))
def test_fact_8_the_quadratic_energy_is_convex_or_unbounded_as_stated(seed, size):
    torch.manual_seed(seed)
    a, kernel = size * torch.nn.functional.normalize(torch.randn(5), dim=0), Polynomial(2, 0.0)
    W = torch.zeros(6, 5)
    positive = a.clamp_min(0)
    ray = positive / positive.norm().clamp_min(1e-300)
    far = torch.stack([ray * t for t in (1e3, 1e4)])
    values = energy(kernel, a, W, far)
    if 2 * positive.square().sum() > 1:
        assert values[1] < values[0] < 0  # unbounded below along a₊
    if 2 * a.square().sum() < 1:
        hessian = torch.eye(5) - 2 * torch.outer(a, a)
        assert torch.linalg.eigvalsh(hessian).min() > 0
    if positive.norm() > 0.05:  # for k = 3, whenever a₊ ≠ 0; a short a₊ shows it only further out
        cubic = energy(Polynomial(3, 0.0), a, W, torch.stack([ray * t for t in (1e5, 1e6)]))
        assert cubic[1] < cubic[0] < 0


@examples
@given(seed=seeds, share=st.floats(0.01, 0.99))
def test_fact_8_the_sigmoid_energy_is_strongly_convex_under_its_bound(seed, share):
    torch.manual_seed(seed)
    limit = 4 / (3 * math.sqrt(3))
    assert Sigmoid().curvature == pytest.approx(limit)
    a = math.sqrt(share / limit) * torch.nn.functional.normalize(torch.randn(5), dim=0)
    W = torch.randn(6, 5)
    W *= math.sqrt(1 - share) * 0.999 / torch.linalg.matrix_norm(W, 2)
    for z in 3 * torch.randn(5, 5):
        hessian = torch.autograd.functional.hessian(lambda z: energy(Sigmoid(), a, W, z[None]).sum(), z)
        assert torch.linalg.eigvalsh(hessian).min() > 0


def on_digits(kernel):
    """The equation of a cell with the default norm on 64 pictures, a made by a convolution and a batch norm."""
    torch.manual_seed(0)
    inject = torch.nn.Sequential(torch.nn.Conv2d(1, 8, 3, padding=1, bias=False), torch.nn.BatchNorm2d(8))
    cell = ConvCell(kernel, inputs=1, state=8, features=4, inject=inject)
    pictures = torch.from_numpy(load_digits().images[:64])[:, None]
    return cell.bind((pictures - pictures.mean()) / pictures.std())


@pytest.mark.parametrize(("kernel", "range_over_mean"), [(Sigmoid(), 0.19), (Polynomial(), 0.13)], ids=str)
def test_fact_8_curved_kernels_treat_samples_differently_and_have_one_equilibrium_all_the_same(kernel, range_over_mean):
    with torch.no_grad():
        f = on_digits(kernel)
        z = kerneq.solve(f, None, Proximal(), tol=1e-9, max_steps=200, on_failure="raise").value
        slopes = kernel.derivative((f.binding.a * z).flatten(1).sum(1))
        assert float((slopes.max() - slopes.min()) / slopes.mean()) == pytest.approx(range_over_mean, abs=0.005)
        assert f.convexity >= 0.1 - 1e-9
        for size in (0.1, 1.0, 10.0):
            start = size * torch.rand_like(z)
            other = kerneq.solve(f, start, Proximal(), tol=1e-9, max_steps=500, on_failure="raise").value
            torch.testing.assert_close(other, z, rtol=0, atol=1e-6)
    f, path = f.rows(slopes.argmin()[None]), torch.rand(1, *z.shape[1:])
    for _ in range(3):  # the curvature of E along a descent from afar
        hessian = torch.eye(path.numel()) - jacobian(f.drive, path)
        least = torch.linalg.eigvalsh(hessian).min()
        assert least >= f.convexity - 1e-9
        with torch.no_grad():
            path = f.descend(path, f.drive(path))


@pytest.mark.parametrize("kernel", [Sigmoid(), Polynomial(), Polynomial(3)], ids=str)
def test_fact_8_with_relu_the_equilibrium_is_that_of_the_linear_kernel_times_the_slope(kernel):
    with torch.no_grad():
        f = on_digits(kernel)
        linear = dataclasses.replace(f, kernel=Linear())
        z, z1 = (kerneq.solve(g, None, Proximal(), tol=1e-11, max_steps=300).value for g in (f, linear))
        t = (f.binding.a * z).flatten(1).sum(1)
    assert (t >= 0).all()
    torch.testing.assert_close(z, kernel.derivative(t).view(-1, 1, 1, 1) * z1, rtol=0, atol=1e-8)


@examples
@given(seed=seeds, size=st.floats(0.1, 20))
def test_fact_8_the_sigmoid_equilibrium_is_that_of_tanh_and_unique_for_every_length_of_a(seed, size):
    cell = cell_of("dense", Sigmoid(), seed=seed)
    with torch.no_grad():
        f = cell.bind(input_of("dense", seed=seed))
        longer = dataclasses.replace(f.binding, a=size * f.binding.a)
        f = dataclasses.replace(f, binding=longer, bound=f.bound * max(1, size**2))
        z = kerneq.solve(f, None, Proximal(), tol=1e-10, max_steps=3000, on_failure="raise").value
        t = (f.binding.a * z).sum(1, keepdim=True)
        W = f.operator.weight
        assert (t >= 0).all()  # where tanh itself is
        published = torch.relu((1 - t.tanh() ** 2) * f.binding.a + z @ W.mT @ W)
        torch.testing.assert_close(z, published, rtol=1e-8, atol=1e-8)
        other = kerneq.solve(f, 3 * torch.rand_like(z), Proximal(), tol=1e-10, max_steps=3000, on_failure="raise").value
    torch.testing.assert_close(other, z, rtol=0, atol=1e-6 * (1 + f.bound.item()))


def test_the_sigmoid_constant_is_the_largest_curvature_of_tanh():
    t = torch.linspace(-5, 5, 100001)
    second = -2 * torch.tanh(t) * (1 - torch.tanh(t) ** 2)
    assert second.abs().max() == pytest.approx(Sigmoid().curvature, rel=1e-8)


@examples
@given(
    seed=seeds,
    degree=st.integers(3, 5),
    offset=st.floats(0, 2),
    norm=st.floats(0.1, 1.4),
    size=st.floats(0.1, 100),
    which=st.sampled_from([Picard(), Proximal(), Proximal(memory=0)]),
)
def test_for_degree_three_and_more_iterates_from_zero_stay_where_the_bound_holds(
    seed, degree, offset, norm, size, which
):
    kernel = Polynomial(degree, offset)
    cell = cell_of("dense", kernel, norm=norm, stretch=50.0, seed=seed)
    with torch.no_grad():
        f = cell.bind(size * input_of("dense", seed=seed))
        for steps in (1, 2, 5, 40):
            z = kerneq.solve(f, None, which, tol=1e-12, max_steps=steps).value
            t = (f.binding.a * z).sum(1)
            assert (t.abs() <= kernel.region * (1 + 1e-9)).all()
            curvature = degree * (degree - 1) * (t + offset).abs() ** (degree - 2) * f.binding.a.square().sum(1)
            assert (curvature <= kernel.curvature * kernel.max_length(norm) ** 2 * (1 + 1e-9)).all()


def test_the_linear_energy_need_not_have_a_minimum_from_l_one_on():
    cell = cell_of("dense", Linear(), norm=1.5, stretch=50.0)
    f = cell.eval().bind(input_of("dense", batch=1))
    _, _, V = torch.linalg.svd(f.operator.weight.detach())
    top = V[0] if V[0].sum() > 0 else -V[0]
    values = 0.5 * 1e8 * (1 - (f.operator.weight.detach() @ top).square().sum())
    assert f.convexity < 0 and values < -1e7


@examples
@given(seed=seeds, gain=st.floats(0.05, 6), scale=st.floats(0.01, 30), kernel=st.sampled_from(sorted(RADIAL)))
def test_fact_5_no_weight_makes_the_equilibrium_more_sensitive_than_stated(seed, gain, scale, kernel):
    """∂z*/∂(aW_h) = (I − D ∂d/∂z)⁻¹ D ∂d/∂a W_h⁺, with D where ReLU lets through, never exceeds the constant."""
    chosen = dataclasses.replace(RADIAL[kernel], split=6, hidden=6)
    cell = cell_of("dense", chosen, norm=gain, stretch=50.0, seed=seed)
    known = chosen.input_lipschitz(gain)
    if math.isinf(known):
        return
    x = scale * input_of("dense", batch=1, seed=seed)
    f = cell.eval().bind(x)
    z = kerneq.solve(f, None, Proximal(), tol=1e-10, max_steps=2000).value.detach()
    active = torch.diag((f.drive(z) > 0).to(z.dtype)[0])

    def driven(a: torch.Tensor) -> torch.Tensor:
        return dataclasses.replace(f, binding=dataclasses.replace(f.binding, a=a)).drive(z)

    by_a = torch.autograd.functional.jacobian(driven, f.binding.a.detach())[0, :, 0]
    moved = torch.linalg.solve(torch.eye(5) - active @ jacobian(f.drive, z), active @ by_a)
    through = torch.linalg.solve(cell.similarity.project.weight, moved, left=False)  # a ↦ W_hᵀa first
    assert torch.linalg.matrix_norm(through, 2) <= known * (1 + 1e-8)


def test_fact_5_is_attained_by_the_multiquadric_where_the_loss_is_quadratic():
    """γ → 0: z = (I + WᵀW)⁻¹Wᵀa, which moves by s/(1 + s²) along a singular vector: ½ at s = 1, for no W more."""
    kernel = Multiquadric(gamma=1e-9, split=6, hidden=6)
    for gain in (0.3, 1.0, 4.0):
        singular = torch.linspace(0, gain, 10_001)
        assert kernel.input_lipschitz(gain) == pytest.approx(float((singular / (1 + singular**2)).max()), rel=1e-6)
    assert Gaussian().input_lipschitz(1.0) < 1 / (1 - CURVATURE)  # fact 5, which knows nothing of the curvature of S
