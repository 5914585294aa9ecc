"""A solve and a run in pictures: `kq.plot.solve`, `kq.plot.curves` and what a notebook shows of a run."""

import dataclasses

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch
from run_folders import make_run

import kerneq as kq
from kerneq.lab.run import Run

matplotlib.use("Agg")


@pytest.fixture
def solution():
    torch.manual_seed(0)
    cell = kq.cells.DenseCell(kq.kernels.Gaussian(gamma=0.02), inputs=8, state=16, features=8).double()
    yield kq.Equilibrium(cell, tol=1e-6)(torch.randn(5, 8, dtype=torch.float64), trace=True)
    plt.close("all")


def test_a_solve_is_drawn_as_residual_energy_and_steps(solution):
    residual, energy, steps = kq.plot.solve(solution)
    *lines, tolerance = residual.get_lines()
    assert [list(line.get_ydata()) for line in lines] == solution.trace.residual.T.tolist()
    assert list(tolerance.get_ydata()) == [1e-6, 1e-6]
    assert len(energy.get_lines()) == 5
    assert sum(bar.get_height() for bar in steps.patches) == 5
    assert steps.get_title() == "5 samples, 0 not converged"
    residual.figure.canvas.draw()  # a warning would be an error


def test_a_trace_alone_has_no_tolerance_and_a_function_no_energy(solution):
    assert len(kq.plot.solve(solution.trace)) == 2
    s = kq.fixed_point(lambda z: torch.tanh(z + 1), torch.zeros(3, 4), trace=True)
    assert len(kq.plot.solve(s)) == 2
    assert len(kq.plot.solve(s.trace)) == 1


def test_without_a_trace_it_says_how_to_get_one(solution):
    with pytest.raises(ValueError, match="trace=True"):
        kq.plot.solve(dataclasses.replace(solution, trace=None))


def test_a_run_shows_what_it_reached_and_its_curves_in_a_notebook(tmp_path):
    folder = make_run(tmp_path / "<b>&run")
    run = Run(folder)
    shown = run._repr_html_()
    assert "&lt;b&gt;&amp;run" in shown and "<b>" not in shown and shown.count("<svg") == 1
    assert f"<td>{run.best_accuracy():.2%}</td>" in shown and plt.get_fignums() == []
    (loss, accuracy) = kq.plot.curves(run.rows())
    assert [list(line.get_ydata()) for line in accuracy.get_lines()][-1] == [
        row["validation"]["accuracy"] for row in run.rows()
    ]
    plt.close("all")
    (folder / "metrics.jsonl").unlink()
    (folder / "config.toml").unlink()
    assert "svg" not in run._repr_html_()
