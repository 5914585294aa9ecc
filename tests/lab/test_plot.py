"""A solve in pictures: `kq.plot.solve`."""

import dataclasses

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch

import kerneq as kq

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
