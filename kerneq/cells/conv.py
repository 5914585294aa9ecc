"""The equation on feature maps."""

from typing import final

from torch import nn

from ..kernels import AbstractKernel
from ..operators import Conv
from ..prox import AbstractProx, ReLU
from .base import AbstractKernelCell, check_sizes


@final
class ConvCell(AbstractKernelCell):
    """W a zero-padded convolution from `state` to `features` channels; a = U ∗ x + b, or what `inject` makes of x."""

    def __init__(
        self,
        kernel: AbstractKernel,
        *,
        inputs: int,
        state: int,
        features: int,
        size: int = 3,
        norm: float = 1.0,
        prox: AbstractProx = ReLU(),  # noqa: B008  (a frozen value)
        inject: nn.Module | None = None,
    ):
        check_sizes(inputs=inputs, state=state, features=features, size=size)
        if size % 2 == 0:
            raise ValueError(f"`size` must be odd, so that the convolution keeps the picture's size, got {size}.")
        super().__init__(kernel, Conv(state, features, size), features, norm, prox)
        self.shape = (None, inputs, None, None)
        channels = state if kernel.in_state else features
        self.inject = inject or nn.Conv2d(inputs, channels, size, padding=size // 2)
