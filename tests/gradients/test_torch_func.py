"""The transforms of torch.func through a layer give what autograd gives."""

import copy

import pytest
import torch
from helpers import away_from_kinks, cell_of
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap

import kerneq
from kerneq.gradients import Implicit, Phantom
from kerneq.kernels import Gaussian

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning"),  # PyTorch's own, in forward mode
]


@pytest.fixture
def layer() -> kerneq.Equilibrium:
    cell = cell_of("dense", Gaussian(gamma=0.5, split=2, hidden=6), norm=0.8)
    return kerneq.Equilibrium(cell, gradient=Implicit(tol=1e-13), tol=1e-13, max_steps=400).eval()


@pytest.fixture
def x(layer) -> torch.Tensor:
    return away_from_kinks(layer.cell, "dense")


def jacobians(layer, x) -> dict[str, torch.Tensor]:
    """∂ value / ∂ x and ∂ value / ∂ parameter, by autograd, one entry of the value after the other."""
    x = x.clone().requires_grad_()
    named = {"x": x, **dict(layer.named_parameters())}
    value = layer(x).value
    rows = [torch.autograd.grad(entry, list(named.values()), retain_graph=True) for entry in value.flatten()]
    return {
        n: torch.stack(r).view(*value.shape, *named[n].shape)
        for n, r in zip(named, zip(*rows, strict=True), strict=True)
    }


def test_first_derivatives_are_those_of_autograd(layer, x):
    expected = jacobians(layer, x)
    values = {"x": x, **dict(layer.named_parameters())}

    def value(at):
        at = dict(at)
        return functional_call(layer, at, (at.pop("x"),)).value

    close = {"rtol": 1e-9, "atol": 1e-10}
    g = torch.linspace(-1, 1, layer(x).value.numel()).view(len(x), -1)
    pulled = {name: torch.tensordot(g, J, 2) for name, J in expected.items()}
    torch.testing.assert_close(grad(lambda at: (g * value(at)).sum())(values), pulled, **close)
    torch.testing.assert_close(vjp(value, values)[1](g)[0], pulled, **close)
    torch.testing.assert_close(jacrev(value)(values), expected, **close)
    torch.testing.assert_close(jacfwd(value)(values), expected, **close)
    moved = {name: torch.linspace(-1, 1, t.numel()).view_as(t) for name, t in values.items()}
    pushed = sum(torch.tensordot(J, moved[name], moved[name].dim()) for name, J in expected.items())
    torch.testing.assert_close(jvp(value, (values,), (moved,))[1], pushed, **close)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("tol", [1e-1, 1e-13], ids=["loose", "tight"])
def test_forward_mode_without_torch_func_is_the_same_however_loose_the_solve(layer, x, frozen, tol):
    layer.tol = tol
    layer.requires_grad_(not frozen)
    moved = torch.linspace(-1, 1, x.numel()).view_as(x)
    for rows in (slice(None), slice(1)):
        value, pushed = jvp(lambda x: layer(x).value, (x[rows],), (moved[rows],))
        with forward_ad.dual_level():
            solution = layer(forward_ad.make_dual(x[rows], moved[rows]))
            got = forward_ad.unpack_dual(solution.value)
            torch.testing.assert_close((got.primal, got.tangent), (value, pushed), rtol=1e-12, atol=1e-13)
        assert bool(solution.converged.all())


def test_second_derivatives_are_those_of_autograd(layer, x):
    def loss(x):
        return layer(x).value.square().sum()

    x = x[:2]
    expected = torch.autograd.functional.hessian(loss, x)
    torch.testing.assert_close(jacrev(grad(loss))(x), expected, rtol=1e-7, atol=1e-8)
    with pytest.raises(RuntimeError, match=r"`jacrev\(grad\(f\)\)`, not `hessian\(f\)`.*`Phantom"):
        hessian(loss)(x)
    layer.gradient = Phantom(60, 1.0)
    torch.testing.assert_close(hessian(loss)(x), expected, rtol=1e-7, atol=1e-8)


def test_vmap_gives_gradients_of_single_samples_and_ensembles(layer, x):
    def loss(parameters, x):
        return functional_call(layer, parameters, (x.unsqueeze(0),)).value.square().sum()

    parameters = dict(layer.named_parameters())
    single = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for i in range(len(x)):
        expected = torch.autograd.grad(layer(x[i : i + 1]).value.square().sum(), list(parameters.values()))
        torch.testing.assert_close([g[i] for g in single.values()], list(expected), rtol=1e-9, atol=1e-10)

    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.cell.operator.weight.mul_(-0.5)
    states = stack_module_state([layer, other])
    expected = torch.stack([layer(x).value, other(x).value])
    for base in (layer, copy.deepcopy(layer).to("meta")):  # PyTorch's own recipe: it needs no memory
        s = vmap(lambda *state, base=base: functional_call(base, state, (x,)).value, in_dims=0)(*states)
        torch.testing.assert_close(s, expected, rtol=1e-9, atol=1e-10)


def test_a_model_of_the_zoo_and_what_cannot_be_transformed(layer, x):
    model = kerneq.models.build("geq-tiny", classes=3).eval()
    pictures = torch.randn(2, 3, 8, 8, requires_grad=True)
    expected = torch.autograd.grad(model(pictures).square().sum(), pictures)[0]
    got = grad(lambda x: model(x).square().sum())(pictures.detach())
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-8)
    single = vmap(lambda x: model(x.unsqueeze(0)).squeeze(0))(pictures.detach())
    torch.testing.assert_close(single, model(pictures), rtol=1e-3, atol=1e-4)
    with pytest.raises(RuntimeError, match=r"needs a layer in `eval\(\)`, got one in `train\(\)`.*torch.autograd.grad"):
        grad(lambda x: layer.train()(x).value.sum())(x)
    with pytest.raises(RuntimeError, match="must be an input behind `z0`"):
        grad(lambda a: kerneq.fixed_point(lambda z: 0.5 * z.cos() + a, torch.zeros(2, 3)).value.sum())(torch.ones(3))
