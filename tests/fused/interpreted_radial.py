"""The programs of the patch step against float64, for every formula."""

import torch
from formulas import Cauchy, Gaussian, Multiquadric, Tangent

from kerneq.fused import radial_triton
from kerneq.fused.radial import plain_pullback, plain_step


def error(got, exact):
    return (torch.linalg.norm(got.double() - exact) / torch.linalg.norm(exact)).item()


torch.manual_seed(0)
for formula, dtype, tol, last, split, patch, shape, with_v in [
    (Gaussian, torch.float32, 1e-6, True, 8, 2, (3, 32, 8, 8), True),
    (Gaussian, torch.float16, 2e-3, True, 8, 2, (2, 80, 4, 4), True),
    (Cauchy, torch.float32, 1e-6, True, 4, 4, (2, 12, 8, 12), True),  # 18 patches: a masked tile
    (Cauchy, torch.float32, 1e-6, False, 4, 4, (2, 8, 8, 8), False),
    (Multiquadric, torch.float32, 1e-6, False, 8, 2, (2, 24, 4, 8), True),
    (Multiquadric, torch.float32, 1e-6, True, 16, 1, (2, 32, 3, 3), True),
]:
    n = split * patch * patch
    form = torch.channels_last if last else torch.contiguous_format
    a, v, u = (torch.randn(shape).to(dtype).to(memory_format=form) for _ in range(3))
    v = v if with_v else None
    half = torch.randn(n, n) / n
    Q, gamma, tau = half @ half.T + 0.3 * torch.eye(n), torch.tensor(0.05), torch.randn(shape[0])
    wanted = [True, with_v, True, True]
    exact = [None if x is None else x.double() for x in (u, tau, a, v, Q, gamma)]
    expected = plain_step(formula, *exact[2:], split, patch, True)
    expected += plain_pullback(formula, *exact, split, patch, wanted)
    got = radial_triton.forward(formula, a, v, Q, gamma, split, patch, True)
    got += radial_triton.backward(formula, u, tau, a, v, Q, gamma, split, patch, wanted)
    errors = [error(x, y) for x, y in zip(got, expected, strict=True) if y is not None]
    assert len(errors) == 5 + with_v and max(errors) < tol, (formula, dtype, last, split, patch, errors)
    assert got[0].stride() == a.stride() and got[0].dtype == dtype
    m, nothing = radial_triton.forward(formula, a, v, Q, gamma, split, patch, False)
    assert torch.equal(m, got[0]) and nothing.numel() == 0
assert radial_triton.programs(Tangent) is None
for formula in (Gaussian, Multiquadric, Cauchy):
    assert radial_triton.programs(formula) is not None  # plain PyTorch would be slow
print("done")
