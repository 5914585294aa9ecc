"""Kernels of other libraries: scikit-learn's, GPyTorch's, or any function k(X, X2)."""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any, Protocol, final, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from kerneq.kglm.kernels import AbstractKernel


@runtime_checkable
class Lazy(Protocol):
    """A matrix that is not written out yet, as GPyTorch returns."""

    def to_dense(self) -> Tensor: ...


@final
@dataclasses.dataclass(frozen=True)
class Function(AbstractKernel):
    """Any callable k(X, X2) on tensors that returns a tensor, an array or a GPyTorch lazy matrix."""

    function: Callable[[Tensor, Tensor], Any]

    def __call__(self, X: Tensor, X2: Tensor) -> Tensor:
        return _matrix(self.function(X, X2), X, X2)


@final
@dataclasses.dataclass(frozen=True)
class Scikit(AbstractKernel):
    """A scikit-learn kernel; equal coordinates are passed as one argument, so that its white noise counts."""

    kernel: Callable[..., Any]

    def __call__(self, X: Tensor, X2: Tensor) -> Tensor:
        first, second = X.detach().cpu().numpy(), X2.detach().cpu().numpy()
        same = first.shape == second.shape and np.array_equal(first, second)
        return _matrix(self.kernel(first) if same else self.kernel(first, second), X, X2)


def as_kernel(kernel: Any) -> AbstractKernel:
    """`kernel` itself if it is ours, else the adapter that fits it."""
    if isinstance(kernel, AbstractKernel):
        return kernel
    scikit = sys.modules.get("sklearn.gaussian_process.kernels")  # not imported: then `kernel` is not one of them
    if scikit is not None and isinstance(kernel, scikit.Kernel):
        return Scikit(kernel)
    if callable(kernel):
        return Function(kernel)
    raise TypeError(f"A kernel must be callable as k(X, X2), got {type(kernel).__name__}.")


def _matrix(values: Any, X: Tensor, X2: Tensor) -> Tensor:
    matrix = values.to_dense() if isinstance(values, Lazy) else values
    matrix = torch.as_tensor(matrix, dtype=X.dtype, device=X.device)
    if matrix.shape != (X.shape[0], X2.shape[0]):
        raise ValueError(
            f"The kernel must return a matrix ({X.shape[0]}, {X2.shape[0]}), got shape {tuple(matrix.shape)}."
        )
    return matrix
