"""Work on streams of its own gives what it gives one after another."""

import pytest
import torch

from kerneq.fused.device import run_on_streams
from kerneq.solution import Solution, Status

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("overlap", [False, True])
def test_every_function_meets_its_input_and_the_results_keep_their_order(device, overlap):
    def work(x):
        codes = torch.full((3,), Status.CONVERGED.code, device=device)
        return x @ x, Solution(x + 1, x.norm(dim=1), codes, codes, tol=1e-3)

    inputs = [torch.full((3, 3), float(i), device=device) for i in range(4)]
    results = run_on_streams([work] * 4, inputs, overlap)
    for x, (product, solution) in zip(inputs, results, strict=True):
        assert torch.equal(product, x @ x) and torch.equal(solution.value, x + 1) and solution.converged.all()
