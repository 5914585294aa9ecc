"""docs/theory.md, fact 3: proximal descent lowers E at every step, for any weights; plain iteration need not."""

import dataclasses
import math

import pytest
import torch
from helpers import CELLS, KERNELS, Reference, cell_of, examples, input_of
from hypothesis import given
from hypothesis import strategies as st

import kerneq
from kerneq.kernels import Gaussian
from kerneq.solvers import Picard, Proximal
from kerneq.solvers.proximal import ProximalSpace

pytestmark = pytest.mark.usefixtures("float64")
WIDE = {name: kernel for name, kernel in KERNELS.items() if name != "cubic"}  # degree 3 refuses norm ≥ √2


def falls(energies: torch.Tensor) -> None:
    rise = energies.diff(dim=0)
    assert (rise <= 1e-12 * (1 + energies[:-1].abs())).all(), rise.max()


@pytest.mark.parametrize("L, memory", [(0.8, 0), (20.0, 0), (20.0, 5)])  # accelerated below 1: next
@pytest.mark.parametrize("form", CELLS)
@pytest.mark.parametrize("kernel", WIDE)
def test_energy_never_rises_with_the_number_of_steps(kernel, form, L, memory):
    cell, x = cell_of(form, KERNELS[kernel], norm=math.sqrt(L), stretch=10.0), input_of(form)
    with torch.no_grad():
        f, problem = cell.bind(x), Reference(cell, x)
        z0 = torch.zeros(problem.state)
        values = [kerneq.solve(f, z0, Proximal(memory=memory), tol=1e-14, max_steps=n).value for n in range(1, 10)]
    energies = torch.stack([problem.energy(z) for z in [z0, *values]])
    assert all((z >= 0).all() for z in values)
    # Accelerated, E counts from the first step on, σ(d(z₀)), which may lie higher than z₀.
    assert memory or (energies[-1] < energies[0]).all() or kernel == "quadratic-published"  # z = 0 is one's equilibrium
    falls(energies[memory > 0 :])


@pytest.mark.parametrize("form", CELLS)
@pytest.mark.parametrize("kernel", ["gaussian", "multiquadric", "cauchy", "linear"])
def test_where_f_contracts_the_gap_of_accepted_points_never_rises_and_no_energy_is_asked_for(kernel, form):
    cell = cell_of(form, KERNELS[kernel], norm=0.95 if kernel == "linear" else 1.0, stretch=10.0)
    solver, refusals = Proximal(), 0
    with torch.no_grad():
        f = solver.space(cell.bind(input_of(form, batch=64)))
        assert f.f.contraction <= 1 + 1e-12 and not f.energy
        at = f.start(None)
        memory, lowest = solver.init(f, at.z), torch.full((64,), torch.inf)
        for _ in range(25):
            refused = ~memory.guard.accepted
            z, memory = solver.step(f, at, memory)
            accepted, gap = memory.guard.accepted, f.measure(at).gap
            assert (gap[accepted] <= lowest[accepted] * (1 + 1e-9) + 1e-14).all()
            assert (refused <= accepted).all()  # the averaged step is never refused
            refusals += int((~accepted & (gap > 1e-10)).sum())  # below, rounding decides
            lowest = torch.where(accepted, gap, lowest)
            at = f.evaluate(z)
    assert (lowest <= 1e-3).all()
    assert refusals or (kernel, form) != ("linear", "dense")


@examples
@given(
    seed=st.integers(0, 10**6),
    L=st.floats(0.1, 20.0),
    gamma=st.floats(0.01, 2.0),
    kernel=st.sampled_from([*WIDE, "gaussian-gamma"]),
)
def test_a_bare_step_lowers_energy_by_half_its_squared_length_from_any_point(seed, L, gamma, kernel):
    chosen = Gaussian(gamma=gamma, split=3) if kernel == "gaussian-gamma" else KERNELS[kernel]
    cell, x = cell_of("dense", chosen, norm=math.sqrt(L), stretch=10.0, seed=seed), input_of("dense", seed=seed)
    with torch.no_grad():
        f = cell.bind(x)
        z = torch.relu(torch.randn(4, 5)) * 3
        energy, step = f.energy(z), f.descend(z, f.drive(z))
        drop = energy - f.energy(step)
        promised = 0.5 * (step - z).square().sum(1)
    assert (drop >= promised - 1e-9 * (1 + energy.abs())).all()


@examples
@given(
    seed=st.integers(0, 10**6),
    L=st.floats(0.1, 20.0),
    gamma=st.floats(0.01, 2.0),
    kernel=st.sampled_from(["gaussian", "multiquadric", "cauchy", "linear"]),
)
def test_an_averaged_step_lowers_energy_by_what_the_gap_of_its_features_promises(seed, L, gamma, kernel):
    """(1 − β) z + βf(z), β = 2 / (2 + L): by β²‖W(f(z) − z)‖² / 2‖W‖² at least, from any z ≥ 0."""
    chosen = KERNELS[kernel]
    chosen = chosen if kernel == "linear" else dataclasses.replace(chosen, gamma=gamma)
    cell, x = cell_of("dense", chosen, norm=math.sqrt(L), stretch=10.0, seed=seed), input_of("dense", seed=seed)
    with torch.no_grad():
        f = cell.bind(x)
        z = torch.relu(torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))) * 3
        beta, image = 2 / (2 + f.bound), f(z)
        drop = f.energy(z) - f.energy(torch.lerp(z, image, beta))
        torch.testing.assert_close(f.stretch, torch.linalg.matrix_norm(f.operator.weight, 2) ** 2)
        promised = 0.5 * beta**2 * f.operator(image - z).square().sum(1) / f.stretch
    assert (drop >= promised - 1e-9 * (1 + f.energy(z).abs())).all()


@examples
@given(seed=st.integers(0, 10**6), L=st.floats(1.01, 60.0), gamma=st.floats(0.01, 2.0), in_features=st.booleans())
def test_each_accepted_point_of_the_accelerated_descent_lies_lower_than_the_one_before(seed, L, gamma, in_features):
    """Driven by hand: accepted points fall, and the ceiling falls whether they are accepted or not."""
    cell, x = cell_of("dense", Gaussian(gamma=gamma), norm=math.sqrt(L), stretch=10.0, seed=seed), input_of("dense")
    solver = Proximal()
    with torch.no_grad():
        f = cell.bind(x)
        f = solver.space(f) if in_features else ProximalSpace(f, energy=True)
        at = f.start(None)
        memory, lowest = solver.init(f, at.z), torch.full((4,), torch.inf)
        for _ in range(30):
            ceiling, known = memory.guard.ceiling, memory.guard.accepted
            z, memory = solver.step(f, at, memory)
            accepted = memory.guard.accepted
            assert (at.energy.value[accepted] <= lowest[accepted] + at.energy.slack[accepted]).all()
            assert (memory.guard.ceiling <= ceiling).all()
            safe = ~accepted & ~known
            assert (memory.guard.ceiling[safe] < ceiling[safe]).all()  # an averaged step lowers it for certain
            lowest = torch.where(accepted, at.energy.value, lowest)
            at = f.evaluate(z)


def test_past_contraction_picard_fails_where_proximal_does_not():
    """40 random problems at L = 20 with γ = 0.02."""
    failed = {"picard": 0, "proximal": 0, "bare": 0}
    solvers = {"picard": Picard(), "proximal": Proximal(), "bare": Proximal(memory=0)}
    for seed in range(4):
        cell = cell_of("dense", Gaussian(gamma=0.02), norm=math.sqrt(20), stretch=10.0, seed=seed)
        x = 3 * input_of("dense", batch=10, seed=seed)
        with torch.no_grad():
            f = cell.bind(x)
            torch.testing.assert_close(f.bound, torch.tensor(20.0))
            for name, solver in solvers.items():
                s = kerneq.solve(f, cell.initial(f), solver, tol=1e-6, max_steps=600)
                failed[name] += int((~s.converged).sum())
    assert failed["proximal"] == 0 and failed["bare"] == 0
    assert failed["picard"] >= 10


def test_proximal_and_picard_have_the_same_fixed_points():
    cell, x = cell_of("conv", KERNELS["gaussian"]), input_of("conv")
    f = cell.bind(x)
    z = kerneq.solve(f, cell.initial(f), Proximal(), tol=1e-13, max_steps=200).value
    for alpha in (0.1, 0.5, 1.0, 1.7):
        stepped = f.prox(torch.lerp(z, f.drive(z), alpha), alpha)
        torch.testing.assert_close(stepped, z, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(f.descend(z, f.drive(z)), z, rtol=1e-10, atol=1e-10)


def test_acceleration_saves_evaluations_where_the_bare_step_is_short():
    cell = cell_of("dense", Gaussian(gamma=0.02), norm=math.sqrt(20), stretch=10.0)
    f = cell.bind(input_of("dense", batch=8))
    steps = {m: kerneq.solve(f, cell.initial(f), Proximal(memory=m), tol=1e-8, max_steps=3000).steps for m in (0, 5)}
    assert steps[5].float().mean() < 0.5 * steps[0].float().mean()


def test_proximal_asks_for_an_equation():
    with pytest.raises(TypeError, match="Proximal.*cell.bind.*Anderson"):
        kerneq.solve(torch.cos, torch.zeros(1, 2), Proximal())
