"""The kernel of squared distance, S = −½‖a − v‖²: what every radial kernel tends to as γ → 0."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, final

from torch import Tensor

from ..tensors import per_sample_dot
from .base import AbstractParameters, Binding, Slope
from .radial import AbstractLossKernel


@final
@dataclasses.dataclass(frozen=True)
class Squared(AbstractLossKernel):
    """m(r) = r, r = a − v: the hidden problem is non-negative least squares, min ½‖z‖² + φ(z) + ½‖a − Wz‖².

    Without patches, γ and W_h, so the cheapest kernel of all: a step is the two products with W and one subtraction.
    L = ‖W‖², and E is strongly convex with μ ≥ 1 for every W. Where ReLU keeps the same entries the equilibrium is
    linear in a: kernels with a γ are not, and forget outliers.
    """

    equation: ClassVar[str] = "z = relu(Wᵀr), r = Ux + b − Wz"
    steepest: ClassVar[float] = 1.0
    lowest: ClassVar[float] = 1.0

    def bind(self, parameters: AbstractParameters | None, a: Tensor, norm: float) -> Binding:
        return Binding(a)

    def differentiate(self, at: Binding, z: Tensor | None, v: Tensor | None, value: bool) -> Slope:
        r = at.a if v is None else (at.a - v).to(at.a.dtype)
        total = -0.5 * per_sample_dot(r, r) if value else None
        return Slope(None, r, total) if at.bias is None else at.add_bias(z, r, total)

    def hvp(self, at: Binding, v: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda y: -y
