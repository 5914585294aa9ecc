"""Work on streams of its own gives what it gives one after another."""

import itertools

import torch
from helpers import needs_gpu

from kerneq.fused.device import run_on_streams
from kerneq.solution import Solution, Status


@needs_gpu
def test_every_function_meets_its_input_and_the_results_keep_their_order():
    def work(x):
        codes = torch.full((3,), Status.CONVERGED.code, device="cuda")
        return x @ x, Solution(x + 1, x.norm(dim=1), codes, codes, tol=1e-3)

    inputs = [torch.full((3, 3), float(i), device="cuda") for i in range(4)]
    for given in (inputs, (x.clone() for x in inputs)):  # all there, or made one by one
        results = run_on_streams([work] * 4, given)
        for x, (product, solution) in zip(inputs, results, strict=True):
            assert torch.equal(product, x @ x) and torch.equal(solution.value, x + 1) and solution.converged.all()


@needs_gpu
def test_gradients_come_back_through_inputs_that_are_made_one_by_one():
    """Slow work on every stream, so that a missing wait would show."""
    weight = torch.randn(2048, 2048, device="cuda", dtype=torch.float64) / 2048**0.5

    def work(x):
        for _ in range(4):
            x = torch.tanh(x @ weight)
        return x

    def chain(x):
        for _ in range(4):
            yield x
            x = work(x)

    found = []
    for overlap in (False, True):
        x = torch.linspace(-1, 1, 2048 * 64, device="cuda", dtype=torch.float64).view(64, 2048).requires_grad_()
        # A clone, as the stem's output is: PyTorch minds a leaf that is used on several streams.
        inputs = chain(x.clone())
        results = (
            run_on_streams([work] * 4, inputs) if overlap else [work(level) for level in itertools.islice(inputs, 4)]
        )
        (gradient,) = torch.autograd.grad(sum(results).square().sum(), x)
        found.append((*results, gradient))
    for plain, beside in zip(*found, strict=True):
        torch.testing.assert_close(beside, plain)
