"""What tests share: devices, every solver, kernel, cell and gradient, problems with exact answers, runs of an epoch."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import settings
from torch import Tensor

from kerneq import kernels
from kerneq.cells import AbstractKernelCell, ConvCell, DenseCell
from kerneq.gradients import ConjugateGradient, Implicit, InFeatures, Phantom, Unrolled
from kerneq.kernels import (
    AbstractInnerKernel,
    AbstractRadialKernel,
    Adaptive,
    Cauchy,
    Gaussian,
    Linear,
    Multiquadric,
    Polynomial,
    Sigmoid,
    Squared,
)
from kerneq.lab.run.config import parse
from kerneq.lab.training import train
from kerneq.maps import AbstractMap
from kerneq.solvers import Anderson, Broyden, Picard, Proximal, solve

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="There is no CUDA card here.")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
examples = settings(max_examples=25, deadline=None, derandomize=True, database=None)

SOLVERS = {
    "picard": Picard(),
    "picard-relaxed": Picard(relaxation=0.7),
    "proximal": Proximal(),
    "proximal-bare": Proximal(memory=0),
    "anderson": Anderson(),
    "broyden": Broyden(),
}
PLAIN_SOLVERS = {name: solver for name, solver in SOLVERS.items() if not isinstance(solver, Proximal)}
# Whatever `kerneq.kernels` exports is tested: a new kernel needs no line here.
RADIAL = {
    name.lower(): kernel(gamma=0.5, patch=2, split=2, hidden=6)
    for name, kernel in vars(kernels).items()
    if isinstance(kernel, type) and issubclass(kernel, AbstractRadialKernel) and not name.startswith("Abstract")
}
KERNELS = {
    "linear": Linear(),
    "quadratic": Polynomial(degree=2, offset=1.0),
    "quadratic-published": Polynomial(degree=2, offset=0.0),
    "cubic": Polynomial(degree=3, offset=0.5),
    "sigmoid": Sigmoid(),
    "squared": Squared(),
    **RADIAL,
    "gaussian-adaptive": Gaussian(gamma=Adaptive(0.2), patch=2, split=2, hidden=10),
}
CELLS = ("dense", "conv")
GRADIENTS = {
    "conjugate-gradient": Implicit(solver=ConjugateGradient(), tol=1e-13, max_steps=500),
    "in-features": Implicit(solver=InFeatures(), tol=1e-12, max_steps=500),
    "picard": Implicit(solver=Picard(), tol=1e-13, max_steps=500),
    "anderson": Implicit(solver=Anderson(), tol=1e-12, max_steps=500),
    "broyden": Implicit(solver=Broyden(), tol=1e-12, max_steps=500),
    "phantom": Phantom(steps=300, relaxation=1.0),
    "unrolled": Unrolled(steps=300),
}


def cell_of(form: str, kernel, *, norm: float = 0.9, stretch: float = 3.0, seed: int = 0, **more) -> AbstractKernelCell:
    """A small cell whose raw weights are long enough for the norm bound to bite."""
    torch.manual_seed(seed)
    sizes = {"inputs": 3, "state": 5, "features": 6} if form == "dense" else {"inputs": 2, "state": 3, "features": 4}
    cell = (DenseCell if form == "dense" else ConvCell)(kernel, norm=norm, **sizes, **more)
    with torch.no_grad():
        cell.operator.weight.mul_(stretch)
    return cell


def input_of(form: str, batch: int = 4, seed: int = 1) -> Tensor:
    shape = (batch, 3) if form == "dense" else (batch, 2, 4, 4)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        torch.get_default_dtype()
    )


def away_from_kinks(cell: AbstractKernelCell, form: str, batch: int = 2, margin: float = 2e-4) -> Tensor:
    """An input at whose equilibrium no entry of the drive is within `margin` of ReLU's kink."""
    for seed in range(100):
        x = input_of(form, batch, seed)
        with torch.no_grad():
            f = cell.bind(x)
            drive = f.drive(solve(f, None, Proximal(), tol=1e-9, max_steps=1000).value)
        if drive.abs().min() > margin:
            return x
    raise AssertionError("no such input")


def dense_matrix(apply, shape: tuple[int, ...]) -> Tensor:
    """A linear map as a matrix, one basis vector at a time."""
    basis = torch.eye(math.prod(shape)).view(-1, *shape)
    return torch.stack([apply(e.unsqueeze(0)).flatten() for e in basis], dim=1)


def operator_matrix(cell: AbstractKernelCell, x: Tensor) -> Tensor:
    """W before it is held to its bound."""
    weight = cell.operator.weight.detach()
    if weight.dim() == 2:
        return weight
    pad = weight.shape[-1] // 2
    return dense_matrix(lambda z: F.conv2d(z, weight, padding=pad), (weight.shape[1], *x.shape[-2:]))


def patches(r: Tensor, split: int, p: int) -> Tensor:
    """Cut with explicit loops: (batch, patches, numbers)."""
    if r.dim() == 2:
        return r.view(len(r), -1, split)
    _, c, h, w = r.shape
    cut = [
        r[:, k : k + split, i : i + p, j : j + p].flatten(1)
        for k in range(0, c, split)
        for i in range(0, h, p)
        for j in range(0, w, p)
    ]
    return torch.stack(cut, dim=1)


class Reference:
    """The hidden problem written from the formulas of docs/theory.md: S(z), L and E, sharing no code with kerneq's."""

    def __init__(self, cell: AbstractKernelCell, x: Tensor):
        self.cell, self.x = cell, x
        U, b = cell.inject.weight.detach(), cell.inject.bias.detach()
        self.a = F.linear(x, U, b) if x.dim() == 2 else F.conv2d(x, U, b, padding=U.shape[-1] // 2)
        W = operator_matrix(cell, x)
        self.radial = isinstance(cell.kernel, AbstractRadialKernel)
        self.gain, self.curvature = 1.0, 0.0
        limit = cell.norm
        if self.radial:
            self.W_h = cell.similarity.project.weight.detach().mT
            self.gamma = cell.similarity.width(x).detach()
            self.gain = torch.linalg.matrix_norm(self.W_h, 2)
        elif isinstance(kernel := cell.kernel, AbstractInnerKernel) and not isinstance(kernel, Linear):
            limit = cell.norm * math.sqrt(kernel.operator_share)
            longest = kernel.max_length(cell.norm)
            size = self.a.flatten(1).norm(dim=1).view(-1, *[1] * (self.a.dim() - 1))
            self.a = self.a * longest / size.clamp(min=1.25 * math.sqrt(self.a[0].numel()))
            self.curvature = kernel.curvature * longest**2
        self.W = W * (limit / (torch.linalg.matrix_norm(W, 2) * self.gain)).clamp(max=1)
        self.L = (torch.linalg.matrix_norm(self.W, 2) * self.gain) ** 2 + self.curvature
        self.state = (len(x), W.shape[1]) if x.dim() == 2 else (len(x), cell.operator.weight.shape[1], *x.shape[-2:])

    def similarity(self, z: Tensor) -> Tensor:
        v = z.flatten(1) @ self.W.mT
        if self.radial:
            r = self.a - v.view_as(self.a)
            part = self.cell.similarity
            t = (patches(r, part.split, part.patch) @ self.W_h).square().sum(-1)
            return self.heights(t).sum(1)
        kernel = self.cell.kernel
        if isinstance(kernel, Squared):
            return -0.5 * (self.a.flatten(1) - v).square().sum(1)
        t = (self.a * z).flatten(1).sum(1)
        if isinstance(kernel, Polynomial):
            t = (t + kernel.offset) ** kernel.degree
        elif isinstance(kernel, Sigmoid):
            t = torch.where(t > 0, t.tanh(), t)
        return t + 0.5 * v.square().sum(1)

    def heights(self, t: Tensor) -> Tensor:
        """H(t): minus half of the integral of the weight w."""
        gamma = self.gamma
        match self.cell.kernel:
            case Gaussian():
                return (-gamma * t).exp() / (2 * gamma)  # w = e^{−γt}
            case Multiquadric():
                return (1 - (1 + gamma * t) ** 0.5) / gamma  # w = (1 + γt)^{−1/2}
            case Cauchy():
                return -(1 + gamma * t).log() / (2 * gamma)  # w = 1/(1 + γt)
        return type(self.cell.kernel).height(gamma * t) / gamma

    def drive(self, z: Tensor) -> Tensor:
        z = z.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(self.similarity(z).sum(), z)[0]

    def energy(self, z: Tensor) -> Tensor:
        return 0.5 * z.flatten(1).square().sum(1) - self.similarity(z)


def descend(cell: AbstractKernelCell, x: Tensor, steps: int = 5000) -> Tensor:
    """The equilibrium by a long proximal descent with plain autograd (ReLU)."""
    problem = Reference(cell, x)
    z, alpha = torch.zeros(problem.state), 2 / (2 + problem.L)
    for _ in range(steps):
        new = torch.relu((1 - alpha) * z + alpha * problem.drive(z))
        done = (new - z).abs().max() < 1e-15
        z = new
        if done:
            break
    return z


def affine(dimension: int = 6, rate: float = 0.8, batch: int = 3, symmetric: bool = False, seed: int = 0):
    """f(z) = zAᵀ + b with spectral radius (symmetric) or norm `rate`, and its fixed point."""
    torch.manual_seed(seed)
    A = torch.randn(dimension, dimension)
    A = A + A.mT if symmetric else A
    A = A * (rate / torch.linalg.matrix_norm(A, 2))
    b = torch.randn(batch, dimension)
    return A, b, torch.linalg.solve(torch.eye(dimension) - A, b.mT).mT


class Counting(AbstractMap):
    """z ↦ z·rate + b per sample, which writes down how many rows each evaluation saw."""

    def __init__(self, rates: Tensor, b: Tensor, seen: list[int] | None = None):
        self.rates, self.b, self.seen = rates, b, [] if seen is None else seen

    def __call__(self, z: Tensor) -> Tensor:
        self.seen.append(len(z))
        return z * self.rates.unsqueeze(1) + self.b

    def rows(self, index: Tensor) -> "Counting":
        return Counting(self.rates[index], self.b[index], self.seen)


def trained(path: Path, *settings: str) -> Path:
    """A run of an epoch on the embedded digits."""
    train(parse("", ["training.epochs=1", "training.batch_size=64", "device=cpu", *settings]), path)
    return path
