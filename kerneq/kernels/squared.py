"""The kernel of squared distance, S = −½‖a − v‖²: what every radial kernel tends to as γ → 0."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, final

import torch
from torch import Tensor

from ..operators import Scaling
from ..tensors import per_sample_dot
from .base import AbstractKernel, AbstractParameters, Binding, KernelConstants, Slope
from .radial import input_lipschitz


@final
@dataclasses.dataclass(frozen=True)
class Squared(AbstractKernel):
    """m(r) = r, r = a − v: the hidden problem is non-negative least squares, min ½‖z‖² + φ(z) + ½‖a − Wz‖².

    Without patches, γ and W_h, so the cheapest kernel of all: a step is the two products with W and one subtraction.
    L = ‖W‖², and E is strongly convex with μ ≥ 1 for every W. Where ReLU keeps the same entries the equilibrium is
    linear in a: kernels with a γ are not, and forget outliers.
    """

    in_state: ClassVar[bool] = False
    hvp_sign: ClassVar[int] = -1
    equation: ClassVar[str] = "z = relu(Wᵀr), r = Ux + b − Wz"

    @property
    def through_features(self) -> bool:
        return True

    @property
    def convex_loss(self) -> bool:
        return True

    def parameters(self, features: int, conv: bool) -> None:
        return None

    def max_norm(self, norm: float) -> float:
        return norm

    def bind(self, parameters: AbstractParameters | None, a: Tensor, norm: float, scaling: Scaling) -> Binding:
        square = scaling.square
        return Binding(a, scaling, lipschitz=square, convexity=torch.ones_like(square), limit=norm**2)

    def differentiate(self, at: Binding, z: Tensor | None, v: Tensor | None, value: bool) -> Slope:
        r = at.a if v is None else (at.a - v).to(at.a.dtype)
        total = -0.5 * per_sample_dot(r, r) if value else None
        return Slope(None, r, total) if at.bias is None else at.add_bias(z, r, total)

    def hvp(self, at: Binding, v: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda y: y

    def state_hvp(self, at: Binding, z: Tensor) -> None:
        return None

    def constants(self, norm: float, hidden: float) -> KernelConstants:
        return KernelConstants(norm, norm, norm**2, None, 1.0, input_lipschitz(norm, lowest=0.0))

    def unit(self, norm: float, size: int) -> float:
        return 1.0
