"""What a solve says about itself: statuses, sentences, and the caller's choice of raising, warning or returning."""

import dataclasses
import pickle
from xml.etree import ElementTree

import pytest
import torch

import kerneq
from kerneq import EquilibriumError, Solution, Status
from kerneq.solvers import Picard

pytestmark = pytest.mark.usefixtures("float64")


def solution(*statuses: Status) -> Solution:
    count = len(statuses)
    codes = torch.tensor([status.code for status in statuses])
    return Solution(torch.zeros(count, 2), torch.full((count,), 1e-2), torch.full((count,), 7), codes, tol=1e-3)


def test_the_worst_sample_gives_the_status():
    order = list(Status)
    assert order == [Status.CONVERGED, Status.PRECISION, Status.MAX_STEPS, Status.BREAKDOWN, Status.NONFINITE]
    for i, worst in enumerate(order):
        assert solution(*order[: i + 1]).status is worst
        assert solution(*order[: i + 1]).converged.tolist() == [True] + [False] * i


@pytest.mark.parametrize(
    "status, cause, remedy",
    [
        (Status.PRECISION, "stopped falling at the rounding error of the dtype", "Loosen `tol` or use a wider dtype."),
        (Status.MAX_STEPS, "step limit was reached", "Raise `max_steps`, loosen `tol`, or use the solver `Proximal"),
        (Status.NONFINITE, "infinite or NaN value", "Check the input and the weights"),
    ],
)
def test_every_failure_names_its_cause_its_numbers_and_its_remedy(status, cause, remedy):
    error = EquilibriumError(solution(Status.CONVERGED, status))
    with pytest.raises(EquilibriumError, match=f"The equilibrium solve failed. .*{cause}.*{remedy}"):
        raise error
    assert "1 of 2 samples reached tol=0.001; worst residual 1.0e-02, 7 steps at most." in str(error)
    assert error.solution.status is status


def test_a_failed_backward_solve_names_the_settings_of_the_gradient():
    for status, remedy in (
        (Status.PRECISION, "Loosen `tol` of the gradient, `Implicit(tol=…)`"),
        (Status.MAX_STEPS, "Raise `max_steps` of the gradient, `Implicit(max_steps=…)`"),
        (Status.BREAKDOWN, "Use `Implicit(solver=Anderson())`"),
        (Status.NONFINITE, "Check the gradient that comes from the loss"),
    ):
        text = str(EquilibriumError(solution(status), "backward"))
        assert text.startswith("The backward solve failed. ") and remedy in text


def test_a_good_solution_says_so():
    text = str(kerneq.solve(torch.cos, torch.zeros(2, 3), Picard(), tol=1e-6, max_steps=100))
    assert text.startswith("The residual fell below the tolerance. 2 of 2 samples reached tol=1e-06")


def test_returning_is_the_default_and_says_nothing_and_a_warning_says_the_sentence():
    def diverge(**more) -> Solution:
        return kerneq.solve(lambda z: 3 * z + 1, torch.ones(2, 2), Picard(), max_steps=5, **more)

    assert diverge().status is Status.MAX_STEPS and not diverge().converged.any()
    with pytest.warns(
        RuntimeWarning, match="The fixed-point solve failed. The step limit was reached.*spectral_radius"
    ):
        assert diverge(on_failure="warn").status is Status.MAX_STEPS


def test_raising_carries_the_solution():
    with pytest.raises(EquilibriumError, match="infinite or NaN") as caught:
        kerneq.solve(lambda z: z / 0, torch.ones(2, 2), Picard(), on_failure="raise")
    assert caught.value.solution.status is Status.NONFINITE
    assert torch.equal(caught.value.solution.value, torch.ones(2, 2))


@pytest.mark.parametrize("on_failure", ["raise", "warn", "return"])
def test_success_is_never_loud(on_failure):
    kerneq.solve(torch.cos, torch.zeros(1, 1), Picard(), max_steps=100, on_failure=on_failure)


def test_a_solution_is_a_value():
    s = solution(Status.CONVERGED)
    with pytest.raises(dataclasses.FrozenInstanceError):
        s.tol = 1.0
    assert pickle.loads(pickle.dumps(s)).status is Status.CONVERGED
    assert s.steps.dtype == torch.int64 and s.converged.dtype == torch.bool


def test_the_residual_is_measured_in_float32_at_least():
    for dtype, measured in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2):
        s = kerneq.solve(torch.cos, torch.zeros(1, 4, dtype=dtype), Picard(), tol=1e-1)
        assert s.residual.dtype == measured and s.value.dtype == dtype


def test_a_notebook_shows_how_many_samples_ended_how_and_their_residuals():
    codes = [Status.CONVERGED.code, Status.CONVERGED.code, Status.MAX_STEPS.code, Status.NONFINITE.code]
    residual = torch.tensor([2e-4, 0.0, 5e-3, torch.nan], requires_grad=True)
    shown = Solution(torch.zeros(4), residual, torch.ones(4), torch.tensor(codes), tol=1e-3)._repr_html_()
    page = ElementTree.fromstring(shown)  # well-formed
    assert [row[0].text for row in page.iter("tr")] == ["samples", "2", "1", "1"]
    texts = [text.text for text in page.iter("text")]
    assert texts[:2] == ["1", "1e-16"] and texts[-4:] == ["1", "1e-4", "1", "1e-3"]
    heights = {bar.get("fill"): float(bar.get("height")) for bar in [*page.iter("rect")][-2:]}
    assert heights == {"#D55E00": 20.0, "#0072B2": 0.0}  # one of three finite residuals, and above the tolerance


def test_a_notebook_shows_the_equation_of_a_layer_its_sizes_its_bound_and_how_it_is_solved():
    sizes = {"inputs": 4, "state": 8, "features": 6, "bias": True}
    for norm, said in ((0.9, "one equilibrium for every input"), (3.0, "there may be several equilibria")):
        cell = kerneq.cells.DenseCell(kerneq.kernels.Gaussian(split=2), **sizes, norm=norm)
        rows = dict(row.itertext() for row in ElementTree.fromstring(kerneq.Equilibrium(cell)._repr_html_()))
        assert "Gaussian" in rows["kernel"] and "x of 4, state z of 8, compared in 6" in rows["sizes"]
        assert f"‖W_h‖ ≤ {norm:g}, so L ≤ {norm**2:.3g}" in rows["bound"] and said in rows["bound"]
        assert rows["solver"].startswith("Proximal") and rows["max_steps"] == "50"
    resolvent = kerneq.Resolvent(kerneq.cells.DenseCell(kerneq.kernels.Squared(), **sizes))
    assert "no difference of inputs is lengthened" in resolvent._repr_html_()
    own = ElementTree.fromstring(kerneq.Equilibrium(torch.nn.Linear(4, 4))._repr_html_())
    assert [*own[0].itertext()] == ["function", "Linear"] and [*own[1].itertext()] == ["parameters", "20"]


def test_a_notebook_shows_a_solve_without_a_finite_residual():
    lost = Solution(torch.zeros(1), torch.tensor([torch.inf]), torch.ones(1), torch.tensor([4]), tol=1e-3)
    assert "svg" not in lost._repr_html_()
