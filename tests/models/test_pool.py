"""Pooling of our own: the same as PyTorch's, forward and backward."""

import os
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import avg_pool2d

from kerneq.models.parts import pyramid
from kerneq.models.pool import pool


@pytest.mark.parametrize("factor", [1, 2, 4])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_pooling_is_the_mean_of_squares_and_so_is_its_gradient(factor, layout):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 12, dtype=torch.float64).to(memory_format=layout).requires_grad_()
    torch.testing.assert_close(pool(x, factor), avg_pool2d(x, factor))
    assert torch.autograd.gradcheck(lambda x: pool(x, factor), x)
    assert torch.autograd.gradgradcheck(lambda x: pool(x, factor), x)


def test_a_pyramid_holds_every_scale_pooled_from_the_picture():
    x = torch.randn(2, 3, 16, 16)
    levels = pyramid(x, (8, 1, 4, 4, 2))
    assert set(levels) == {1, 2, 4, 8}
    for scale, level in levels.items():
        torch.testing.assert_close(level, avg_pool2d(x, scale))


def test_the_kernel_that_spreads_gradients_is_nearest_upsampling():
    pytest.importorskip("triton")
    code = (
        "import torch; from torch.nn.functional import interpolate; from kerneq.models.pool_triton import spread\n"
        "g = torch.randn(3, 24, 5, 7).to(memory_format=torch.channels_last)\n"
        "assert torch.equal(spread(g, 4), interpolate(g, scale_factor=4))"
    )
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
