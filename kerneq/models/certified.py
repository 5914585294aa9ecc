"""A chain of layers that lengthen no difference, whatever their weights, and a head of unit rows: certified networks.

The layers are equilibria, `Resolvent`, or one of those they are compared with: the convex potential layer, the
SDP-based layer, and almost-orthogonal convolutions with MaxMin.
"""

import dataclasses
from typing import Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cells import ConvCell
from ..equilibrium import Equilibrium
from ..gradients import AbstractGradient, ConjugateGradient, Implicit
from ..kernels import AbstractKernel, AbstractRadialKernel, Squared
from ..operators import Operator
from ..resolvent import Reflection
from ..settings import setting
from ..solution import Solution
from .classifier import AbstractModel, AbstractSolveConfig
from .lipschitz import AlmostOrthogonal, MaxMin, UnitRows, gershgorin_sum

# The backward system is as steep as ‖W‖², which may be far above 1, and positive definite: conjugate gradient's.
_IMPLICIT = Implicit(ConjugateGradient(), tol=1e-3, max_steps=20, on_failure="return")
LayerKind = Literal["resolvent", "potential", "sdp", "almost-orthogonal"]


@final
@dataclasses.dataclass(frozen=True)
class CertifiedConfig(AbstractSolveConfig):
    """The settings of a `CertifiedClassifier`; the defaults are those of certified-small."""

    gradient: AbstractGradient = setting(_IMPLICIT, "how the solution is differentiated")
    max_steps: int = setting(20, "evaluations of f in a solve, at most", low=1)
    layer: LayerKind = setting(
        "resolvent", "the layers of the chain; potential (CPL), sdp (SLL) and almost-orthogonal (AOL) solve nothing"
    )
    kernel: AbstractKernel = setting(Squared(), "of a resolvent: squared or multiquadric")
    width: int = setting(48, "channels at the first scale, four times as many at each following one", low=1)
    depths: tuple[int, ...] = setting((2, 2, 2), "layers at each scale; from scale to scale pixels are folded", low=0)
    norm: float = setting(
        10**0.5, "bound on ‖W‖ of a resolvent: it guards the length of a solve, no guarantee", above=0
    )
    gain: float = setting(4.0, "factor of the logits: one over a temperature", above=0)
    std: tuple[float, ...] = setting(
        (), "what the channels of the pictures were divided by: undone inside, so that a pixel counts the same in all"
    )

    def __post_init__(self) -> None:
        if not self.depths:
            raise ValueError("`depths` needs one entry a scale, got none.")
        if self.layer == "almost-orthogonal" and self.width % 2:
            raise ValueError(f"`width` must be even for MaxMin, got {self.width}.")

    @property
    def equation(self) -> str:
        """The equation of the layers."""
        solved = "a ↦ 2r − a, r = a − Wz, z = relu(Wᵀr + b)" if self.kernel == Squared() else self.kernel.equation
        return solved if self.layer == "resolvent" else "none: explicit"

    def build_layer(self, channels: int) -> nn.Module:
        """Return one layer of the chain, from `channels` to as many."""
        if self.layer == "almost-orthogonal":
            return nn.Sequential(AlmostOrthogonal(channels, channels), MaxMin())
        if self.layer != "resolvent":
            return PotentialStep(channels, rows=self.layer == "sdp")
        cell = ConvCell(
            self.kernel,
            inputs=channels,
            state=channels,
            features=channels,
            norm=self.norm,
            inject=nn.Identity(),
            bias=True,
        )
        return self.make_layer(Reflection(cell))


@final
class PotentialStep(nn.Module):
    """x ↦ x − 2WT⁻¹σ(Wᵀx + b), T ⪰ WᵀW diagonal: one step towards the equilibrium of a `Resolvent`.

    T = ‖W‖² is the convex potential layer (CPL: Meunier et al., 2022). With `rows` Tᵢ = Σⱼ |WᵀW|ᵢⱼqⱼ/qᵢ, the SDP-based
    layer (SLL: Araujo et al., 2023), with trainable q > 0; at the borders of a picture some terms of the sum are
    missing, which makes it larger than it need be.
    """

    def __init__(self, channels: int, rows: bool):
        super().__init__()
        self.operator = Operator(channels, channels, 3)
        self.bias = nn.Parameter(torch.zeros(channels))
        self.log_q = nn.Parameter(torch.zeros(channels)) if rows else None

    def divisor(self, x: Tensor) -> Tensor:
        """Return T, a number or one number a channel, in the shape of pictures."""
        if self.log_q is None:
            return self.operator.norm(x).square()
        return gershgorin_sum(self.operator.weight, self.log_q.exp())[:, None, None]

    def forward(self, x: Tensor) -> Tensor:
        W = self.operator.bind()
        z = torch.relu(W.adjoint(x) + self.bias[:, None, None]) / self.divisor(x).to(x.dtype)
        return x - 2 * W(z)


@final
class CertifiedClassifier(AbstractModel):
    """Pixels with channels of zeros → layers, with pixels folded into channels between scales → mean → unit rows.

    Each part lengthens no difference, so that the distance to another class is at least the margin between two logits
    over the length of the difference of their rows (`kerneq.certify`).
    """

    part = "layer"

    def __init__(self, config: CertifiedConfig, classes: int, channels: int = 3):
        patch = config.kernel.patch if isinstance(config.kernel, AbstractRadialKernel) else 1
        super().__init__(channels, multiple=patch * 2 ** (len(config.depths) - 1))
        if config.width < channels or len(config.std) not in (0, channels):
            raise ValueError(
                f"`width` must be at least, and `std` must have, the number of channels of the pictures, {channels}: "
                f"got {config.width} and {len(config.std)}."
            )
        self.config = config
        width, layers = config.width, list[nn.Module]()
        for scale, depth in enumerate(config.depths):
            if scale > 0:
                layers.append(nn.PixelUnshuffle(2))
                width *= 4
            layers += [config.build_layer(width) for _ in range(depth)]
        self.chain = nn.ModuleList(layers)
        self.head = UnitRows(width, classes, config.gain)
        std = torch.tensor(config.std or [1.0] * channels)[:, None, None]
        self.register_buffer("pixel_std", std, persistent=False)

    def embed(self, x: Tensor) -> Tensor:
        """Return the pictures in units of their pixels, with channels of zeros up to the width."""
        return F.pad(x * self.get_buffer("pixel_std").to(x.dtype), (0, 0, 0, 0, 0, self.config.width - self.channels))

    def read_out(self, x: Tensor) -> Tensor:
        """Return the logits: the mean of n pixels shrinks differences to 1/√n, so that it is multiplied by √n."""
        logits: Tensor = self.head(x.mean((2, 3)) * (x.shape[2] * x.shape[3]) ** 0.5)
        return logits

    def classify(self, x: Tensor) -> tuple[Tensor, dict[str, Solution]]:
        x, solutions = self.embed(x), dict[str, Solution]()
        for layer in self.chain:
            if isinstance(layer, Equilibrium):
                solution = layer(x)
                solutions[f"layer{len(solutions)}"] = solution
                x = solution.value
            else:
                x = layer(x)
        return self.read_out(x), solutions
