"""The Triton programs of a `History` beside its plain form in float64, in the interpreter or on a card."""

import dataclasses
import unittest.mock

import torch

from kerneq.fused.iterates import History


def compare(dtype, memory, numbers, relaxation, masked, alone, device):
    """Seven steps of the programs beside seven steps of the plain form, on the same rounded numbers."""
    from kerneq.fused import iterates_triton

    generator = torch.Generator(device).manual_seed(0)
    batch, ridge = 3, 1e-4
    z = torch.zeros(batch, numbers, dtype=dtype, device=device)
    beta = None if relaxation == 1 else torch.tensor(relaxation, device=device)
    got, exact = History.empty(z, memory, beta), History.empty(z.double(), memory)
    average = torch.tensor(0.6, device=device) if masked and alone else None
    worst = 0.0
    for step in range(7):
        z, image = torch.randn(2, batch, numbers, generator=generator, device=device).to(dtype)
        image = torch.where(torch.arange(batch, device=device)[:, None] == 1, image * 4.0**-step, image)
        z[1] *= 4.0**-step  # gaps of very different size
        if step == 2:
            image[2] = z[2]  # a gap of zero
        accepted = torch.rand(batch, generator=generator, device=device) < 0.7 if masked else None
        got, exact = (dataclasses.replace(history, pushed=step + 1) for history in (got, exact))
        with unittest.mock.patch.object(iterates_triton, "SMALL", numbers if alone else 0):
            mixture = iterates_triton.extrapolate(got, z, image, ridge, accepted, average)
        entry, gap = (stored[:, got.newest].double() for stored in (got.images, got.gaps))
        rounding = {"rtol": torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}  # the interpreter truncates
        torch.testing.assert_close(entry, torch.lerp(z.double(), image.double(), relaxation), **rounding)
        torch.testing.assert_close(gap, image.double() - z.double(), **rounding)
        exact.enter(entry, gap, accepted)
        expected = exact.proposal(ridge, accepted, average)
        assert torch.equal(got.valid, exact.valid)
        torch.testing.assert_close(got.gram.double(), exact.gram, rtol=1e-5, atol=1e-5 * float(exact.gram.max()))
        assert mixture.dtype == dtype
        error = torch.linalg.norm(mixture.double() - expected, dim=1) / torch.linalg.norm(expected, dim=1)
        worst = max(worst, float(error.max()))
    return worst


CASES = [
    (torch.float32, 5, 100, 0.7, True, True),
    (torch.float32, 5, 1500, 1.0, True, False),
    (torch.float32, 3, 600, 0.7, False, False),
    (torch.float32, 1, 17, 1.0, False, True),
    (torch.float32, 16, 300, 1.0, True, False),
    (torch.bfloat16, 5, 2100, 1.0, True, False),
    (torch.float16, 2, 300, 0.5, False, True),
]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def compare_all(device):
    for dtype, *case in CASES:
        worst = compare(dtype, *case, device)
        assert worst < TOLERANCE[dtype], (dtype, case, worst)
