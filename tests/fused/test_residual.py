"""The residual: one definition, in one pass over memory on a card."""

import pytest
import torch
from helpers import DEVICES
from interpreter import needs_triton, run_interpreted

from kerneq.solvers.base import relative_residual


@pytest.mark.parametrize("device", DEVICES)
def test_the_residual_is_relative_to_the_image_and_finite_where_that_is_zero(device):
    z, image = torch.tensor([[[3.0, 4.0], [0.0, 0.0], [3.0, 4.0]], [[0.0, 8.0], [0.0, 0.0], [0.0, 0.0]]], device=device)
    residual, gap = relative_residual(z, image)
    torch.testing.assert_close(gap.cpu(), torch.tensor([5.0, 0.0, 5.0]))
    torch.testing.assert_close(residual[:2].cpu(), torch.tensor([0.625, 0.0]))
    assert residual[2].isfinite() and residual[2] > 1e6


@pytest.mark.parametrize("device", DEVICES)
def test_the_residual_is_infinite_where_the_image_is_too_long_to_be_squared(device):
    z, image = torch.tensor([[[1.0e19, 0.0]], [[1.9e19, 0.0]]], device=device)
    residual, gap = relative_residual(z, image)
    assert residual.isinf().all() and gap.isfinite().all()


@needs_triton
def test_the_residual_in_one_pass_is_the_residual():
    run_interpreted("interpreted_residual.py")
