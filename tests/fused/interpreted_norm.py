"""The programs of the batch norm: values and gradients, the variance, the mask of the ReLU, second derivatives."""

import torch
from torch.nn.functional import batch_norm

from kerneq.fused.layers_triton import norm_backward, norm_forward
from kerneq.models.layers import BatchNorm, _Norm


def error(got, exact):
    return (torch.linalg.norm(got.double() - exact) / torch.linalg.norm(exact)).item()


@torch.no_grad()
def maps(shape, dtype, mean=0.0, relu=True):
    """Channels-last maps and a batch norm in the middle of its training."""
    x = (torch.randn(shape) + mean).to(dtype).to(memory_format=torch.channels_last)
    norm = BatchNorm(shape[1], relu)
    for values in (norm.weight, norm.bias, norm.running_mean):
        values.normal_()
    norm.running_var.uniform_(0.5, 1.5)
    norm.num_batches_tracked.fill_(3)
    return x, norm


def backward(g, x, stats, norm):
    return norm_backward(g, x, stats, norm.weight, norm.bias, norm.relu)


def agree_with_float64():
    for dtype, tol, shape, mean in [
        (torch.float32, 1e-6, (2, 64, 8, 8), 0.0),  # whole tiles, several a program
        (torch.float32, 1e-6, (3, 24, 5, 7), 3.0),  # missing pixels and channels
        (torch.float32, 1e-6, (3, 192, 3, 5), 1.0),  # three blocks of channels
        (torch.float32, 2e-4, (2, 16, 12, 12), 1000.0),  # the mean alone rounds to 3e-5
        (torch.bfloat16, 4e-3, (2, 32, 13, 13), 1.0),  # the interpreter cuts where cards round
        (torch.float16, 1e-3, (2, 256, 3, 3), 1.0),
    ]:
        for relu in (False, True) if mean == 0 else (True,):
            x, norm = maps(shape, dtype, mean, relu)
            g = torch.randn(shape).to(dtype).to(memory_format=torch.channels_last)
            leaves = [t.detach().double().requires_grad_() for t in (x, norm.weight, norm.bias)]
            wanted_state = [norm.running_mean.double(), norm.running_var.double()]
            y = batch_norm(leaves[0], *wanted_state, *leaves[1:], training=True)
            y = y.relu() if relu else y
            expected = [y, *torch.autograd.grad(y, leaves, g.double()), *wanted_state]
            out, stats = norm_forward(x, norm, norm.relu)
            got = [out, *backward(g, x, stats, norm), norm.running_mean, norm.running_var]
            errors = [error(a, b) for a, b in zip(got, expected, strict=True)]
            assert max(errors) < tol, (dtype, shape, relu, errors)
            assert norm.num_batches_tracked == 4
            assert out.stride() == got[1].stride() == x.stride() and out.dtype == got[1].dtype == dtype


def find_the_variance_beside_a_large_mean():
    for outlier in (False, True):
        x, norm = maps((2, 16, 12, 12), torch.float32, relu=False)
        x = x / 10 + 1000
        if outlier:
            x[0, :, 0, 0] = -5000  # the pixel that the first program shifts its sums by
        _, stats = norm_forward(x, norm, norm.relu)
        exact = x.double().var((0, 2, 3), unbiased=False).add(1e-5).rsqrt()
        assert ((stats[1] / exact - 1).abs() < 1e-4).all(), (outlier, stats[1] / exact - 1)
        assert ((stats[0] - x.double().mean((0, 2, 3))).abs() < 1e-3).all()


def mask_by_the_very_outputs():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x, norm = maps((2, 32, 9, 9), dtype)
        x.copy_(x.round())  # many values at the mean, so outputs at the edge of the ReLU
        with torch.no_grad():
            norm.bias.zero_()
            norm.weight[:8] = 1e-8  # which float16 rounds to zero
        y, stats = norm_forward(x, norm, norm.relu)
        _, _, passed = backward(torch.ones_like(x), x, stats, norm)
        assert torch.equal(passed, (y > 0).sum((0, 2, 3)).float()) and (y >= 0).all()
    x[1, 3, 4, 5] = torch.nan
    y, _ = norm_forward(x, norm, norm.relu)
    assert y[:, 3].isnan().all() and not y[:, 4].isnan().any()


def differentiate_twice():
    x, norm = maps((3, 8, 4, 4), torch.float32)
    g, h = torch.randn_like(x), torch.randn_like(x)
    leaves = [x.requires_grad_(), norm.weight, norm.bias]

    def second_order(y):
        first = torch.autograd.grad(y, leaves, g, create_graph=True)
        return [*first, *torch.autograd.grad(first[0], leaves[:2], h, retain_graph=True)]

    y = _Norm.apply(*leaves, norm)
    wanted = second_order(batch_norm(x, None, None, norm.weight, norm.bias, training=True).relu())
    for a, b in zip(second_order(y), wanted, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(torch.autograd.grad(y, leaves, g.contiguous()), wanted[:3], strict=True):  # g in another layout
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


torch.manual_seed(0)
agree_with_float64()
find_the_variance_beside_a_large_mean()
mask_by_the_very_outputs()
differentiate_twice()
