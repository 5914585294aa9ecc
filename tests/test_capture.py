"""`kerneq.capture`: on a GPU the same answers from CUDA graphs; elsewhere the model itself."""

import dataclasses

import pytest
import torch
from helpers import needs_gpu
from torch import nn

import kerneq
from kerneq import equilibrium
from kerneq.kernels import Gaussian
from kerneq.lab.evaluate import TrainedRun
from kerneq.models import build
from kerneq.solvers import Newton


def layer_of(**settings) -> kerneq.Equilibrium:
    torch.manual_seed(0)
    cell = kerneq.cells.ConvCell(Gaussian(0.2), inputs=4, state=16, features=8)
    return kerneq.Equilibrium(cell, **settings).eval()


def test_on_a_cpu_it_is_the_model_itself():
    model, x = build("geq-tiny").eval(), torch.randn(2, 3, 32, 32)
    fast = kerneq.capture(model, x)
    with torch.no_grad():
        assert torch.equal(fast(x), model(x))
        logits, solutions = fast(x, solutions=True)
    assert torch.equal(logits, model(x)) and solutions.keys() == model(x, solutions=True)[1].keys()
    assert not fast.graphs and fast(x).requires_grad
    with pytest.raises(TypeError, match="must be a torch module, got function"):
        kerneq.capture(lambda x: x)


@needs_gpu
def test_a_captured_model_gives_the_same_logits_and_tells_the_truth_about_its_solves():
    model, x = build("geq-tiny").cuda().eval(), torch.randn(4, 3, 32, 32, device="cuda")
    with torch.no_grad():
        model(x)
        expected, found = model(x, solutions=True)
        fast = kerneq.capture(model)
        for _ in range(3):  # as it is, captured, replayed
            logits, solutions = fast(x, solutions=True)
            torch.testing.assert_close(logits, expected, rtol=1e-2, atol=1e-2)
            for name, solution in solutions.items():
                assert solution.converged.all() and (solution.residual <= solution.tol).all()
                assert solution.value.shape == found[name].value.shape
        assert [graph is not None for graph in fast.graphs.values()] == [True]
        other = torch.randn(4, 3, 32, 32, device="cuda")
        torch.testing.assert_close(fast(other, solutions=True)[0], model(other), rtol=1e-2, atol=1e-2)
        first = fast(x, solutions=True)[0].clone()
        fast(other, solutions=True)
        torch.testing.assert_close(fast(x, solutions=True)[0], first)  # nothing is left over from the call between


@needs_gpu
def test_a_layer_that_becomes_its_steps_is_captured_anew():
    model, x = build("geq-tiny").cuda().eval(), torch.randn(4, 3, 32, 32, device="cuda")
    fast = kerneq.capture(model, x)
    with torch.no_grad(), equilibrium.solving(model, gradient=kerneq.gradients.Unrolled(1)):
        for _ in range(3):
            torch.testing.assert_close(fast(x), model(x), rtol=1e-2, atol=1e-2)


@needs_gpu
def test_a_sample_that_needs_more_steps_than_the_graph_has_is_solved_all_the_same():
    layer = layer_of(tol=1e-5, max_steps=200).double().cuda()  # float32 convolutions, in TF32, do not reach 1e-5
    easy, hard = (scale * torch.randn(2, 4, 8, 8, device="cuda", dtype=torch.float64) for scale in (1e-4, 30))
    fast = kerneq.capture(layer, easy)
    with torch.no_grad():
        for _ in range(4):
            solution = fast(hard)
            assert solution.converged.all()
            torch.testing.assert_close(solution.value, layer(hard).value, rtol=1e-3, atol=1e-3)
            assert fast(easy).converged.all()


@needs_gpu
def test_weights_that_change_in_place_are_seen():
    layer, x = layer_of().cuda(), torch.randn(2, 4, 8, 8, device="cuda")
    fast = kerneq.capture(layer, x)
    with torch.no_grad():
        before = fast(x).value
        graphs = list(fast.graphs.values())
        for parameter in layer.parameters():
            parameter.mul_(0.5)
        after = fast(x).value
        assert list(fast.graphs.values()) == graphs != [None]  # by the same graph
        torch.testing.assert_close(after, layer(x).value, rtol=1e-3, atol=1e-4)
        assert not torch.allclose(before, after, rtol=1e-2)


@needs_gpu
def test_other_settings_and_those_who_watch_are_seen():
    layer, x = layer_of(tol=1e-6).cuda(), torch.randn(2, 4, 8, 8, device="cuda")
    fast, seen = kerneq.capture(layer, x), []
    with torch.no_grad():
        for _ in range(3):
            with equilibrium.solving(layer, max_steps=2):
                assert (fast(x).steps == 2).all()
            assert (fast(x).steps > 2).all()
        with equilibrium.hook_solves(layer, lambda layer, f, z: seen.append(z)):
            fast(x)
    assert len(seen) == 1


@needs_gpu
def test_evaluate_and_predict_get_the_same_from_graphs():
    trained = TrainedRun.open("geq-5m-cifar10", device="cuda")
    settings = dataclasses.replace(trained.config.training, batch_size=2)
    trained = dataclasses.replace(trained, config=dataclasses.replace(trained.config, training=settings))
    torch.manual_seed(0)
    pixels = torch.randint(256, (32, *trained.seen.shape), dtype=torch.uint8)
    images = dataclasses.replace(trained.seen, pixels=pixels, labels=torch.zeros(len(pixels), dtype=torch.int64))
    both = zip(trained.outputs(images), trained.outputs(images, captured=False), strict=True)
    for (x, _, logits, solutions), (same, _, expected, others) in both:
        assert torch.equal(x, same) and solutions.keys() == others.keys()
        assert (logits - expected).abs().mean() < 0.05 * expected.abs().mean()  # bfloat16, to a residual of `tol`
    assert any(trained.fast.graphs.values())


@needs_gpu
def test_under_autocast_in_inference_mode_and_in_training_it_still_works():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), layer_of(), kerneq.Value()).cuda().eval()
    x = torch.randn(2, 3, 8, 8, device="cuda")
    fast = kerneq.capture(model)
    for _ in range(3):
        with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
            assert torch.allclose(fast(x).float(), model(x).float(), rtol=0.1, atol=0.1)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x), rtol=1e-2, atol=1e-2)
    assert len(fast.graphs) == 2
    fast(x).sum().backward()  # with gradients: the model itself
    assert model[0].weight.grad is not None


@needs_gpu
def test_what_cannot_be_captured_runs_as_it_is_and_says_so():
    torch.manual_seed(0)
    cell = kerneq.cells.DenseCell(Gaussian(0.2), inputs=3, state=5, features=4)
    layer, x = kerneq.Equilibrium(cell, solver=Newton()).cuda().eval(), torch.randn(2, 3, device="cuda")
    with pytest.warns(RuntimeWarning, match="is not captured and runs as it is"):
        fast = kerneq.capture(layer, x)
    with torch.no_grad():
        assert fast(x).converged.all()


@needs_gpu
def test_the_default_layer_trains_in_a_cuda_graph():
    """No host look in the safeguards of `Proximal` and `Implicit`, below contraction and past it."""
    for norm in (1.0, 2.0):
        torch.manual_seed(0)
        cell = kerneq.cells.ConvCell(Gaussian(0.2), inputs=4, state=16, features=8, norm=norm)
        gradient = kerneq.gradients.Implicit(max_steps=20, check_every=20, on_failure="return")
        layer = kerneq.Equilibrium(cell, gradient=gradient, max_steps=20, check_every=20).cuda().train()
        x = torch.randn(2, 4, 8, 8, device="cuda")

        def step(layer=layer, x=x) -> torch.Tensor:
            layer.zero_grad(set_to_none=False)
            layer(x).value.square().sum().backward()
            return layer.cell.operator.weight.grad

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            grad = step()
        graph.replay()
        torch.cuda.synchronize()
        captured = grad.clone()
        torch.testing.assert_close(captured, step(), rtol=2e-2, atol=1e-3)
