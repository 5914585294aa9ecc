"""How fast each solver converges, not only that it does."""

import pytest
import torch
from helpers import KERNELS, affine, cell_of, descend, input_of

import kerneq
from kerneq.solvers import Anderson, Broyden, Picard, Proximal

pytestmark = pytest.mark.usefixtures("float64")


def errors(f, z0, solver, z_star, steps) -> torch.Tensor:
    """‖z_n − z*‖ after n = 1, …, steps evaluations."""
    values = [kerneq.solve(f, z0, solver, tol=1e-15, max_steps=n).value for n in range(1, steps + 1)]
    return torch.stack([(z - z_star).norm() for z in values])


def check_affine(solver, tol: float, max_steps: int, accuracy: float, **problem) -> None:
    """The solver finds the fixed points of affine maps, within so many steps."""
    A, b, z_star = affine(batch=3, **problem)
    s = kerneq.solve(lambda z: z @ A.mT + b, torch.zeros_like(b), solver, tol=tol, max_steps=max_steps)
    assert s.converged.all(), s
    torch.testing.assert_close(s.value, z_star, rtol=accuracy, atol=accuracy)


@pytest.mark.parametrize("rate", [0.3, 0.8, 0.95])
@pytest.mark.parametrize("relaxation", [1.0, 0.6])
def test_picards_linear_rate_is_the_spectral_radius(rate, relaxation):
    A, b, z_star = affine(rate=rate, symmetric=True, batch=1)
    spectrum = 1 - relaxation + relaxation * torch.linalg.eigvalsh(A)
    radius = spectrum.abs().max()
    n = min(150, int(-25 / radius.log()))  # far enough for the slowest mode to be alone, short of rounding error
    f, z0, solver = (lambda z: z @ A.mT + b), torch.zeros_like(b), Picard(relaxation)
    before, after = ((kerneq.solve(f, z0, solver, tol=1e-15, max_steps=k).value - z_star).norm() for k in (n - 1, n))
    torch.testing.assert_close(after / before, radius, rtol=0.02, atol=0)


@pytest.mark.parametrize("dimension", [2, 4, 6])
def test_anderson_with_enough_memory_is_exact_on_an_affine_map_after_dimension_plus_two_evaluations(dimension):
    """Like GMRES it ends after `dimension` Krylov steps (Walker & Ni, 2011); rounding is squared by the Gram matrix."""
    solver = Anderson(memory=dimension + 1, ridge=0.0)
    check_affine(solver, tol=1e-6, max_steps=dimension + 2, accuracy=1e-5, dimension=dimension, rate=0.9)


def test_anderson_solves_an_affine_map_that_is_no_contraction():
    check_affine(Anderson(memory=5), tol=1e-10, max_steps=60, accuracy=1e-8, dimension=4, rate=3.0)


def test_broyden_is_superlinear():
    """e_{n+1}/e_n tends to zero; on d-dimensional affine maps it ends within 2d steps (Gay, 1979)."""

    def f(z: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.cos(z[:, 1]), 0.5 * torch.sin(z[:, 0]) + 0.3], dim=1)

    z_star = kerneq.solve(f, torch.zeros(1, 2), Picard(), tol=1e-15, max_steps=500).value
    e = errors(f, torch.zeros(1, 2), Broyden(), z_star, 9)
    ratios = (e[1:] / e[:-1])[e[1:] > 1e-14]
    assert ratios[-1] < 0.02 and ratios[-1] < 0.1 * ratios[0]
    picard = errors(f, torch.zeros(1, 2), Picard(), z_star, 9)
    assert e[-1] < 1e-6 * picard[-1]


def test_broyden_ends_within_twice_the_dimension_on_an_affine_map():
    check_affine(Broyden(memory=12), tol=1e-9, max_steps=12, accuracy=1e-7, dimension=5, rate=0.9)


def test_broyden_starts_afresh_when_its_memory_is_full_and_still_converges():
    check_affine(Broyden(memory=3), tol=1e-10, max_steps=300, accuracy=1e-8, dimension=12, rate=0.9)


def test_acceleration_beats_plain_iteration_on_a_slow_map():
    A, b, _ = affine(dimension=20, rate=0.98, symmetric=True)
    f, z0 = (lambda z: z @ A.mT + b), torch.zeros_like(b)
    steps = {
        solver: int(kerneq.solve(f, z0, solver, tol=1e-8, max_steps=3000).steps.max())
        for solver in (Picard(), Anderson(), Broyden(memory=30))
    }
    plain, anderson, broyden = steps.values()
    assert anderson < 0.3 * plain and broyden < 0.15 * plain


def test_bare_proximal_converges_linearly_at_the_rate_of_strong_convexity():
    """One step contracts by at most 1 − αμ while 1 + L ≤ 2/α − μ (gradient descent on a μ-convex function)."""
    cell, x = cell_of("dense", KERNELS["linear"]), input_of("dense", batch=1)
    z_star, f = descend(cell, x), cell.bind(x)
    e = errors(f, torch.zeros_like(z_star), Proximal(memory=0), z_star, 60)
    worst = 1 - 2 / (2 + f.bound) * f.convexity
    ratios = e[1:] / e[:-1]
    assert (ratios[e[1:] > 1e-12] <= worst + 1e-9).all()
