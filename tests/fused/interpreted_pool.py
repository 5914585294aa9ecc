"""The programs of pooling against PyTorch's."""

from unittest import mock

import torch
from torch.nn.functional import avg_pool2d, interpolate

from kerneq.fused.layers_triton import gather_pixels, spread_pixels
from kerneq.models import layers
from kerneq.tensors import is_channels_last


def last(*shape):
    return torch.randn(*shape).to(memory_format=torch.channels_last)


torch.manual_seed(0)
g, base = last(2, 24, 3, 2), last(2, 24, 12, 8)
torch.testing.assert_close(spread_pixels(g, 4, 0.5), interpolate(g, scale_factor=4) / 2)
torch.testing.assert_close(spread_pixels(g, 4, 0.5, base), base + interpolate(g, scale_factor=4) / 2)
torch.testing.assert_close(gather_pixels(base, 2, 0.25), avg_pool2d(base, 2))

# A second derivative through one level, where the gradient of another is a constant.
x, weight = last(1, 16, 4, 4).requires_grad_(), last(1, 16, 2, 2)
with mock.patch.object(layers, "_has_programs", is_channels_last):
    levels = layers.pyramid(x, (2,))
    (first,) = torch.autograd.grad((levels[1] ** 3).sum() + (levels[2] * weight).sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), x)[0], 6 * x.detach())
