"""The constants that the papers' statements ask for, measured on a layer and a batch."""

import dataclasses
import math
from typing import final

import torch
from torch import Tensor, nn

from ...cells import AbstractKernelCell, DenseCell
from ...kernels import AbstractRadialKernel, Gaussian, Linear
from ...kernels.radial import PatchParameters, patch_distances
from ...solvers import Proximal, solve
from ...tensors import per_sample_norm


@final
@dataclasses.dataclass(frozen=True)
class Constants:
    """Norms of z = σ(βWᵀ(a − Wz)), a = Ux + b, and of the classifier W_c z + b_c behind it; `reach` is by fact 12.

    W_h is folded into W and U, which changes neither z nor any statement: every norm is that of the folded map.
    """

    W: float  # ‖W‖‖W_h‖
    U: float = 1.0  # ‖U‖‖W_h‖
    b: float = 0.0  # ‖b‖‖W_h‖
    head: float = 1.0  # ‖W_c‖
    inputs: float = 1.0  # the largest ‖x‖
    outputs: float = 0.0  # the largest ‖z*‖
    gamma: float = 0.5  # γ
    beta: float = 1.0  # β_max, the largest e^{−γ‖rᵢ‖²} at an equilibrium
    lowest: float = Gaussian.lowest  # least slope of the kernel's r ↦ β(r)r, whose largest is 1
    reach: float = math.inf  # the largest ‖βr‖ there is: √(N/2eγ) for the Gaussian kernel on N patches
    patches: int = 1  # N
    width: int = 1  # h, the largest dimension of a weight
    size: float = math.nan  # ‖W‖²_F + ‖U‖²_F + ‖b‖² + ‖W_c‖²_F + ‖b_c‖²; NaN where it was not measured
    published_size: float = math.nan  # B_W, which has ‖WᵀW‖²_F instead of ‖W‖²_F

    @property
    def mu(self) -> float:
        """μ, the largest of ‖U‖, ‖W‖, ‖W_c‖ and ‖b‖."""
        return max(self.W, self.U, self.head, self.b)

    @property
    def m(self) -> float:
        """‖WᵀW‖."""
        return self.W**2

    @property
    def B(self) -> float:
        """The bound on the norms of inputs and outputs."""
        return max(self.inputs, self.outputs)

    @property
    def drive(self) -> float:
        """A bound on ‖a‖."""
        return self.U * self.inputs + self.b


@torch.no_grad()
def measure(cell: AbstractKernelCell, x: Tensor, head: nn.Linear | None = None) -> Constants:
    """Return the constants of a cell, with a radial or the linear kernel, and of its head at the equilibria of x.

    The cell is in `eval()`, and what makes a of x affine there. The largest ‖x‖, ‖z*‖ and β are those of the batch,
    where the statements mean all inputs. The size of the weights, which Proposition 2 needs, is that of a dense cell
    with a head.
    """
    if not isinstance(cell.kernel, AbstractRadialKernel | Linear):
        raise TypeError(f"The statements are about radial kernels and the linear one, got {cell.kernel!r}.")
    f = cell.bind(x)
    tol = torch.finfo(x.dtype).eps ** 0.75
    z = solve(f, None, Proximal(), tol=tol, max_steps=2000, on_failure="raise").value
    gain, gamma, beta, lowest, reach, patches = 1.0, 0.0, 1.0, 0.0, math.inf, 1  # of the linear kernel
    if isinstance(cell.kernel, AbstractRadialKernel):
        part = cell.similarity
        assert isinstance(part, PatchParameters) and f.binding.gamma is not None
        r = f.binding.a - f.operator(z)
        s = f.binding.gamma * patch_distances(r, part.project.weight, split=part.split, patch=part.patch)
        gain, gamma, patches = float(part.gain()), float(f.binding.gamma), s[0].numel()
        beta, lowest = float(cell.kernel.weight(s).max()), cell.kernel.lowest
        reach = math.sqrt(patches / (2 * math.e * gamma)) if isinstance(cell.kernel, Gaussian) else math.inf
    constants = Constants(
        W=float(f.scaling.product * f.scaling.scale),
        U=gain * _affine_norm(cell.inject, x),
        b=gain * float(cell.inject(torch.zeros_like(x[:1])).norm()),
        head=1.0 if head is None else float(torch.linalg.matrix_norm(head.weight, 2)),
        inputs=float(per_sample_norm(x).max()),
        outputs=float(per_sample_norm(z).max()),
        gamma=gamma,
        beta=beta,
        lowest=lowest,
        reach=reach,
        patches=patches,
    )
    if head is None or not isinstance(cell, DenseCell) or not isinstance(cell.inject, nn.Linear):
        return constants
    biases = cell.inject(torch.zeros_like(x[:1])).mT, head(torch.zeros_like(z[:1]))  # zeros where there is none
    W, U, b = (_folded(cell, t) for t in (f.operator.weight, cell.inject.weight, biases[0]))
    common = sum(float(t.square().sum()) for t in (U, b, head.weight, biases[1]))
    return dataclasses.replace(
        constants,
        width=max(max(t.shape) for t in (W, U, head.weight)),
        size=common + float(W.square().sum()),
        published_size=common + float((W.mT @ W).square().sum()),
    )


def _folded(cell: DenseCell, weight: Tensor) -> Tensor:
    """Return W_hᵀ applied to every patch of the rows of a weight (features, ...)."""
    part = cell.similarity
    if not isinstance(part, PatchParameters):
        return weight
    patches = weight.reshape(-1, part.split, weight.shape[1])
    return (part.project.weight @ patches).reshape(-1, weight.shape[1])


def _affine_norm(inject: nn.Module, x: Tensor) -> float:
    """Return ‖U‖ of x ↦ Ux + b, from the whole matrix."""
    U = torch.func.jacrev(lambda one: inject(one[None]).flatten())(torch.zeros_like(x[0]))
    return float(torch.linalg.matrix_norm(U.flatten(1), 2))
