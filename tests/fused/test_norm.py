"""Batch norm of our own: PyTorch's, with the ReLU in the same pass on a card."""

import copy

import pytest
import torch
from helpers import needs_gpu
from interpreter import needs_triton, run_interpreted
from torch import Tensor, nn

from kerneq.fused.device import pull_back
from kerneq.models.layers import BatchNorm, synchronise_norms


@needs_triton
def test_the_programs_interpreted_agree_with_float64():
    run_interpreted("interpreted_norm.py")


def plain(channels: int, relu: bool) -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU() if relu else nn.Identity())


def passes(model: nn.Module, x: Tensor, g: Tensor) -> list[Tensor]:
    """Output and gradients in training, twice, then the output in evaluation."""
    found = []
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        found += [y, *torch.autograd.grad(y, [leaf, *model.parameters()], g)]
    return [*found, model.eval()(x)]


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_without_a_card_it_is_the_batch_norm_of_pytorch(relu, layout):
    torch.manual_seed(0)
    x, g = torch.randn(4, 6, 5, 5).to(memory_format=layout), torch.randn(4, 6, 5, 5)
    ours, theirs = BatchNorm(6, relu), plain(6, relu)
    kept = x.clone()
    for a, b in zip(passes(ours, x, g), passes(theirs, x, g), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(x, kept), "the input is not written to"
    for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
        assert torch.equal(a, b)


def test_states_pass_between_it_and_the_batch_norm_of_pytorch():
    torch.manual_seed(0)
    ours, theirs = BatchNorm(6, relu=True), nn.BatchNorm2d(6)
    nn.init.normal_(ours.weight)
    ours(torch.randn(4, 6, 5, 5))
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(4, 6, 5, 5)
    assert torch.equal(ours.eval()(x), theirs.eval()(x).relu())
    theirs.train()(x)
    ours.load_state_dict(theirs.state_dict())
    assert ours.num_batches_tracked == 2 and torch.equal(ours.running_var, theirs.running_var)
    assert "relu=True" in repr(ours)


def test_one_value_a_channel_is_refused_as_by_pytorch():
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        BatchNorm(6, relu=True)(torch.randn(1, 6, 1, 1))


@pytest.mark.parametrize("relu", [False, True])
def test_the_gradient_with_a_graph_has_the_right_derivative(relu):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    g = torch.randn(2, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    plain = BatchNorm(3, relu).plain
    assert torch.autograd.gradcheck(lambda g, *t: pull_back(plain, t, (g,)), (g, x, weight, bias))


def test_norms_over_all_processes_keep_their_relus():
    torch.manual_seed(0)
    model = nn.Sequential(BatchNorm(4, relu=True), nn.Conv2d(4, 4, 1), BatchNorm(4))
    x = torch.randn(3, 4, 5, 5)
    model(x)
    model.eval()
    wanted = model(x)
    found = synchronise_norms(model)
    assert [type(found[0]), type(found[2])] == [nn.SyncBatchNorm] * 2
    assert torch.equal(found(x), wanted)


@needs_gpu
@needs_triton
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


@needs_gpu
@needs_triton
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
