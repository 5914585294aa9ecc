"""Solving for v = Wz: the same equilibria, the same promises."""

import pytest
import torch
from helpers import CELLS, KERNELS, cell_of, input_of

import kerneq
from kerneq.kernels import Gaussian
from kerneq.solvers import Anderson, Broyden, InFeatures, Newton, Picard, Proximal, solve

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("form", CELLS)
@pytest.mark.parametrize("kernel", ["gaussian", "multiquadric", "linear"])
@pytest.mark.parametrize("solver", [Picard(), Anderson(4), Broyden(8)])
def test_it_finds_the_equilibrium_and_reports_its_true_residual(form, kernel, solver):
    cell = cell_of(form, KERNELS[kernel], norm=0.9)
    with torch.no_grad():
        f = cell.bind(input_of(form))
        found = solve(f, None, InFeatures(solver), tol=1e-10, max_steps=200)
        exact = solve(f, None, Proximal(), tol=1e-13, max_steps=500)
        torch.testing.assert_close(found.value, exact.value, rtol=1e-8, atol=1e-9)
        assert found.converged.all()
        gap = (f(found.value) - found.value).flatten(1).norm(dim=1)
        torch.testing.assert_close(found.residual, gap / f(found.value).flatten(1).norm(dim=1), rtol=1e-6, atol=1e-14)
        assert (found.error_bound + 1e-12 >= (found.value - exact.value).flatten(1).norm(dim=1)).all()


def test_a_start_is_used():
    cell = cell_of("conv", KERNELS["gaussian"], norm=0.9)
    with torch.no_grad():
        f = cell.bind(input_of("conv"))
        near = solve(f, None, Picard(), tol=1e-12, max_steps=200).value
        assert solve(f, near, InFeatures(Picard()), tol=1e-8).steps.max() <= 2


def test_without_looks_it_takes_so_many_evaluations_and_picard_is_picard():
    cell = cell_of("conv", KERNELS["gaussian"], norm=0.9)
    with torch.no_grad():
        f = cell.bind(input_of("conv"))
        z = solve(f, None, Picard(), max_steps=5, check_every=5).value  # f⁵(0)
        found = solve(f, None, InFeatures(Picard()), max_steps=5, check_every=5)
    torch.testing.assert_close(found.value, z)
    assert (found.steps == 5).all()


def test_samples_that_finish_early_leave_and_come_back_in_order():
    cell = cell_of("dense", KERNELS["gaussian"], norm=0.9)
    x = torch.cat([1e-6 * input_of("dense"), input_of("dense")])
    with torch.no_grad():
        f = cell.bind(x)
        found = solve(f, None, InFeatures(Picard()), tol=1e-9, max_steps=200)
        exact = solve(f, None, Proximal(), tol=1e-13, max_steps=500)
    torch.testing.assert_close(found.value, exact.value, rtol=1e-7, atol=1e-8)
    assert found.converged.all() and (found.steps <= 200).all()


@pytest.mark.parametrize("solver", [Proximal(), InFeatures(Picard())], ids=str)
def test_when_a_sample_finishes_does_not_depend_on_its_batch_mates(solver):
    """At L = 0.04, where z may have converged while v is still too far for anybody to look at z."""
    cell = cell_of("dense", KERNELS["gaussian"], norm=0.2).eval()
    x = input_of("dense", batch=24) * torch.logspace(-3, 1, 24).unsqueeze(1)
    with torch.no_grad():
        together = solve(cell.bind(x), None, solver, tol=1e-4)
        alone = [solve(cell.bind(sample), None, solver, tol=1e-4) for sample in x.split(1)]
    assert together.steps.tolist() == [int(s.steps) for s in alone] and len(set(together.steps.tolist())) > 1


def test_running_out_of_steps_is_said():
    cell = cell_of("conv", KERNELS["gaussian"], norm=0.9)
    with torch.no_grad():
        found = solve(cell.bind(input_of("conv")), None, InFeatures(Picard()), tol=1e-14, max_steps=3)
    assert found.status == kerneq.Status.MAX_STEPS and (found.steps <= 3).all()
    only = InFeatures(Picard())
    with torch.no_grad():
        assert (solve(cell.bind(input_of("conv")), None, only, tol=1e-14, max_steps=1).steps == 1).all()


def test_a_solve_that_fails_reports_the_residual_of_the_z_it_returns():
    """On the way that of v stands for it, and the best point need not be the last."""
    cell = cell_of("dense", Gaussian(gamma=0.02), norm=20**0.5, stretch=10.0)
    with torch.no_grad():
        f = cell.bind(3 * input_of("dense", batch=10, seed=0))
        found = solve(f, None, InFeatures(Anderson()), tol=1e-9, max_steps=10)
        image = f(found.value)
    assert not found.converged.all()
    gap = (image - found.value).norm(dim=1)
    torch.testing.assert_close(found.residual, gap / image.norm(dim=1), rtol=1e-6, atol=1e-9)


def test_a_layer_solved_in_the_features_has_the_same_gradients():
    found = []
    for solver in (Proximal(), InFeatures(Anderson(4))):
        cell = cell_of("conv", KERNELS["gaussian"], norm=0.9)
        layer = kerneq.Equilibrium(cell, solver=solver, tol=1e-12, max_steps=300)
        layer(input_of("conv")).value.square().sum().backward()
        found.append(cell.operator.weight.grad)
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kernel", ["quadratic", "cubic", "sigmoid"])
def test_with_kernels_that_see_the_state_itself_the_state_is_iterated(kernel):
    f = cell_of("dense", KERNELS[kernel], norm=0.5).bind(input_of("dense"))
    with torch.no_grad():
        found, plain = (solve(f, None, solver, tol=1e-10, max_steps=99) for solver in (InFeatures(Picard()), Picard()))
    assert plain.converged.all() and torch.equal(found.value, plain.value)


@pytest.mark.parametrize("solver", [Proximal(), Newton(), InFeatures()], ids=repr)
def test_what_has_a_space_of_its_own_is_refused_in_the_features(solver):
    with pytest.raises(TypeError, match="Picard, Anderson or Broyden"):
        InFeatures(solver)


def test_a_model_says_where_it_is_solved():
    settings = {"solver": {"name": "in-features", "solver": {"name": "anderson", "memory": 5}}}
    layer = kerneq.models.build("geq-tiny", settings=settings).branches[0].equilibrium
    assert layer.solver == InFeatures(Anderson(5))
    with pytest.raises(ValueError, match="must be Picard, Anderson or Broyden"):
        kerneq.models.build("geq-tiny", settings={"solver": {"name": "in-features", "solver": {"name": "proximal"}}})
