"""The equation on vectors."""

from typing import final

from torch import nn

from ..kernels import AbstractKernel
from ..operators import Dense
from ..prox import AbstractProx, ReLU
from .base import AbstractKernelCell, check_sizes


@final
class DenseCell(AbstractKernelCell):
    """W a matrix (features × state); a = Ux + b, or whatever `inject` makes of x."""

    def __init__(
        self,
        kernel: AbstractKernel,
        *,
        inputs: int,
        state: int,
        features: int,
        norm: float = 1.0,
        prox: AbstractProx = ReLU(),  # noqa: B008  (a frozen value)
        inject: nn.Module | None = None,
    ):
        check_sizes(inputs=inputs, state=state, features=features)
        super().__init__(kernel, Dense(state, features), features, norm, prox)
        self.shape = (None, inputs)
        self.inject = inject or nn.Linear(inputs, state if kernel.in_state else features)
