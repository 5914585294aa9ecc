"""The programs of pooling against PyTorch's."""

import torch
from torch.nn.functional import avg_pool2d, interpolate

from kerneq.fused.layers_triton import gather, spread


def last(*shape):
    return torch.randn(*shape).to(memory_format=torch.channels_last)


torch.manual_seed(0)
g, base = last(2, 24, 3, 2), last(2, 24, 12, 8)
torch.testing.assert_close(spread(g, 4, 0.5), interpolate(g, scale_factor=4) / 2)
torch.testing.assert_close(spread(g, 4, 0.5, base), base + interpolate(g, scale_factor=4) / 2)
torch.testing.assert_close(gather(base, 2, 0.25), avg_pool2d(base, 2))
