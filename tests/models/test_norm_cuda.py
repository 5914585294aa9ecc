"""The batch norm on a card: against float64, and inside a CUDA graph."""

import copy

import pytest
import torch
from test_norm import passes, plain
from torch import nn

from kerneq.models.norm import BatchNorm

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="There is no CUDA card here.")


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)], ids=str)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", [(64, 256, 8, 8), (7, 24, 5, 9)], ids=str)
def test_on_the_card_it_agrees_with_float64(dtype, tol, relu, shape):
    torch.manual_seed(0)
    ours, theirs = BatchNorm(shape[1], relu).cuda(), plain(shape[1], relu).cuda().double()
    nn.init.normal_(ours.weight)
    theirs[0].weight.data.copy_(ours.weight)
    x, g = (torch.randn(shape, device="cuda").to(dtype) for _ in range(2))
    x = x.to(memory_format=torch.channels_last)
    with torch.autocast("cuda", torch.bfloat16):
        found = passes(ours, x, g)
    assert found[0].dtype == found[1].dtype == dtype and found[2].dtype == torch.float32
    assert found[0].grad_fn.name() == "_NormBackward"
    wanted = passes(theirs, x.double(), g.double())
    for a, b in zip([*found, *ours.buffers()], [*wanted, *theirs.buffers()], strict=True):
        assert torch.linalg.norm(a.double() - b) < tol * torch.linalg.norm(b.double())


def test_it_goes_into_a_cuda_graph():
    torch.manual_seed(0)
    norm = BatchNorm(32, relu=True).cuda()
    x = torch.randn(16, 32, 8, 8, device="cuda").to(memory_format=torch.channels_last).requires_grad_()
    step = copy.deepcopy(norm)
    torch.autograd.grad(step(x).sum(), x)  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (grad,) = torch.autograd.grad(norm(x).square().sum(), x)
    for _ in range(2):
        graph.replay()
    assert norm.num_batches_tracked == 2
    (wanted,) = torch.autograd.grad(step(x).square().sum(), x)
    torch.testing.assert_close(grad, wanted)
    torch.testing.assert_close(norm.running_mean, step.running_mean)
