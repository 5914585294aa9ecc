"""The Triton programs of a `History` beside its plain form in float64, in the interpreter or on a card."""

import dataclasses
import unittest.mock

import torch

from kerneq.equation import Energy
from kerneq.maps import Point
from kerneq.solvers.anderson import EnergyGuard, GapGuard, History
from kerneq.solvers.base import Evaluation


def guard_of(kind, batch, dtype, device):
    """One that refuses about a third of the entries below."""
    if kind is None:
        return None
    average, rate = (torch.tensor(number, dtype=dtype, device=device) for number in (0.6, 0.9))
    accepted = torch.zeros(batch, dtype=torch.bool, device=device)
    if kind == "gap":
        return GapGuard(accepted, average, rate)
    return EnergyGuard(accepted, average, rate, 0.0, torch.full((batch,), torch.inf, dtype=dtype, device=device))


def compare(dtype, memory, numbers, relaxation, kind, alone, device):
    """Seven steps of the programs beside seven steps of the plain form, on the same rounded numbers."""
    from kerneq.fused import history_triton

    generator = torch.Generator(device).manual_seed(0)
    batch, ridge = 3, 1e-4
    z = torch.zeros(batch, numbers, dtype=dtype, device=device)
    beta = None if relaxation == 1 else torch.tensor(relaxation, device=device)
    got = History.empty(z, memory, beta, guard_of(kind, batch, torch.float32, device))
    exact = History.empty(z.double(), memory, beta, guard_of(kind, batch, torch.float64, device))
    worst, refused = 0.0, 0
    for step in range(7):
        z, image = torch.randn(2, batch, numbers, generator=generator, device=device).to(dtype)
        image = torch.where(torch.arange(batch, device=device)[:, None] == 1, image * 4.0**-step, image)
        z[1] *= 4.0**-step  # gaps of very different size
        if step == 2:
            image[2] = z[2]  # a gap of zero
        similarity, length, penalty = torch.rand(3, batch, generator=generator, device=device)
        energy = Energy(similarity + 0.1 * step, length, penalty if memory == 5 else None, 16 * torch.finfo(dtype).eps)
        at = Evaluation(z, image, Point(z), energy=energy)
        got, exact = (dataclasses.replace(history, pushed=step + 1) for history in (got, exact))
        inputs = None if got.guard is None else got.guard.program_inputs(at)
        with unittest.mock.patch.object(history_triton, "SMALL", numbers if alone else 0):
            mixture, *decided = history_triton.extrapolate(got, z, image, ridge, inputs)
        guard = None if got.guard is None else got.guard.after(*decided)
        entry, gap = (stored[:, got.newest].double() for stored in (got.images, got.gaps))
        rounding = {"rtol": torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}  # the interpreter truncates
        torch.testing.assert_close(entry, torch.lerp(z.double(), image.double(), relaxation), **rounding)
        torch.testing.assert_close(gap, image.double() - z.double(), **rounding)
        exact.enter(entry, gap)
        expected, exact_guard = exact.propose(ridge, at)
        if kind is not None:
            assert torch.equal(guard.accepted, exact_guard.accepted), step
            refused += int((~guard.accepted).sum())
        if kind == "energy":
            torch.testing.assert_close(guard.ceiling.double(), exact_guard.ceiling, rtol=1e-5, atol=1e-3)
        got, exact = dataclasses.replace(got, guard=guard), dataclasses.replace(exact, guard=exact_guard)
        torch.testing.assert_close(got.gram.double(), exact.gram, rtol=1e-5, atol=1e-5 * float(exact.gram.max()))
        assert mixture.dtype == dtype
        error = torch.linalg.norm(mixture.double() - expected, dim=1) / torch.linalg.norm(expected, dim=1)
        worst = max(worst, float(error.max()))
    assert kind is None or refused > 2
    return worst


CASES = [
    (torch.float32, 5, 100, 0.7, "energy", True),
    (torch.float32, 5, 1500, 1.0, "gap", False),
    (torch.float32, 3, 600, 0.7, None, False),
    (torch.float32, 1, 17, 1.0, None, True),
    (torch.float32, 16, 300, 1.0, "energy", False),
    (torch.bfloat16, 5, 1100, 0.7, "energy", False),
    (torch.float16, 2, 300, 0.5, None, True),
    (torch.float32, 4, 100, 1.0, "gap", True),
]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def compare_all(device):
    for dtype, *case in CASES:
        worst = compare(dtype, *case, device)
        assert worst < TOLERANCE[dtype], (dtype, case, worst)
