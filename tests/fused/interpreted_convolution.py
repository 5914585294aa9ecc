"""The program of the convolution against PyTorch's."""

import torch
from torch.nn.functional import conv2d, conv_transpose2d

from kerneq.fused.convolution_triton import product


def last(*shape):
    return torch.randn(*shape).to(memory_format=torch.channels_last)


def same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


torch.manual_seed(0)
for batch, side in ((1, 16), (3, 8), (9, 4)):
    w = last(64, 128, 3, 3)
    v, z, g = last(batch, 64, side, side), last(batch, 128, side, side), last(batch, 128, side, side)
    exact = conv_transpose2d(v, w, padding=1)
    same(product(v, w, True, None, z), torch.where(z > 0, exact, 0.0))
    same(product(v, w, True, g, z), torch.where(z > 0, g + exact, 0.0))
    w = last(128, 64, 3, 3)
    same(product(v, w, False, None, None), conv2d(v, w, padding=1))
    same(product(v, w, False, g, None), g + conv2d(v, w, padding=1))
