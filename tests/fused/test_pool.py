"""Pooling of our own: the same as PyTorch's, forward and backward."""

import pytest
import torch
from interpreter import needs_triton, run_interpreted
from torch.nn.functional import avg_pool2d, interpolate

from kerneq.models.layers import pool, pyramid, unpool


@pytest.mark.parametrize("factor", [1, 2, 4])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_pooling_is_the_mean_of_squares_and_so_is_its_gradient(factor, layout):
    torch.manual_seed(0)
    x = torch.randn(2, 2, 4, 8, dtype=torch.float64).to(memory_format=layout).requires_grad_()
    torch.testing.assert_close(pool(x, factor), avg_pool2d(x, factor))
    assert torch.autograd.gradcheck(lambda x: pool(x, factor), x)
    assert torch.autograd.gradgradcheck(lambda x: pool(x, factor), x)


def test_a_pyramid_holds_every_scale_pooled_from_the_picture():
    x = torch.randn(2, 3, 16, 16)
    levels = pyramid(x, (8, 1, 4, 4, 2))
    assert set(levels) == {1, 2, 4, 8}
    for scale, level in levels.items():
        torch.testing.assert_close(level, avg_pool2d(x, scale))


def test_the_gradients_of_a_pyramid_are_those_of_pooling_level_by_level():
    torch.manual_seed(0)
    x = torch.randn(1, 2, 6, 12, dtype=torch.float64, requires_grad=True)

    def levels(x):
        return tuple(pyramid(x, (2, 3, 6)).values())

    assert torch.autograd.gradcheck(levels, x)
    assert torch.autograd.gradgradcheck(levels, x)
    only_one = torch.autograd.grad(levels(x)[2].sum(), x)[0]
    torch.testing.assert_close(only_one, torch.full_like(x, 1 / 9))


def test_unpooling_is_nearest_upsampling_and_pooling_undoes_it():
    torch.manual_seed(0)
    x = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(unpool(x, 2), interpolate(x, scale_factor=2))
    torch.testing.assert_close(pool(unpool(x, 3), 3), x)
    assert torch.autograd.gradcheck(lambda x: unpool(x, 2), x)
    assert torch.autograd.gradgradcheck(lambda x: unpool(x, 2), x)


@needs_triton
def test_the_programs_are_pooling_and_nearest_upsampling():
    run_interpreted("interpreted_pool.py")
