"""The layer: cell + solver + gradient, in training and evaluation."""

import pytest
import torch
from helpers import CELLS, KERNELS, SOLVERS, cell_of, descend, input_of

import kerneq
from kerneq import EquilibriumError, Status
from kerneq.equilibrium import solving
from kerneq.gradients import Implicit, Phantom, Unrolled
from kerneq.kernels import Gaussian
from kerneq.solvers import Anderson, Picard, Proximal

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("form", CELLS)
def test_the_layer_of_the_design_page_finds_the_equilibrium(form):
    cell, x = cell_of(form, KERNELS["gaussian"]), input_of(form)
    layer = kerneq.Equilibrium(
        cell, solver=kerneq.solvers.Proximal(), gradient=kerneq.gradients.Implicit(), tol=1e-11, max_steps=500
    )
    s = layer.eval()(x)
    assert s.status is Status.CONVERGED and s.converged.shape == s.steps.shape == s.residual.shape == (4,)
    torch.testing.assert_close(s.value.detach(), descend(cell, x), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_layer_agrees_with_solve_from_its_own_start(solver):
    cell, x = cell_of("conv", KERNELS["gaussian"]).eval(), input_of("conv")
    with torch.no_grad():
        layer = kerneq.Equilibrium(cell, solver=SOLVERS[solver], tol=1e-8, max_steps=200).eval()(x)
        f = cell.bind(x)
        loop = kerneq.solve(f, cell.initial(f), SOLVERS[solver], tol=1e-8, max_steps=200)
    assert torch.equal(layer.steps, loop.steps)
    torch.testing.assert_close(layer.value, loop.value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("gradient", [Implicit(), Phantom(), Unrolled(60)], ids=str)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_value_carries_a_gradient_in_both_modes(gradient, mode):
    """Saliency and attacks need ∂/∂x in evaluation."""
    layer = kerneq.Equilibrium(cell_of("conv", KERNELS["gaussian"]), gradient=gradient).train(mode == "train")
    x = input_of("conv").requires_grad_()
    layer(x).value.sum().backward()
    assert x.grad.abs().max() > 0 and all(p.grad.isfinite().all() for p in layer.parameters())


def test_a_network_of_one_step_is_validated_as_it_is_trained():
    """At L = 4 a proximal step from 0 is a third of a plain one: batch norms behind it would meet another scale."""
    cell, x = cell_of("conv", KERNELS["gaussian"], norm=2.0, stretch=10.0), input_of("conv")
    layer = kerneq.Equilibrium(cell, gradient=Unrolled(1)).eval()
    trained = layer(x).value
    with torch.no_grad():
        found = layer(x)
        torch.testing.assert_close(found.value, trained)
        assert (found.steps == 1).all() and not found.converged.any()  # the outcome is that of the step, too
        torch.testing.assert_close(kerneq.fixed_point(cell.bind(x), trained, gradient=Unrolled(1)).value, trained)
    with solving(layer, exact=True):  # attacked and explained, too
        torch.testing.assert_close(layer(x).value, trained)


def test_failure_is_the_callers_choice():
    hard = {"norm": 20**0.5, "stretch": 10.0}
    cell, x = cell_of("dense", Gaussian(gamma=0.02), **hard), 3 * input_of("dense")
    options = {"solver": Picard(), "tol": 1e-8, "max_steps": 30}
    assert kerneq.Equilibrium(cell, **options)(x).status is Status.MAX_STEPS
    with pytest.raises(EquilibriumError, match="The equilibrium solve failed.*Proximal"):
        kerneq.Equilibrium(cell, **options, on_failure="raise")(x)
    with pytest.warns(RuntimeWarning, match="The equilibrium solve failed"):
        kerneq.Equilibrium(cell, **options, on_failure="warn")(x)
    assert kerneq.Equilibrium(cell, solver=Proximal(), tol=1e-8, max_steps=1000)(x).status is Status.CONVERGED


@pytest.mark.parametrize("norm, stated", [(0.9, True), (1.4, True), (2.0, False)])
def test_where_the_problem_is_strongly_convex_the_solution_states_its_error(norm, stated):
    cell, x = cell_of("dense", KERNELS["gaussian"], norm=norm, stretch=10.0), input_of("dense")
    s = kerneq.Equilibrium(cell, tol=1e-3).eval()(x)
    assert s.error_bound.isfinite().all() == stated
    if stated:
        distance = (s.value.detach() - descend(cell, x)).norm(dim=1)
        assert (distance <= s.error_bound).all() and (s.error_bound < 0.1).all()


@pytest.mark.parametrize("kernel, form", [("linear", "dense"), ("gaussian", "conv"), ("sigmoid", "dense")])
def test_a_layer_learns(kernel, form):
    cell, x = cell_of(form, KERNELS[kernel]), input_of(form, batch=8)
    layer = kerneq.Equilibrium(cell, tol=1e-6, max_steps=100)
    z_star = kerneq.Equilibrium(cell_of(form, KERNELS[kernel], seed=5), tol=1e-8, max_steps=200)(x).value.detach()
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    losses = []
    for _ in range(30):
        loss = (layer(x).value - z_star).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


def test_a_layer_exports_without_looks_once_its_norm_is_known():
    cell, x = cell_of("conv", KERNELS["gaussian"]), input_of("conv")
    # Four bare steps: every step becomes part of the program, and a long one takes minutes to trace.
    layer = kerneq.Equilibrium(cell, solver=Proximal(memory=0), tol=1e-8, max_steps=4)
    model = torch.nn.Sequential(layer, kerneq.Value()).eval()
    with torch.no_grad():
        model(x)
        program = torch.export.export(model, (x,), strict=False).module()
        for given in (x, input_of("conv", seed=8)):
            torch.testing.assert_close(program(given), model(given))


@pytest.mark.parametrize("kernel, solver", [("linear", Picard()), ("sigmoid", Anderson()), ("gaussian", Proximal())])
def test_an_export_takes_batches_of_any_size(kernel, solver):
    layer = kerneq.Equilibrium(cell_of("conv", KERNELS[kernel]), solver=solver, max_steps=5, check_every=5).eval()
    x = input_of("conv", batch=7)
    layer(x)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(torch.nn.Sequential(layer, kerneq.Value()), (x[:4],), dynamic_shapes=({0: batch},))
    torch.testing.assert_close(program.module()(x), layer(x).value)


@pytest.mark.parametrize("gradient", [Implicit(tol=1e-12), Phantom(200, 1.0)], ids=["implicit", "phantom"])
def test_a_fixed_point_of_any_function_carries_gradients_to_all_it_depends_on(gradient):
    torch.manual_seed(0)
    linear = torch.nn.Linear(4, 4)
    x = torch.randn(3, 4, requires_grad=True)

    def value(x: torch.Tensor) -> torch.Tensor:
        found = kerneq.fixed_point(
            lambda z: torch.tanh(0.5 * linear(z) + x), torch.zeros(3, 4), gradient=gradient, tol=1e-13, max_steps=200
        )
        assert found.converged.all()
        return found.value

    assert torch.autograd.gradcheck(value, x)
    value(x).sum().backward()
    assert linear.weight.grad.abs().max() > 0
    with torch.no_grad():
        assert not value(x).requires_grad


def test_samples_of_a_function_of_inputs_leave_when_they_have_converged():
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(4, 4), torch.tensor([[1e-3], [1.0], [2.0], [3.0]]) * torch.randn(4, 4)
    sizes = []

    def f(z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(z))
        return torch.tanh((x.abs() / 3 + 0.5) * linear(z) / 2 + x)

    found = kerneq.fixed_point(f, torch.zeros(4, 4), x, solver=Picard(), tol=1e-10, max_steps=200)
    assert found.converged.all() and min(sizes) < 4
    whole = kerneq.fixed_point(lambda z: f(z, x), torch.zeros(4, 4), solver=Picard(), tol=1e-10, max_steps=200)
    torch.testing.assert_close(found.value, whole.value)
    assert torch.equal(found.steps, whole.steps)
    sizes.clear()
    shared = kerneq.fixed_point(
        lambda z, x, one: f(z, x), torch.zeros(4, 4), x, torch.ones(1), solver=Picard(), tol=1e-10, max_steps=200
    )
    assert torch.equal(shared.value, whole.value) and min(sizes) == 4  # an input not of the samples: all of them stay


def test_in_a_sequence_of_modules_the_value_is_asked_for_by_name_and_the_error_says_how():
    cell = kerneq.cells.DenseCell(kerneq.kernels.Gaussian(), inputs=3, state=5, features=4)
    layer, x = kerneq.Equilibrium(cell), torch.randn(2, 3)
    for module in (torch.nn.ReLU(), torch.nn.Linear(5, 2), torch.nn.BatchNorm1d(5), torch.nn.Flatten()):
        with pytest.raises((TypeError, AttributeError), match="kerneq.Value"):
            torch.nn.Sequential(layer, module)(x)
    z = torch.randn(2, 5)
    for use in (lambda s: z + s, lambda s: s + z, lambda s: s * z, lambda s: s[0], tuple):
        with pytest.raises(TypeError, match="kerneq.Value"):
            use(layer(x))
    assert torch.nn.Sequential(layer, kerneq.Value(), torch.nn.Linear(5, 2))(x).shape == (2, 2)


@pytest.mark.parametrize("channels", [1, 8])
def test_the_value_is_stored_as_the_pictures_are(channels):
    """On a CPU the solve itself is channels-last; nobody who writes z.view(len(z), -1) shall notice."""
    layer = kerneq.Equilibrium(kerneq.cells.ConvCell(Gaussian(0.2), inputs=channels, state=16, features=8)).eval()
    x = torch.randn(4, channels, 8, 8)
    plain, sliced = layer(x).value, layer(x[:, :, ::2, ::2]).value
    assert plain.is_contiguous() and sliced.is_contiguous()
    last = layer(x.to(memory_format=torch.channels_last)).value
    assert last.is_contiguous(memory_format=torch.channels_last) == (channels > 1)
    torch.testing.assert_close(plain, last)
