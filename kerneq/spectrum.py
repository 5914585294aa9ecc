"""The largest singular value of a linear operator given only by its action."""

from collections.abc import Callable

import torch
from torch import Tensor

Linear = Callable[[Tensor], Tensor]


def top_singular_vector(apply: Linear, adjoint: Linear, start: Tensor, steps: int, lanczos: bool) -> Tensor:
    """A unit vector u with ‖A u‖ close to ‖A‖, from `start`, by `steps` products with AᵀA.

    Power iteration needs no small eigenproblem, so nothing waits for the device; Lanczos takes the best vector of
    the whole Krylov space and is far ahead of it where singular values crowd, as they do for convolutions.
    """

    def gram(u: Tensor) -> Tensor:
        return adjoint(apply(u.unsqueeze(0))).squeeze(0)

    u = _unit(start)
    if not lanczos:
        for _ in range(steps):
            new = gram(u)
            u = torch.where(new.any(), _unit(new), u)  # a zero operator has no direction to offer
        return u
    basis = [u.flatten()]
    images: list[Tensor] = []
    for _ in range(min(steps, u.numel())):
        w = gram(basis[-1].view_as(u)).flatten()
        images.append(w)
        stacked = torch.stack(basis)
        for _ in range(2):  # twice is enough: full reorthogonalisation keeps the basis exact
            w = w - stacked.mT @ (stacked @ w)
        length = torch.linalg.vector_norm(w)
        if len(images) == steps or not bool(length > 1e-6 * torch.linalg.vector_norm(images[0])):
            break
        basis.append(w / length)
    stacked = torch.stack(basis[: len(images)])
    small = stacked @ torch.stack(images).mT
    vectors = torch.linalg.eigh((small + small.mT) / 2).eigenvectors
    return _unit((vectors[:, -1] @ stacked).view_as(u))


def _unit(u: Tensor) -> Tensor:
    return u / torch.linalg.vector_norm(u).clamp_min(torch.finfo(u.dtype).tiny)
