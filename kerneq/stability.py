"""How strongly f moves with z: `jacobian_norm` to keep it small in training, `spectral_radius` to watch it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .maps import Function, run_eager
from .structure import Tree, pack_state
from .tensors import check_whole, magnitude, per_sample_dot, per_sample_norm, widened

TINY = 1e-6  # of ‖J‖: a Krylov space with no more than that left to add is complete


def jacobian_norm(f: Callable[..., Tree], z: Tree, *inputs: Any, samples: int = 1, batched: bool = True) -> Tensor:
    """Estimate ‖J‖²_F / n of each sample, (batch,), J = ∂f/∂z at z (batch, ...) and n the numbers in a state.

    z may be a structure of tensors, and `batched=False`, as for `fixed_point`.

    Add its mean, times a small weight, to a loss: solves converge faster where J is small (Bai et al., 2021). The
    gradients reach the parameters of f and its `inputs`, not what z was computed from. The estimate is Hutchinson's,
    the mean of ‖Jᵀv‖² / n over `samples` random vectors v of ±1, and unbiased. It costs one evaluation of f and a
    product with Jᵀ for each of them.

        loss = loss + 0.1 * kq.jacobian_norm(f, s.value, x).mean()
    """
    check_whole("samples", samples)
    z, image = _evaluate(f, z, inputs, batched)
    total = torch.zeros(len(z), dtype=widened(z[:0]).dtype, device=z.device)
    if not image.requires_grad:  # f depends on nothing
        return total
    for _ in range(samples):
        v = torch.empty_like(image).bernoulli_(0.5).mul_(2).sub_(1)
        (pulled,) = torch.autograd.grad(image, z, v, create_graph=True, materialize_grads=True)
        total = total + per_sample_dot(pulled, pulled)
    return total / (samples * z[0].numel())


def spectral_radius(f: Callable[..., Tree], z: Tree, *inputs: Any, steps: int = 12, batched: bool = True) -> Tensor:
    """Estimate the largest |λ| of J = ∂f/∂z at z (batch, ...) for each sample, (batch,), without a graph.

    Plain steps z ← f(z) converge near z where it is under 1, by that factor a step. `steps` products with Jᵀ span the
    Krylov space whose Ritz values are taken (Arnoldi's method): complex pairs, at which power iteration fails, are
    found too, and with as many steps as a state has numbers the result is exact but for rounding. Every sample must be
    treated on its own by f.
    """
    check_whole("steps", steps)
    with torch.enable_grad():
        z, image = _evaluate(f, z, inputs, batched)
    if not image.requires_grad:
        return torch.zeros(len(z), dtype=widened(z[:0]).dtype, device=z.device)
    steps = min(steps, z[0].numel())
    v = _unit(torch.randn_like(image))
    basis, square = [v], torch.zeros(len(z), steps, steps, dtype=widened(image[:0]).dtype, device=z.device)
    for step in range(steps):
        (w,) = torch.autograd.grad(image, z, basis[step], retain_graph=True, materialize_grads=True)
        w, length = widened(w), per_sample_norm(w)
        for _ in range(2):  # once more for what rounding has left
            for row, known in enumerate(basis):
                share = per_sample_dot(known, w)
                square[:, row, step] += share
                w = w - share.view(-1, *[1] * (w.dim() - 1)) * known
        if step + 1 == steps:
            break
        rest = per_sample_norm(w)
        rest = torch.where(rest > TINY * length, rest, 0.0)  # 0: the space is complete, and what follows is apart
        square[:, step + 1, step] = rest
        basis.append(_unit(w) * (rest > 0).view(-1, *[1] * (w.dim() - 1)))
    finite = square.isfinite().all(2).all(1)
    found = torch.linalg.eigvals(torch.where(finite.view(-1, 1, 1), square, 0.0).cpu()).abs().amax(1).to(z.device)
    return torch.where(finite, found, torch.nan)


def _evaluate(f: Callable[..., Tree], z: Tree, inputs: tuple[Any, ...], batched: bool) -> tuple[Tensor, Tensor]:
    """Return z as one tensor, a leaf, and f(z), with a graph between them."""
    g, start = pack_state(Function(f, inputs), z, batched, "joint")
    if not isinstance(start, Tensor) or start.dim() == 0 or len(start) == 0 or not start.is_floating_point():
        raise ValueError("`z` must be a floating-point tensor (batch, ...) with a sample at least.")
    start = start.detach().requires_grad_()
    with run_eager():
        image = g(start)
    if not isinstance(image, Tensor) or image.shape != start.shape:
        got = tuple(image.shape) if isinstance(image, Tensor) else type(image).__name__
        raise ValueError(f"f must keep the shape of z: it got {tuple(start.shape)} and gave {got}.")
    return start, image


def _unit(v: Tensor) -> Tensor:
    """Return each sample over its norm, or 0 where that is 0, in float32 at least."""
    v = widened(v) / magnitude(widened(v))
    return v / per_sample_norm(v).clamp_min(torch.finfo(v.dtype).tiny).view(-1, *[1] * (v.dim() - 1))
