"""The history of Anderson and Proximal: its weights, its storage order, and its Triton programs against float64."""

import dataclasses

import pytest
import torch
from helpers import needs_gpu
from history_comparison import compare_all
from interpreter import needs_triton, run_interpreted
from torch import Tensor

import kerneq
from kerneq.equation import Energy
from kerneq.maps import Point
from kerneq.solvers import Anderson, Broyden
from kerneq.solvers.anderson import EnergyGuard, GapGuard, History, anderson_weights, eliminate, inner_products
from kerneq.solvers.base import Evaluation


@needs_triton
def test_the_programs_interpreted_agree_with_float64_and_solve_as_the_plain_form_does():
    run_interpreted("interpreted_history.py")


@needs_triton
@needs_gpu
def test_the_programs_on_the_card_agree_with_float64():
    compare_all("cuda")


def history_of(gaps: Tensor, images: Tensor) -> History:
    """(m, batch, numbers), entered in order."""
    history = History.empty(images[0], len(images))
    for gap, image in zip(gaps, images, strict=True):
        history = dataclasses.replace(history, pushed=history.pushed + 1)
        history.enter(image, gap)
    return history


def test_the_weights_minimise_the_gap_of_the_mixture():
    torch.manual_seed(0)
    gaps, images = torch.randn(2, 4, 3, 20, dtype=torch.float64)
    alpha = anderson_weights(history_of(gaps, images).gram, newest=3, ridge=0.0)
    torch.testing.assert_close(alpha.sum(1), torch.ones(3, dtype=torch.float64))
    for sample in range(3):  # the same by least squares: eliminate α₀ = 1 − Σ αⱼ
        G = gaps[:, sample].T
        rest = torch.linalg.lstsq(G[:, 1:] - G[:, :1], -G[:, :1]).solution.flatten()
        torch.testing.assert_close(alpha[sample, 1:], rest)


def test_elimination_without_pivoting_solves_positive_definite_systems():
    torch.manual_seed(0)
    half, b = torch.randn(4, 6, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    A = half @ half.mT + 0.1 * torch.eye(6, dtype=torch.float64)
    torch.testing.assert_close(eliminate(A, b), torch.linalg.solve(A, b))


def guarded(z: Tensor, ceiling: Tensor | None) -> GapGuard | EnergyGuard:
    """β = 0.6; by the gap, which may not grow, or by the energy."""
    accepted, average, rate = torch.ones(len(z), dtype=torch.bool), torch.tensor(0.6), torch.tensor(0.5)
    if ceiling is None:
        return GapGuard(accepted, average.to(z), 2 * rate.to(z))
    return EnergyGuard(accepted, average.to(z), rate.to(z), 0.1, ceiling)


def test_where_the_gap_grows_a_sample_steps_from_the_point_before_and_accepts_that():
    torch.manual_seed(0)
    points = torch.randn(3, 2, 3, 8, dtype=torch.float64)
    points[1, 0, 1] = points[1, 1, 1] + 10  # a long gap
    history = History.empty(points[0, 0], 3, guard=guarded(points[0, 0], None))
    history = dataclasses.replace(history, guard=dataclasses.replace(history.guard, accepted=torch.zeros(3) > 0))
    _, history = history.extrapolate(Evaluation(*points[0], Point(points[0][0])), 1e-10)
    assert history.guard.accepted.all()
    mixture, history = history.extrapolate(Evaluation(*points[1], Point(points[1][0])), 1e-10)
    assert not history.guard.accepted[1]
    torch.testing.assert_close(mixture[1], torch.lerp(points[0, 0, 1], points[0, 1, 1], 0.6))
    _, history = history.extrapolate(Evaluation(*points[2], Point(points[2][0])), 1e-10)
    assert history.guard.accepted[1]


@pytest.mark.parametrize("relaxation", [None, 0.7])
def test_where_the_energy_is_too_high_a_sample_goes_back_to_the_last_image_and_on_by_averaged_steps(relaxation):
    torch.manual_seed(0)
    points = torch.randn(4, 2, 2, 8, dtype=torch.float64)
    beta = None if relaxation is None else torch.tensor(relaxation, dtype=torch.float64)
    ceiling = torch.full((2,), torch.inf, dtype=torch.float64)
    history = History.empty(points[0, 0], 3, beta, guarded(points[0, 0], ceiling))
    energies, none = torch.tensor([[5.0, 5.0], [4.0, 9.0], [3.0, 9.0], [-99.0, -99.0]]).double(), torch.zeros(2)
    found = []
    for (z, image), energy in zip(points, energies, strict=True):
        mixture, history = history.extrapolate(
            Evaluation(z, image, Point(z), energy=Energy(-energy, none, None, 16 * torch.finfo(z.dtype).eps)), 1e-10
        )
        found.append((mixture[1], history.guard.accepted.tolist(), float(history.guard.ceiling[1])))
    assert [accepted[1] for _, accepted, _ in found] == [True, False, False, True]
    torch.testing.assert_close(found[1][0], points[0, 1, 1])  # the last accepted image
    torch.testing.assert_close(found[2][0], torch.lerp(points[2, 0, 1], points[2, 1, 1], 0.6))
    fallen = 5 - 0.5 * float((points[2, 1, 1] - points[2, 0, 1]).square().sum())
    assert [ceiling for *_, ceiling in found] == pytest.approx([5, 5, fallen, -99])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_multiplied_and_summed_in_float32(dtype):
    torch.manual_seed(0)
    many, one = torch.randn(2, 3, 10_000).to(dtype), torch.randn(2, 10_000).to(dtype)
    exact = torch.einsum("bjn,bn->bj", many.double(), one.double())
    torch.testing.assert_close(inner_products(many, one).double(), exact, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("solver", [Anderson(), Broyden()], ids=str)
@pytest.mark.parametrize("turn", [0, 1, 2])
def test_the_storage_order_of_the_images_does_not_matter(solver, turn):
    """Channels-last images of a contiguous start, and even an order that changes on the way."""
    orders = [torch.contiguous_format, torch.channels_last]
    calls = 0

    def f(z: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        last = calls > 2 if turn == 2 else turn == 1
        return (torch.cos(z) * torch.linspace(0.2, 1, 60, dtype=z.dtype).view(3, 4, 5)).contiguous(
            memory_format=orders[last]
        )

    z0 = torch.linspace(0, 2, 120, dtype=torch.float64).view(2, 3, 4, 5)
    found = kerneq.solve(f, z0, solver, tol=1e-9, max_steps=40)
    expected = kerneq.solve(lambda z: f(z).contiguous(), z0, solver, tol=1e-9, max_steps=40)
    assert found.converged.all() and torch.equal(found.steps, expected.steps)
    torch.testing.assert_close(found.value, expected.value, rtol=1e-12, atol=1e-12)
