"""A tolerance the dtype cannot reach ends with a status that says so; half precision works."""

import warnings

import pytest
import torch
from helpers import CELLS, KERNELS, SOLVERS, affine, cell_of, descend, input_of

import kerneq
from kerneq.maps import Point
from kerneq.solution import Status
from kerneq.solvers import Anderson, Broyden, Picard, Proximal
from kerneq.solvers.base import Measurement
from kerneq.solvers.loops import SampleRecord

pytestmark = pytest.mark.usefixtures("float64")
LIMIT = 400


@pytest.mark.parametrize(
    "dtype, tol", [(torch.float32, 1e-12), (torch.bfloat16, 1e-4), (torch.float64, 1e-30)], ids=str
)
@pytest.mark.parametrize("form", CELLS)
def test_a_tolerance_out_of_reach_ends_early_and_says_so(form, dtype, tol):
    cell, x = cell_of(form, KERNELS["gaussian"]), input_of(form)
    z_star = descend(cell, x)
    cell, x = cell.to(dtype).eval(), x.to(dtype)
    reached = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float64: 1e-12}[dtype]
    for solver in SOLVERS.values():
        with torch.no_grad():
            f = cell.bind(x)
            s = kerneq.solve(f, cell.initial(f), solver, tol=tol, max_steps=LIMIT)
        assert int(s.steps.max()) <= LIMIT // 4, solver
        # A sample may land on an exact fixed point of its rounded map; every other one has stalled.
        stalled = ~s.converged
        assert (s.codes[stalled] == Status.PRECISION.code).all() and (s.residual[~stalled] <= tol).all(), solver
        error = (s.value.double() - z_star).flatten(1).norm(dim=1) / z_star.flatten(1).norm(dim=1)
        assert (s.residual <= reached).all() and (error <= 10 * reached).all(), solver


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_states_are_solved_to_their_own_accuracy(dtype):
    cell, x = cell_of("dense", KERNELS["gaussian"]), input_of("dense")
    z_star = descend(cell, x)
    cell, x = cell.to(dtype).eval(), x.to(dtype)
    for solver in (Picard(), Anderson(), Broyden(), Proximal()):
        with torch.no_grad():
            f = cell.bind(x)
            s = kerneq.solve(f, cell.initial(f), solver, tol=2e-2, max_steps=50)
        assert s.converged.all() and s.value.dtype == dtype and s.residual.dtype == torch.float32, solver
        torch.testing.assert_close(s.value.double(), z_star, rtol=5e-2, atol=2e-2)


def test_what_converges_slowly_is_not_taken_for_what_rounding_stops():
    z0 = torch.full((1, 4), 1 - 1e-9)
    s = kerneq.solve(lambda z: 0.998 * z + 0.002, z0, Picard(), tol=1e-13, max_steps=5000)
    assert s.converged.all() and s.steps > 1000


def test_the_small_system_of_anderson_is_float32_whatever_the_state():
    z = torch.zeros(3, 8, dtype=torch.bfloat16)
    memory = Anderson().init(torch.cos, z)
    assert memory.gram.dtype == torch.float32 and memory.images.dtype == torch.bfloat16


def test_anderson_is_safe_when_one_sample_is_already_exact():
    A, b, z_star = affine(batch=3)
    z0 = torch.stack([z_star[0], torch.zeros(6), z_star[2]])
    s = kerneq.solve(lambda z: z @ A.mT + b, z0, Anderson(), tol=1e-10, max_steps=100)
    assert s.converged.all() and s.steps[0] == 1 and s.steps[2] == 1 and s.steps[1] > 1
    torch.testing.assert_close(s.value, z_star, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("solver", [Anderson(), Broyden()], ids=str)
def test_a_sample_that_stays_exactly_where_it_is_keeps_its_value_without_looks(solver):
    """Zero gaps make every Gram matrix singular; the value must neither move nor become NaN."""
    z0 = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    s = kerneq.solve(lambda z: z.clone(), z0, solver, tol=1e-9, max_steps=12, check_every=12)
    assert s.converged.all()
    torch.testing.assert_close(s.value, z0, rtol=1e-14, atol=0)


def test_anderson_with_repeated_entries_in_its_history_stays_finite():
    """A constant map has parallel gaps: the ridge is relative, so their size does not matter."""
    for size in (1e-20, 1.0, 1e20):
        target = size * torch.tensor([[1.0, -1.0]])
        s = kerneq.solve(lambda z, t=target: 0.5 * z + 0.5 * t, torch.zeros(1, 2), Anderson(), tol=1e-10, max_steps=60)
        assert s.converged.all()
        torch.testing.assert_close(s.value / size, target / size)


def test_the_relative_ridge_does_not_slow_anderson_down_as_the_residual_falls():
    """torchdeq's absolute ridge of 1e-4 flattens the weights once ‖gap‖² is near it (peers, section 2.4)."""
    A, b, _ = affine(dimension=20, rate=0.95, symmetric=True, batch=2)
    steps = [
        int(kerneq.solve(lambda z, s=s: z @ A.mT + s * b, 0 * b, Anderson(), tol=1e-9, max_steps=500).steps.max())
        for s in (1e-6, 1.0, 1e6)
    ]
    assert max(steps) - min(steps) <= 3


def test_no_solver_warns_on_its_way():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for solver in (Picard(), Anderson(), Broyden()):
            kerneq.solve(lambda z: z * 1e200, torch.ones(2, 2), solver, tol=1e-6, max_steps=20)


def test_an_energy_of_minus_infinity_is_no_reason_to_warn():
    record = SampleRecord.open(1, 1e-6, torch.float64, picard_steps=None)
    half, far = torch.tensor([0.5]), torch.tensor([torch.inf])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in (1, 2):
            record.observe(step, Measurement(half, half, Point(half), -far, far), 1)


def test_a_point_without_a_residual_is_not_the_best_however_low_its_energy():
    record = SampleRecord.open(1, 1e-6, torch.float64, picard_steps=None)
    half, none = torch.tensor([0.5]), torch.tensor([torch.inf])
    assert record.observe(1, Measurement(half, half, Point(half), half, 0 * half), 0).all()
    assert not record.observe(2, Measurement(none, none, Point(half), -half, 0 * half), 1).any()
    assert record.residual == 0.5 and record.codes == Status.NONFINITE.code
