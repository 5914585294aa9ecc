"""The one loop: each sample on its own, finished ones for free, the best finite point kept."""

import pytest
import torch
from helpers import CELLS, KERNELS, PLAIN_SOLVERS, SOLVERS, Counting, affine, cell_of, input_of

import kerneq
from kerneq.prox import Identity
from kerneq.solution import Limits, Status
from kerneq.solvers import Anderson, Broyden, Picard, Proximal
from kerneq.solvers.anderson import History
from kerneq.solvers.loops import find_point

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("form", CELLS)
def test_a_samples_answer_does_not_depend_on_its_batch_mates(form, solver):
    cell, x = cell_of(form, KERNELS["gaussian"]), input_of(form, batch=5)
    x *= torch.tensor([0.01, 0.3, 1.0, 2.0, 4.0]).view(-1, *[1] * (x.dim() - 1))  # so that they need different steps

    def solved(rows: torch.Tensor) -> kerneq.Solution:
        f = cell.bind(rows)
        return kerneq.solve(f, cell.initial(f), SOLVERS[solver], tol=1e-7, max_steps=200)

    with torch.no_grad():
        cell.eval()
        together, alone = solved(x), [solved(x[i : i + 1]) for i in range(5)]
    assert together.steps.unique().numel() > 1
    assert together.steps.tolist() == [int(s.steps) for s in alone]
    torch.testing.assert_close(together.value, torch.cat([s.value for s in alone]), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(together.residual, torch.cat([s.residual for s in alone]), rtol=1e-3, atol=1e-12)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("solver", PLAIN_SOLVERS)
def test_a_mate_that_turns_nan_or_infinite_at_a_late_step_changes_nothing_for_the_others(solver, poison):
    calls = []

    def f(z: torch.Tensor, poisoned: bool = True) -> torch.Tensor:
        calls.append(1)
        image = torch.cos(z)
        if poisoned and len(calls) >= 4:
            image = torch.cat([image[:1], torch.full_like(image[1:2], poison), image[2:]])
        return image

    z0 = torch.tensor([[0.1, 0.9], [0.2, 0.3], [1.2, 0.0]])
    bad = kerneq.solve(f, z0, PLAIN_SOLVERS[solver], tol=1e-9, max_steps=100)
    good = kerneq.solve(torch.cos, z0, PLAIN_SOLVERS[solver], tol=1e-9, max_steps=100)
    assert bad.converged.tolist() == [True, False, True]
    assert bad.codes[1] == Status.NONFINITE.code and bad.status is Status.NONFINITE
    assert torch.equal(bad.value[[0, 2]], good.value[[0, 2]])
    assert torch.equal(bad.steps[[0, 2]], good.steps[[0, 2]])
    assert bad.steps[1] == 4
    # The best finite iterate is kept, with the residual that belongs to it.
    assert bad.value[1].isfinite().all() and bad.residual[1].isfinite()
    gap = (torch.cos(bad.value[1]) - bad.value[1]).norm()
    assert gap <= 1.5 * bad.residual[1] * torch.cos(bad.value[1]).norm()


def test_a_very_slow_mate_does_not_hold_the_others():
    rates = torch.tensor([0.1, 0.2, 0.999, 0.1])
    f = Counting(rates, torch.ones(4, 3))
    s = kerneq.solve(f, torch.zeros(4, 3), Picard(), tol=1e-6, max_steps=400)
    assert s.converged.tolist() == [True, True, False, True]
    assert (s.steps[[0, 1, 3]] <= 12).all() and s.steps[2] == 400
    torch.testing.assert_close(s.value[[0, 1, 3], 0], 1 / (1 - rates[[0, 1, 3]]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("solver", PLAIN_SOLVERS)
def test_samples_that_have_converged_stop_costing(solver):
    rates = torch.linspace(0.2, 0.97, 64)
    f = Counting(rates, torch.ones(64, 2) * torch.linspace(1, 2, 2))
    s = kerneq.solve(f, torch.zeros(64, 2), PLAIN_SOLVERS[solver], tol=1e-6, max_steps=500)
    assert s.converged.all()
    assert f.seen[0] == 64 and f.seen == sorted(f.seen, reverse=True)
    needed = int(s.steps.sum())
    if len(f.seen) > 5:  # linear maps: Anderson and Broyden need three or four steps for all of them
        assert f.seen[-1] <= 16
        assert sum(f.seen) <= 1.35 * needed < 64 * int(s.steps.max())  # at most a quarter of the rows are idle


def test_the_best_point_is_returned_when_a_solve_gets_worse():
    s = kerneq.solve(lambda z: 3 * z - 2 + (z - 1) ** 2, torch.tensor([[0.9]]), Picard(), tol=1e-9, max_steps=5)
    assert not s.converged.any()
    points = []
    z = torch.tensor([[0.9]])
    for _ in range(5):
        fz = 3 * z - 2 + (z - 1) ** 2
        points.append((float((fz - z).abs() / fz.abs()), float(fz)))
        z = fz
    residual, image = min(points)
    assert (residual, image) == points[0]
    assert float(s.residual) == pytest.approx(residual)
    assert float(s.value) == pytest.approx(image)  # Picard is steady: the best point, one step on


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_reported_residual_belongs_to_the_value_of_a_converged_sample(solver):
    cell, x = cell_of("conv", KERNELS["gaussian"]), input_of("conv")
    with torch.no_grad():
        f = cell.bind(x)
        s = kerneq.solve(f, cell.initial(f), SOLVERS[solver], tol=1e-4, max_steps=100)
        fz = f(s.value)
        residual = (fz - s.value).flatten(1).norm(dim=1) / fz.flatten(1).norm(dim=1)
    assert s.converged.all() and (s.residual <= 1e-4).all()
    torch.testing.assert_close(s.residual, residual, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("solver", PLAIN_SOLVERS)
def test_steps_counts_the_evaluations_of_f(solver):
    A, b, _ = affine(batch=1)
    calls = []
    s = kerneq.solve(
        lambda z: calls.append(1) or z @ A.mT + b, torch.zeros_like(b), PLAIN_SOLVERS[solver], tol=1e-8, max_steps=200
    )
    assert int(s.steps) == len(calls)


@pytest.mark.parametrize("solver", [*PLAIN_SOLVERS])
def test_a_fixed_point_given_as_the_start_takes_one_step_and_is_returned_unchanged(solver):
    A, b, z_star = affine()
    s = kerneq.solve(lambda z: z @ A.mT + b, z_star, PLAIN_SOLVERS[solver], tol=1e-9)
    assert s.steps.tolist() == [1, 1, 1] and torch.equal(s.value, z_star)


@pytest.mark.parametrize("max_steps", [1, 2, 3])
@pytest.mark.parametrize("solver", SOLVERS)
def test_even_a_solve_of_one_step_moves(solver, max_steps):
    cell, x = cell_of("dense", KERNELS["gaussian"]), input_of("dense")
    f = cell.bind(x)
    z0 = torch.zeros(4, 5)
    s = kerneq.solve(f, z0, SOLVERS[solver], tol=1e-12, max_steps=max_steps)
    assert s.steps.tolist() == [max_steps] * 4 and s.status is Status.MAX_STEPS
    assert (s.value - z0).flatten(1).norm(dim=1).min() > 0


def test_a_sample_stops_as_soon_as_it_reaches_the_tolerance_even_if_an_energy_was_lower():
    f = cell_of("dense", KERNELS["sigmoid"]).eval().bind(5 * input_of("dense", batch=32, seed=0))
    runs = [kerneq.solve(f, None, Proximal(), tol=1e-3, max_steps=k, check_every=k) for k in range(1, 20)]
    reached = torch.stack([s.converged for s in runs])
    s = kerneq.solve(f, None, Proximal(), tol=1e-3)
    assert reached.any(0).all() and torch.equal(s.steps, reached.int().argmax(0) + 1)
    assert (s.residual <= 1e-3).all()


@pytest.mark.parametrize("solver", SOLVERS)
def test_with_check_every_samples_finish_only_at_looks(solver):
    cell, x = cell_of("dense", KERNELS["gaussian"]), input_of("dense")
    f = cell.bind(x)
    each = kerneq.solve(f, cell.initial(f), SOLVERS[solver], tol=1e-6, max_steps=120)
    fourth = kerneq.solve(f, cell.initial(f), SOLVERS[solver], tol=1e-6, max_steps=120, check_every=4)
    assert (fourth.steps % 4 == 0).all() and fourth.converged.all()
    later = fourth.steps - (each.steps + 3) // 4 * 4
    # Where f contracts, `Proximal` accelerates only after the first look: that may cost the steps before it.
    assert ((later == 0) | (later == 4) if solver == "proximal" else later == 0).all()


def test_where_f_contracts_nothing_is_remembered_before_the_first_look(monkeypatch):
    """Most solves end there; one that goes on has lost nothing but the acceleration of those steps."""
    remembered = []
    extrapolate = History.extrapolate
    monkeypatch.setattr(History, "extrapolate", lambda *args, **kw: remembered.append(1) or extrapolate(*args, **kw))
    cell, x = cell_of("dense", KERNELS["gaussian"]), input_of("dense")
    f = cell.bind(x)
    s = kerneq.solve(f, None, Proximal(), tol=1e-2, check_every=4)
    assert s.converged.all() and s.steps.tolist() == [4] * 4 and not remembered
    assert (f(s.value) - s.value).norm(dim=1).max() <= 1e-2 * s.value.norm(dim=1).max()
    s = kerneq.solve(f, None, Proximal(), tol=1e-10, max_steps=60, check_every=4)
    assert s.converged.all() and len(remembered) == int(s.steps.max()) - 1
    remembered.clear()
    steep = cell_of("dense", KERNELS["gaussian"], norm=2.0, stretch=10.0).bind(x)  # where plain steps may fail
    assert kerneq.solve(steep, None, Proximal(), tol=1e3, check_every=4).steps.tolist() == [4] * 4
    assert len(remembered) == 3


def test_before_the_first_look_no_more_than_three_steps_are_plain():
    """f may expand, here by 3: nine plain steps would go 20 000 times as far as the first."""
    slopes, far = 3 * torch.linspace(-1, 0.3, 6), []
    f = lambda z: far.append(float(z.norm())) or torch.sin(slopes * z) + 1  # noqa: E731
    s = kerneq.solve(f, torch.zeros(5, 6), Anderson(), tol=1e-6, max_steps=60, check_every=20)
    linear = kerneq.solve(
        lambda z: far.append(float(z.norm())) or slopes * z + 1, torch.zeros(5, 6), Anderson(), tol=1e-6, check_every=10
    )
    assert linear.converged.all() and s.converged.all() and max(far) < 3**4 * 5**0.5


def test_the_equation_of_a_cell_keeps_no_graph_for_its_gradient_which_is_in_closed_form():
    f = cell_of("dense", KERNELS["gaussian"]).bind(input_of("dense"))
    z = kerneq.solve(f, None, Anderson(), tol=1e-9).value
    s, at = find_point(f, 1.001 * z, Anderson(), Limits(1e-3, 50), graph=True)
    assert s.steps.tolist() == [2] * 4 and at.system is None and at.features is not None


@pytest.mark.parametrize("check_every", [20, 1000])
@pytest.mark.parametrize("solver", SOLVERS)
def test_without_looks_every_sample_takes_all_steps_and_is_judged_at_the_end(solver, check_every):
    cell, x = cell_of("dense", KERNELS["gaussian"]), input_of("dense")
    f = cell.bind(x)
    s = kerneq.solve(f, cell.initial(f), SOLVERS[solver], tol=1e-4, max_steps=20, check_every=check_every)
    assert s.steps.tolist() == [20] * 4 and s.converged.all()
    looked = kerneq.solve(f, cell.initial(f), SOLVERS[solver], tol=1e-12, max_steps=20)
    torch.testing.assert_close(s.value, looked.value, rtol=1e-3, atol=1e-4)


def test_the_solve_leaves_no_graph_and_does_not_touch_the_start():
    z0 = torch.zeros(2, 3, requires_grad=True)
    scale = torch.ones(3, requires_grad=True)
    for solver in (Picard(), Anderson(), Broyden()):
        s = kerneq.solve(lambda z: torch.cos(scale * z), z0, solver, tol=1e-6)
        assert not s.value.requires_grad and torch.equal(z0, torch.zeros(2, 3))


@pytest.mark.parametrize("solver", [Picard(), Proximal(), Anderson()])
def test_a_solve_that_ends_at_the_input_itself_leaves_no_graph_either(solver):
    """With the linear kernel and σ = 1 the image of z = 0 is a."""
    cell = cell_of("dense", KERNELS["linear"], norm=0.1, prox=Identity())
    s = kerneq.solve(cell.bind(input_of("dense")), None, solver, tol=0.3)
    assert bool(s.converged.all()) and not s.value.requires_grad


@pytest.mark.parametrize("check_every", [1, 64])
def test_what_diverges_has_not_converged_where_its_square_overflows(check_every):
    """At z = 2⁶³, in float32, ‖f(z)‖² is infinite and ‖f(z) − z‖² is not."""
    z0 = torch.ones(2, 3, dtype=torch.float32)
    s = kerneq.solve(lambda z: 2 * z, z0, Picard(), max_steps=64, check_every=check_every)
    assert s.status is Status.NONFINITE and not s.converged.any()


def test_a_zero_image_is_far_from_an_equilibrium_and_not_an_infinite_value():
    """f(z) = 0 at z ≠ 0 divides by nothing; the next step lands on the fixed point 0."""
    s = kerneq.solve(lambda z: torch.relu(z - 100), torch.full((2, 3), 50.0), Picard(), tol=1e-6, max_steps=10)
    assert s.status is Status.CONVERGED and s.steps.tolist() == [2, 2] and (s.value == 0).all()


@pytest.mark.parametrize("solver", [Anderson(), Broyden(), Picard(0.5)], ids=str)
def test_autocast_does_not_reach_the_solvers_own_arithmetic(solver):
    """A float32 map stays float32 inside an autocast region, and its solve takes the same steps."""
    z0 = torch.linspace(0, 2, 24, dtype=torch.float32).view(4, 6)

    def f(z: torch.Tensor) -> torch.Tensor:
        return torch.cos(z) * torch.linspace(0.2, 1, 6, dtype=torch.float32)

    expected = kerneq.solve(f, z0, solver, tol=1e-6, max_steps=60)
    with torch.autocast("cpu", torch.bfloat16):
        got = kerneq.solve(f, z0, solver, tol=1e-6, max_steps=60)
    assert got.value.dtype == torch.float32
    assert torch.equal(got.value, expected.value) and torch.equal(got.steps, expected.steps)


def test_a_solve_inside_a_compiled_function_is_the_solve_outside():
    """The look at the residual is no part of the program; a solve must survive being traced around it."""

    def found(z0: torch.Tensor) -> torch.Tensor:
        return kerneq.solve(torch.cos, z0, Picard(), tol=1e-5, max_steps=50).value

    z0 = torch.linspace(0, 2, 12).view(4, 3)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(found, backend="eager")(z0), found(z0), rtol=0, atol=0)
    torch.compiler.reset()
