"""The programs of the history against float64, and solves with them beside solves without."""

import torch
from history_comparison import compare_all

import kerneq
from kerneq.cells import ConvCell
from kerneq.kernels import Gaussian
from kerneq.solvers import Anderson, Proximal
from kerneq.solvers.anderson import History

compare_all("cpu")

torch.manual_seed(0)
cell = ConvCell(Gaussian(gamma=0.5, patch=2, split=2, hidden=6), inputs=2, state=3, features=4, norm=1.6).eval()
x = torch.randn(2, 2, 4, 6).to(memory_format=torch.channels_last)
with torch.no_grad():
    f = cell.bind(x)
    for solver in (Anderson(3, relaxation=0.8), Proximal()):
        found = []
        for on in (False, True):
            History.on_triton = on
            found.append(kerneq.solve(f, None, solver, tol=1e-5, max_steps=60))
        plain, fused = found
        assert plain.converged.all() and fused.converged.all()
        assert int((plain.steps - fused.steps).abs().max()) <= 1, (plain.steps, fused.steps)
        torch.testing.assert_close(plain.value, fused.value, rtol=1e-3, atol=1e-4)
