"""Solver behaviour: traces against plain loops, the contraction factor against eigenvalues."""

import pytest
import torch
from helpers import cell_of, input_of

from kerneq.kernels import Gaussian, Linear
from kerneq.maps import linearise
from kerneq.solvers import Anderson, InFeatures, Picard, Proximal, solve
from kerneq.stability import spectral_radius


@pytest.fixture(autouse=True, scope="module")
def every_test_here(float64):
    """In float64 and on one thread."""


@pytest.mark.parametrize("form", ["dense", "conv"])
def test_a_trace_is_what_a_plain_loop_sees(form):
    f = cell_of(form, Linear()).eval().bind(input_of(form))
    traced = solve(f, None, Picard(), max_steps=6, check_every=6, trace=True).trace
    residual, energy = traced.residual, traced.energy
    z = torch.zeros_like(f(f.evaluate(None).image))
    for step in range(6):
        expected = (f(z) - z).flatten(1).norm(dim=1) / f(z).flatten(1).norm(dim=1)
        torch.testing.assert_close(residual[step], expected.detach())
        torch.testing.assert_close(energy[step], f.energy(z).detach())
        z = f(z)
    assert len(residual) == len(energy) == 6


@pytest.mark.parametrize("solver", [Proximal(memory=0), Proximal(), InFeatures(Anderson())])
def test_a_trace_goes_on_past_the_tolerance_and_energy_falls(solver):
    kernel = Gaussian(gamma=0.5, patch=2, split=2, hidden=6)
    f = cell_of("conv", kernel, norm=1.2).eval().bind(input_of("conv"))
    traced = solve(f, None, solver, max_steps=40, check_every=40, trace=True).trace
    residual, energy = traced.residual, traced.energy
    assert residual.shape == (40, 4) and float(residual[-1].max()) < 1e-6
    if isinstance(solver, Proximal) and solver.memory == 0:
        assert bool((energy.diff(dim=0) <= 1e-12).all())


@pytest.mark.parametrize("form", ["dense", "conv"])
def test_the_contraction_factor_is_the_largest_eigenvalue_of_the_jacobian(form):
    cell, x = cell_of(form, Gaussian(gamma=0.2, patch=2, split=2, hidden=6), norm=1.3).eval(), input_of(form)
    f = cell.bind(x)
    z = solve(f, None, Proximal(), tol=1e-10, max_steps=500).value
    radius = torch.linalg.eigvals(linearise(f, z.clone()).jacobian()).abs().amax(1)
    found = spectral_radius(f, z)
    torch.testing.assert_close(found, radius, rtol=1e-3, atol=0)
    assert bool((found <= f.bound).all())
