"""The defects of torchdeq 0.1.0 that its own runs showed: each is shown there where that is cheap, and absent here.

Numbers 1 to 9 are those of our survey; the tenth is that a sample's answer depends on its batch mates.
"""

import argparse
import copy
import dataclasses

import pytest
import torch
from helpers import CELLS, KERNELS, PLAIN_SOLVERS, SOLVERS, Counting, affine, cell_of, input_of

import kerneq
from kerneq.gradients import Implicit, Phantom, Point
from kerneq.solvers import Anderson, Broyden, Picard

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:.*torch.nn.utils.weight_norm.*", "ignore:.*os.fork.*"),
]
torchdeq = pytest.importorskip("torchdeq", reason="torchdeq, the library these defects are from, is not installed")
THEIRS = ("fixed_point_iter", "anderson", "broyden")


@pytest.mark.parametrize("steps", [1, 2])
def test_1_few_steps_of_anderson_do_not_return_the_start(steps):
    A, b, z_star = affine()
    f, z0 = (lambda z: z @ A.mT + b), torch.zeros_like(b)
    theirs, _, _ = torchdeq.get_solver("anderson")(f, z0, max_iter=steps)
    assert torch.equal(theirs, z0)
    ours = kerneq.solve(f, z0, Anderson(), tol=1e-9, max_steps=steps)
    assert int(ours.steps.max()) == steps
    assert ((ours.value - z_star).norm(dim=1) < (z0 - z_star).norm(dim=1)).all()


def test_2_the_plainest_solver_takes_the_plainest_function_forward_and_backward():
    with pytest.raises(TypeError):
        torchdeq.get_solver("simple_fixed_point_iter")(lambda z: torch.cos(z), torch.zeros(1, 1))
    ours = kerneq.solve(lambda z: torch.cos(z), torch.zeros(1, 1), Picard(), tol=1e-9, max_steps=100)
    torch.testing.assert_close(ours.value, torch.tensor([[0.7390851332151607]]))
    scale = torch.ones(1, requires_grad=True)
    z = Implicit(solver=Picard(), tol=1e-12).attach(lambda z: torch.cos(scale * z), Point(ours.value)).z
    (got,) = torch.autograd.grad(z.sum(), scale)
    s, c = torch.sin(ours.value), ours.value
    torch.testing.assert_close(got, (-s * c / (1 + s)).flatten(), rtol=1e-6, atol=1e-6)


def poisoned(after: int):
    """cos, but the second sample turns NaN from some evaluation on."""
    calls = []

    def f(z: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        image = torch.cos(z)
        if len(calls) > after:
            image = torch.stack([image[0], torch.full_like(image[1], torch.nan)])
        return image

    return f


@pytest.mark.parametrize("name", THEIRS)
def test_3_a_late_nan_does_not_poison_the_best_state(name):
    z0 = torch.tensor([[0.1, 0.4], [0.2, 0.9]])
    theirs, _, _ = torchdeq.get_solver(name)(poisoned(4), z0, max_iter=20, tol=1e-9)
    assert theirs[1].isnan().any()
    solver = {"fixed_point_iter": Picard(), "anderson": Anderson(), "broyden": Broyden()}[name]
    ours = kerneq.solve(poisoned(4), z0, solver, tol=1e-9, max_steps=60)
    assert ours.value.isfinite().all() and ours.residual.isfinite().all()
    assert ours.converged.tolist() == [True, False]


@pytest.mark.parametrize("gradient", [Implicit(), Phantom()], ids=["ift", "phantom"])
@pytest.mark.parametrize("form", CELLS)
def test_4_evaluation_mode_keeps_the_gradient(form, gradient):
    A, b, _ = affine()
    A.requires_grad_()
    deq = torchdeq.get_deq(ift=isinstance(gradient, Implicit)).eval()
    theirs, _ = deq(lambda z: z @ A.mT + b, torch.zeros_like(b))
    assert not theirs[-1].requires_grad
    x = input_of(form).requires_grad_()
    ours = kerneq.Equilibrium(cell_of(form, KERNELS["gaussian"]), gradient=gradient).eval()
    (saliency,) = torch.autograd.grad(ours(x).value.sum(), x)
    assert saliency.abs().max() > 0


def test_5_settings_are_neither_written_back_nor_swallowed():
    given = argparse.Namespace(f_maxiter=3)
    deq = torchdeq.get_deq(given, ift=True)
    assert given.ift and deq.f_max_iter == 40  # the caller's object has changed, and the typo has not been noticed
    cell = cell_of("dense", KERNELS["gaussian"])
    for make in (
        lambda: kerneq.Equilibrium(cell, max_step=3),
        lambda: Anderson(m=3),
        lambda: Phantom(tau=0.5),
        lambda: kerneq.solve(torch.cos, torch.zeros(1, 1), Picard(), stop_mode="rel"),
    ):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            make()
    solver = Anderson()
    with pytest.raises(dataclasses.FrozenInstanceError):  # settings are values: nobody can write into them
        solver.memory = 3


@pytest.mark.parametrize("name", SOLVERS)
def test_6_early_convergence_changes_neither_what_comes_back_nor_its_gradient(name):
    cell, x = cell_of("dense", KERNELS["gaussian"]).eval(), input_of("dense")
    b = torch.ones(2, 3)
    deq = torchdeq.get_deq(core="indexing", n_states=4, f_max_iter=40, f_tol=1e-3, ift=True).train()
    theirs, _ = deq(lambda z: 0.1 * z + b, torch.zeros_like(b))
    assert len(theirs) == 1  # of four
    grads = []
    for tol, steps in ((1e-13, 500), (1e-13, 5000)):
        layer = kerneq.Equilibrium(
            cell, solver=SOLVERS[name], gradient=Implicit(tol=1e-12), tol=tol, max_steps=steps
        ).eval()
        solution = layer(x)
        assert isinstance(solution, kerneq.Solution) and solution.value.shape == (4, 5)
        grads.append(torch.autograd.grad(solution.value.sum(), cell.operator.weight)[0])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-8, atol=1e-10)


def test_7_a_norm_bounded_layer_is_copied_saved_and_walked_back_twice():
    theirs = torch.nn.Sequential(torch.nn.Linear(3, 3))
    torchdeq.apply_norm(theirs)
    assert "0.weight" not in theirs.state_dict()
    theirs(torch.zeros(1, 3))
    with pytest.raises(RuntimeError):
        copy.deepcopy(theirs)
    layer, x = kerneq.Equilibrium(cell_of("conv", KERNELS["gaussian"]), tol=1e-10, max_steps=200), input_of("conv")
    names = set(layer.state_dict())
    for _ in range(2):  # no reset between two backward passes
        layer(x).value.sum().backward()
    other = kerneq.Equilibrium(cell_of("conv", KERNELS["gaussian"], seed=4), tol=1e-10, max_steps=200)
    other.load_state_dict(layer.state_dict())  # and none after loading
    with torch.no_grad():
        expected = layer.eval()(x).value
        torch.testing.assert_close(copy.deepcopy(layer)(x).value, expected)
        torch.testing.assert_close(other.eval()(x).value, expected)
    assert set(layer.state_dict()) == names and "cell.operator.weight" in names


def test_8_nothing_asks_for_a_gpu():
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError), match="(?i)cuda|nvidia"):
            crit = torch.nn.functional.mse_loss
            torchdeq.fp_correction(crit, ([torch.zeros(1, 1)] * 2, torch.zeros(1, 1)), weight_func="const")
    for name, solver in SOLVERS.items():
        for gradient in (Implicit(), Phantom()):
            layer = kerneq.Equilibrium(cell_of("dense", KERNELS["gaussian"]), solver=solver, gradient=gradient)
            value = layer(input_of("dense")).value
            value.sum().backward()
            assert value.device.type == "cpu", name


@pytest.mark.parametrize("name", PLAIN_SOLVERS)
def test_9_bfloat16_works_on_the_cpu(name):
    z0 = torch.zeros(2, 8, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError):
        torchdeq.get_solver("anderson")(torch.cos, z0)
    s = kerneq.solve(torch.cos, z0, PLAIN_SOLVERS[name], tol=2e-2, max_steps=50)
    assert s.converged.all() and s.value.dtype == torch.bfloat16
    torch.testing.assert_close(s.value.double(), torch.full((2, 8), 0.7390851), rtol=2e-2, atol=2e-2)


def test_10_a_sample_neither_waits_for_nor_depends_on_its_batch_mates():
    """There 85 % of the evaluations came after a sample had met its tolerance, and moved its answer."""
    rates, b = torch.linspace(0.2, 0.97, 64), torch.ones(64, 2)
    together, _, info = torchdeq.get_solver("fixed_point_iter")(
        lambda z: z * rates[:, None] + b, torch.zeros(64, 2), max_iter=400, tol=1e-3, stop_mode="rel"
    )
    alone, _, _ = torchdeq.get_solver("fixed_point_iter")(
        lambda z: z * rates[:1, None] + b[:1], torch.zeros(1, 2), max_iter=400, tol=1e-3, stop_mode="rel"
    )
    assert not torch.equal(together[:1], alone)
    f = Counting(rates, b)
    ours = kerneq.solve(f, torch.zeros(64, 2), Picard(), tol=1e-3, max_steps=400)
    for i in (0, 20, 63):
        single = kerneq.solve(Counting(rates[i : i + 1], b[:1]), torch.zeros(1, 2), Picard(), tol=1e-3, max_steps=400)
        assert torch.equal(ours.value[i : i + 1], single.value) and ours.steps[i] == single.steps[0]
    idle = sum(f.seen) - int(ours.steps.sum())
    assert idle < 0.25 * sum(f.seen)
