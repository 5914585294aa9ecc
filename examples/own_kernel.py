"""A kernel and a prox of your own: define S and φ, and every solver and gradient works with them."""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

import kerneq
from kerneq.kernels import AbstractInnerKernel
from kerneq.prox import AbstractProx, Scale


class Softplus(AbstractInnerKernel):
    """S = log(1 + exp⟨a, z⟩) + ½‖Wz‖²: an inner-product kernel is κ, κ′ and a bound on κ″."""

    def value(self, t: Tensor) -> Tensor:
        return F.softplus(t)

    def derivative(self, t: Tensor) -> Tensor:
        return torch.sigmoid(t)

    @property
    def curvature(self) -> float:
        return 0.25


@dataclasses.dataclass(frozen=True)
class SparseReLU(AbstractProx):
    """φ(z) = λz for z ≥ 0 and infinite below, so prox_{αφ}(d) = max(d − αλ, 0): small activations become zero."""

    threshold: float = 0.02  # λ

    def __call__(self, d: Tensor, scale: Scale = 1.0) -> Tensor:
        return torch.relu(d - scale * self.threshold)

    def penalty(self, z: Tensor) -> Tensor:
        inside = z.flatten(1).amin(1) >= 0
        return torch.where(inside, self.threshold * z.flatten(1).sum(1), torch.inf)

    def vjp(self, z: Tensor, g: Tensor) -> Tensor:
        return torch.where(z > 0, g, 0.0)


def main() -> None:
    torch.manual_seed(0)
    cell = kerneq.cells.DenseCell(Softplus(), inputs=8, state=32, features=16, prox=SparseReLU()).double()
    layer = kerneq.Equilibrium(cell, tol=1e-10, max_steps=200).eval()
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    solution = layer(x, trace=True)
    print(f"{solution}\n{float((solution.value == 0).double().mean()):.0%} of the state is exactly zero")
    # Finite differences know nothing of the formulas above, so they would find a wrong derivative.
    right = torch.autograd.gradcheck(lambda x: layer(x).value, x, eps=1e-6, atol=1e-5)
    print(f"implicit gradient agrees with finite differences: {right}")
    axes = kerneq.plot.solve(solution)
    axes[0].figure.savefig("own_kernel.png", dpi=80)


if __name__ == "__main__":
    main()
