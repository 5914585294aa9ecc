"""The cell of a kernel GLM: z = σ(W₁z + W₂T + W₃ρ(z) + m), dense or convolutional."""

import dataclasses
import functools
from typing import Any, Literal, Self, final

import torch
from torch import Tensor, nn

from kerneq.cells.base import AbstractCell
from kerneq.equation import AbstractMap
from kerneq.kglm.family import AbstractFamily
from kerneq.kglm.prior import FLAT, AbstractPrior, Flat
from kerneq.kglm.spectral import spectral_norm
from kerneq.operators import BoundOperator

Coordinates = Literal["mean", "canonical"]


@final
@dataclasses.dataclass(frozen=True)
class GLMMap(AbstractMap):
    """The map at one batch of targets; the state is z (`mean`) or η = (A′)⁻¹(z) (`canonical`)."""

    W1: BoundOperator
    W3: BoundOperator | None
    constant: Tensor  # W₂T + m
    family: AbstractFamily
    prior: AbstractPrior
    coordinates: Coordinates
    compiled: bool = False

    def __call__(self, state: Tensor) -> Tensor:
        image: Tensor = _compiled()(self, state) if self.compiled else self.image(state)
        return image

    def image(self, state: Tensor) -> Tensor:
        z, rho = self.activations(state)
        drive = self.W1(z) + self.constant
        if self.W3 is not None and rho is not None:
            drive = drive + self.W3(rho)
        return self.family.mean(drive) if self.coordinates == "mean" else drive

    def activations(self, state: Tensor) -> tuple[Tensor, Tensor | None]:
        """z and ρ(z); None for ρ where the prior is flat."""
        if self.coordinates == "canonical":
            return self.family.mean(state), None if self.W3 is None else self.prior.slope(state)
        return state, None if self.W3 is None else self.prior.slope(self.family.canonical(state))

    def rows(self, index: Tensor) -> Self:
        return dataclasses.replace(self, constant=self.constant.index_select(0, index))


@functools.cache
def _compiled() -> Any:
    return torch.compile(GLMMap.image, dynamic=False)


@final
class GLMCell(AbstractCell):
    """The trainable equation; its input is T(Y). With the closed-form weights it is the kernel GLM's.

    In canonical coordinates relaxed Picard iteration with a small enough step converges for every kernel (see
    `Guarantee.relaxation`) and no inverse link is needed; in mean coordinates, the paper's, where
    Assumption 2 holds.
    """

    def __init__(
        self,
        W1: Tensor,
        W2: Tensor,
        W3: Tensor | None,
        bias: Tensor,
        family: AbstractFamily,
        prior: AbstractPrior = FLAT,
        coordinates: Coordinates = "mean",
    ) -> None:
        super().__init__()
        if (W3 is None) != isinstance(prior, Flat):
            raise ValueError("`W3` goes with a prior that is not flat, and only with one.")
        self.W1, self.W2 = nn.Parameter(W1.clone()), nn.Parameter(W2.clone())
        self.W3 = None if W3 is None else nn.Parameter(W3.clone())
        self.bias = nn.Parameter(bias.clone())  # m; (n,), or (channels, 1, 1) for a convolution
        self.family, self.prior, self.coordinates = family, prior, coordinates
        self.compiled = False

    def bind(self, x: Tensor) -> GLMMap:
        W3 = None if self.W3 is None else bound(self.W3)
        constant = bound(self.W2)(x) + self.bias
        return GLMMap(bound(self.W1), W3, constant, self.family, self.prior, self.coordinates, self.compiled)

    def initial(self, f: AbstractMap) -> Tensor:
        """f = 0: η = m + W₂T would be the first step from z = 0, and lies inside every domain."""
        assert isinstance(f, GLMMap)
        start = f.constant.detach()
        return start if self.coordinates == "canonical" else self.family.mean(start)

    def compile_map(self) -> None:
        self.compiled = True

    def diagnostics(self) -> dict[str, float]:
        """The spectral norm of W₁; of a convolution, on a torus of 32 × 32."""
        return {"hidden norm": spectral_norm(self.W1.detach(), (32, 32)).item()}


def bound(weight: Tensor) -> BoundOperator:
    """A weight (m, n) as a matrix, (out, in, k, k) as a zero-padded convolution."""
    return BoundOperator(weight, 0 if weight.ndim == 2 else weight.shape[-1])
