"""The residual in one pass against its definition."""

import torch

from kerneq.fused.history_triton import residual_and_gap

torch.manual_seed(0)
for shape in ((3, 7), (2, 5, 60, 70), (1, 100_000)):
    z, f = torch.randn(shape), torch.randn(shape)
    residual, gap = residual_and_gap(z, f)
    exact = (f - z).double().flatten(1).norm(dim=1)
    torch.testing.assert_close(gap.double(), exact, rtol=1e-5, atol=0)
    torch.testing.assert_close(residual.double(), exact / f.double().flatten(1).norm(dim=1), rtol=1e-5, atol=0)
nothing = torch.zeros(2, 9)
residual, gap = residual_and_gap(torch.ones(2, 9), nothing)
assert residual.isfinite().all() and (residual > 1e6).all() and torch.equal(gap, torch.full((2,), 3.0))
assert residual_and_gap(nothing, nothing)[0].eq(0).all()
assert residual_and_gap(nothing, nothing + torch.nan)[0].isnan().all()
assert residual_and_gap(nothing + 3e18, nothing + 8e18)[0].isinf().all()  # ‖f(z)‖² overflows, ‖f(z) − z‖² does not
