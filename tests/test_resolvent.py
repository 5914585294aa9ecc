"""R(a) = 2p(a) − a lengthens no difference, whatever the weights; what it states of an unfinished solve is true."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kerneq as kq
from kerneq.certificates import matrix_norm
from kerneq.gradients import ConjugateGradient, Implicit, Unrolled
from kerneq.kernels import Cauchy, Gaussian, Linear, Multiquadric, Squared
from kerneq.solvers import Newton

pytestmark = pytest.mark.usefixtures("float64")
KERNELS = {"squared": Squared(), "multiquadric": Multiquadric(0.5, split=2, patch=2, hidden=6)}
SETTLED = {"tol": 1e-11, "max_steps": 3000}


def layer_of(form: str, kernel: str, norm: float, seed: int = 0, **solve) -> kq.Resolvent:
    """A layer of random weights of that norm, a W_h of norm 3 and a bias; its input is a itself."""
    torch.manual_seed(seed)
    kind, sizes = (kq.cells.DenseCell, {}) if form == "dense" else (kq.cells.ConvCell, {"size": 3})
    cell = kind(KERNELS[kernel], inputs=6, state=9, features=6, norm=norm, bias=True, inject=nn.Identity(), **sizes)
    with torch.no_grad():
        cell.operator.weight.mul_(1000)
        nn.init.normal_(cell.bias)
        if cell.similarity is not None:
            cell.similarity.project.weight.mul_(3)
    return kq.Resolvent(cell, **(SETTLED | solve)).eval()


def inputs(form: str, count: int = 8, seed: int = 1, scale: float = 1.0) -> Tensor:
    shape = (count, 6) if form == "dense" else (count, 6, 4, 4)
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stretch(layer: kq.Resolvent, a: Tensor, apart: Tensor) -> Tensor:
    """‖R(a + apart) − R(a)‖ / ‖apart‖ of the pairs whose equilibria were found, which are most."""
    one, two = (layer(x, solution=True) for x in (a, a + apart))
    kept = one.converged & two.converged
    assert kept.double().mean() >= 0.5
    return ((one.value - two.value).flatten(1).norm(dim=1) / apart.flatten(1).norm(dim=1))[kept]


@pytest.mark.parametrize("norm", [0.5, 3.0, 50.0])
@pytest.mark.parametrize(("form", "kernel"), [("dense", "squared"), ("dense", "multiquadric"), ("conv", "squared")])
def test_no_pair_is_stretched_by_random_choice_or_by_ascent(form, kernel, norm):
    rule = Implicit(tol=1e-3, on_failure="return")  # of the ascent: it need not be exact
    layer = layer_of(form, kernel, norm, solver=Newton(), max_steps=60, gradient=rule)
    a, apart = inputs(form, 4, seed=2, scale=2), inputs(form, 4, seed=3)
    a.requires_grad_(), apart.requires_grad_()
    optimizer, worst = torch.optim.Adam([a, apart], lr=0.1), []
    for _ in range(5):
        ratio = stretch(layer, a, apart)
        worst.append(float(ratio.detach().max()))
        optimizer.zero_grad()
        (-ratio.sum()).backward()
        optimizer.step()
    assert max(worst) <= 1 + 1e-7
    assert max(worst) > (0.9 if form == "dense" else 0.7)  # the bound is nearly attained


def test_the_one_step_at_norm_sqrt_2_is_the_convex_potential_layer():
    layer = layer_of("dense", "squared", 2**0.5, gradient=Unrolled(1))
    cell, a = layer.equilibrium.cell.cell, inputs("dense")
    W = cell.operator.weight * (2**0.5 / torch.linalg.matrix_norm(cell.operator.weight, 2))
    torch.testing.assert_close(layer(a), a - F.relu(a @ W + cell.bias) @ W.mT)
    assert matrix_norm(W) == pytest.approx(2**0.5)


@pytest.mark.parametrize("form", ["dense", "conv"])
def test_the_value_solves_the_hidden_problem_with_its_bias(form):
    layer, a = layer_of(form, "squared", 3.0), inputs(form, count=2)
    f = layer.equilibrium.cell.bind(a)
    W, b = f.operator, f.binding.bias.view(-1, *[1] * (a.dim() - 2))
    z = torch.zeros(f.state_shape)
    for _ in range(2000):
        z = F.relu(z - (z - b - W.adjoint(a - W(z))) / 10)
    torch.testing.assert_close(layer(a), 2 * (a - W(z)) - a)
    energy = 0.5 * z.square().flatten(1).sum(1) - (b * z).flatten(1).sum(1)
    torch.testing.assert_close(f.energy(z), energy + 0.5 * (a - W(z)).square().flatten(1).sum(1))


def test_the_squared_kernel_is_the_limit_of_the_multiquadric():
    layer, limit = layer_of("dense", "multiquadric", 3.0), layer_of("dense", "squared", 3.0)
    cell = layer.equilibrium.cell.cell
    cell.kernel = Multiquadric(1e-9, split=2, hidden=6)
    cell.similarity = cell.kernel.parameters(6, conv=False)
    nn.init.eye_(cell.similarity.project.weight)
    limit.equilibrium.cell.cell.load_state_dict(cell.state_dict(), strict=False)
    torch.testing.assert_close(layer(inputs("dense")), limit(inputs("dense")), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["dense", "conv"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_bound_on_an_unfinished_solve_holds(form, kernel):
    layer, a = layer_of(form, kernel, 4.0), inputs(form)
    exact = layer(a)
    for steps in (1, 2, 5, 20):
        layer.equilibrium.tol, layer.equilibrium.max_steps = 1e-12, steps
        found = layer(a, solution=True)
        assert ((found.value - exact).flatten(1).norm(dim=1) <= found.error_bound + 1e-9).all()
    layer.equilibrium.max_steps = 100
    assert (layer(a, solution=True).error_bound < 0.1).all()


@pytest.mark.parametrize("form", ["dense", "conv"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_its_gradients_are_those_of_differences_and_of_its_steps(form, kernel):
    rules = (Implicit(tol=1e-12), Implicit(ConjugateGradient(), tol=1e-12), Unrolled(400))
    a, found = inputs(form, count=2).requires_grad_(), []
    for rule in rules:
        layer = layer_of(form, kernel, 2.0, gradient=rule)
        found.append(torch.autograd.grad(layer(a).sin().sum(), [a, *layer.parameters()]))
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=1e-6, atol=1e-7)
    layer = layer_of(form, kernel, 2.0, gradient=rules[0])
    bias = layer.equilibrium.cell.cell.bias
    assert torch.autograd.gradcheck(lambda a, b: layer(a), (a, bias), atol=1e-5, rtol=1e-4, fast_mode=True)


def test_it_stands_between_modules_and_gives_its_solution_when_asked():
    layer = layer_of("conv", "squared", 2.0)
    chain, x = nn.Sequential(layer, nn.PixelUnshuffle(2), nn.Flatten(), nn.Linear(96, 3)), inputs("conv")
    assert chain(x).shape == (8, 3)
    solution = layer(x, solution=True)
    assert isinstance(solution, kq.Solution) and solution.value.shape == x.shape
    torch.testing.assert_close(solution.value, layer(x), rtol=0, atol=0)


@pytest.mark.parametrize("kernel", [Gaussian(split=6), Cauchy(split=6), Linear()])
def test_a_kernel_without_a_convex_loss_is_refused(kernel):
    cell = kq.cells.DenseCell(kernel, inputs=6, state=6, features=6)
    with pytest.raises(ValueError, match=r"`Resolvent` needs a kernel with a convex loss, `Squared` or `Multiquadric`"):
        kq.Resolvent(cell)


def test_a_bias_is_refused_where_the_input_is_in_its_place():
    with pytest.raises(ValueError, match=r"`bias` is for kernels of a − Wz: Linear\(\) has that of Ux \+ b"):
        kq.cells.DenseCell(Linear(), inputs=6, state=6, features=6, bias=True)
