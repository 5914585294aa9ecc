"""Radial kernels on patches: S = Σᵢ H(tᵢ), tᵢ = ‖rᵢW_h‖², r = a − v.

Gaussian (KerDEQ, GEQ), multiquadric and Cauchy (ours), and γ, their inverse width: fixed or following the data.
Every one is a robust loss ρ of the hidden problem min ½‖z‖² + φ(z) + Σᵢ ρ(‖(a − Wz)ᵢW_h‖) (docs/theory.md, fact 9).
"""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from ..fused.radial import patch_distances, patch_weights, radial_hvp, radial_step
from ..operators import Dense, limited
from ..tensors import check_nonnegative, check_positive, check_share, check_whole, is_traced, working_dtype
from .base import AbstractKernel, AbstractParameters, Binding, Slope


@final
@dataclasses.dataclass(frozen=True)
class Adaptive:
    """γ = share / M, M the smallest ‖rᵢW_h‖² among the patches (GEQ: 0.2 / M).

    The paper gives no rule for M. Ours: a running mean of the minimum over (the first samples of) a batch at the
    equilibria found in training, frozen in evaluation and saved with the model. Training can drive single patches to
    r ≈ 0, and then γ without limit, which switches the equilibrium off; so M is never below a share of the mean. As
    published: `floor=0, samples=None`.
    """

    share: float = 0.2
    momentum: float = 0.1
    floor: float = 0.2  # M is at least this share of the mean over the patches; 0: the minimum itself
    samples: int | None = 32  # of a batch, which are looked at; None: all

    def __post_init__(self) -> None:
        check_positive("share", self.share)
        check_share("momentum", self.momentum)
        check_nonnegative("floor", self.floor)
        if self.samples is not None:
            check_whole("samples", self.samples)


@final
class Width(nn.Module):
    """γ of one cell: a number (KerDEQ), or following the data by a rule (GEQ), whose M is saved with the model.

    The number is no buffer: those are rounded with the weights, and empty after `to_empty`.
    """

    def __init__(self, gamma: float | Adaptive, size: int):
        super().__init__()
        self.gamma = gamma
        if isinstance(gamma, Adaptive):
            self.register_buffer("smallest", torch.tensor(float(size)))  # M; `size` is E‖rᵢ‖² for unit entries
            self.register_buffer("looks", torch.tensor(0.0))  # how often M was updated
        self.number: Tensor | None = None  # γ, where it is one

    def forward(self, a: Tensor) -> Tensor:
        """γ, as it is used during one solve for a."""
        if isinstance(self.gamma, Adaptive):
            return self.gamma.share / self.get_buffer("smallest").clone()
        number, dtype = self.number, working_dtype(a.dtype)
        if number is None or (number.dtype, number.device) != (dtype, a.device):
            with torch.inference_mode(False):  # it outlives the call, as the vector of a norm does
                number = torch.full((), self.gamma, dtype=dtype, device=a.device)
            if not is_traced():
                self.number = number  # kept: a CUDA graph knows it by its address
        return number

    def observe(self, distances: Tensor) -> None:
        """Take note of ‖rᵢW_h‖² of every patch at an equilibrium."""
        assert isinstance(self.gamma, Adaptive)
        smallest, looks = self.get_buffer("smallest"), self.get_buffer("looks")
        found = torch.maximum(distances.min(), self.gamma.floor * distances.mean()).to(smallest)
        # One bad batch must not spoil γ for good, nor a patch with r = 0.
        found = torch.where(found.isfinite() & (found > 0), found, smallest)
        smallest.lerp_(found, torch.where(looks == 0, 1.0, self.gamma.momentum).to(smallest))
        looks += 1


@dataclasses.dataclass(frozen=True)
class AbstractRadialKernel(AbstractKernel):
    """S = Σᵢ H(tᵢ) with the weight w = −2H′: ∂S/∂v is w(tᵢ) rᵢQ, the Hessian block −(w Q + 2w′ qᵢᵀqᵢ), qᵢ = rᵢQ.

    γ is a unit of length: H(t) = η(s)/γ and w(t) = ω(s), s = γt. So a kernel is three functions of one variable, η
    (`height`), ω = −2η′ (`weight`) and ω′ (`slope`), written with torch's functions, and two constants:
    `steepest`, the supremum of |ω| and |ω + 2sω′|, and `lowest`, the infimum of ω + 2sω′. All else follows: dense and
    patched form, energy, L = steepest·‖W‖²‖W_h‖², μ = 1 + min(0, lowest)·‖W‖²‖W_h‖², backward product, fused kernel.

    In a convolutional cell a patch is `split` channels × `patch` × `patch` pixels (8 channels where not said); in a
    dense one it is `split` entries, or the whole vector. W_h (n × hidden) enters only through Q = W_hW_hᵀ (n × n).
    """

    in_state: ClassVar[bool] = False
    hvp_sign: ClassVar[int] = -1
    steepest: ClassVar[float]
    lowest: ClassVar[float]

    gamma: float | Adaptive = 0.5  # γ: a number, or how it follows the data
    patch: int = 2  # p
    split: int | None = None  # c_s
    hidden: int = 64  # columns of W_h

    def __post_init__(self) -> None:
        for name, value in (("patch", self.patch), ("split", self.split), ("hidden", self.hidden)):
            if value is not None:
                check_whole(name, value)
        if not isinstance(self.gamma, Adaptive):
            check_positive("gamma", self.gamma)

    @staticmethod
    @abc.abstractmethod
    def height(s: Tensor) -> Tensor:
        """η(s)."""

    @staticmethod
    @abc.abstractmethod
    def weight(s: Tensor) -> Tensor:
        """ω(s) = −2η′(s)."""

    @staticmethod
    @abc.abstractmethod
    def slope(s: Tensor) -> Tensor:
        """ω′(s)."""

    def input_lipschitz(self, gain: float) -> float:
        """The Lipschitz constant of aW_h ↦ z*, patch by patch, where ‖W_hᵀW‖ ≤ `gain`; ∞ where z* may not be unique.

        Where E is convex for every W, as for the multiquadric, it is ½ at most: no W makes z* more sensitive.
        """
        return input_lipschitz(gain, self.lowest, self.steepest)

    @property
    def through_features(self) -> bool:
        return True

    def parameters(self, features: int, conv: bool) -> "PatchParameters":
        split = self.split or (8 if conv else features)
        if features % split:
            raise ValueError(f"`split` must divide the number of features: {features} is not a multiple of {split}.")
        return PatchParameters(split, self.patch if conv else 1, self.hidden, self.gamma)

    def bind(self, parameters: AbstractParameters | None, a: Tensor, norm: float, operator_norm: Tensor) -> Binding:
        assert isinstance(parameters, PatchParameters)
        patch = parameters.patch
        if a.dim() == 4 and (a.shape[2] % patch or a.shape[3] % patch):
            raise ValueError(
                f"`patch` must divide the picture: {a.shape[2]}×{a.shape[3]} is not a multiple of {patch}."
            )
        product = operator_norm * parameters.gain()
        scale = limited(product, norm / self.steepest**0.5)
        square = (product * scale).detach() ** 2
        return Binding(
            a,
            operator_norm,
            product,
            scale,
            lipschitz=self.steepest * square,
            convexity=1 + min(0.0, self.lowest) * square,
            limit=norm**2,
            Q=parameters.Q(),
            gamma=parameters.width(a),
            split=parameters.split,
            patch=patch,
        )

    def differentiate(self, at: Binding, z: Tensor | None, v: Tensor | None, value: bool) -> Slope:
        assert at.Q is not None and at.gamma is not None
        m, total = radial_step(type(self), at.a, v, at.Q, at.gamma, split=at.split, patch=at.patch, value=value)
        return Slope(None, m, total)

    def hvp(self, at: Binding, v: Tensor) -> Callable[[Tensor], Tensor]:
        assert at.Q is not None and at.gamma is not None
        return radial_hvp(type(self), at.a, v, at.Q, at.gamma, split=at.split, patch=at.patch)

    def state_hvp(self, at: Binding, z: Tensor) -> None:
        return None

    def weights(self, at: Binding, v: Tensor) -> Tensor:
        """ω(sᵢ): 1 where v explains the patch of a, towards 0 where it does not."""
        assert at.Q is not None and at.gamma is not None
        return patch_weights(type(self), at.a, v, at.Q, at.gamma, split=at.split, patch=at.patch)


def input_lipschitz(w: float, lowest: float, steepest: float = 1.0) -> float:
    """The least K with ‖z*(a) − z*(a′)‖ ≤ K‖a − a′‖ for every W with ‖W‖ ≤ w, where ωr has slopes in [−c, S].

    c = −min(0, `lowest`), S = `steepest`. K² is the largest (cSw² + (S − c)X)/(1 + X)² for X in [−cw², Sw²]; for S = 1
    w/(1 + w²), (1 − c)/2√(1 − c − cw²) or cw/(1 − cw²), and infinite from cw² = 1 on. Where ωr is monotone (c = 0, the
    multiquadric) K ≤ √S/2 for every W. With W_h, w is ‖W‖‖W_h‖ and the constant K‖W_h‖ (docs/theory.md, fact 5).
    """
    c = max(0.0, -lowest)
    if c * w**2 >= 1:
        return math.inf
    flat = 1 - 2 * c * steepest * w**2 / (steepest - c) if c < steepest else -math.inf  # no slope in X there
    X = min(max(flat, -c * w**2), steepest * w**2)
    return math.sqrt(c * steepest * w**2 + (steepest - c) * X) / (1 + X)


@final
class PatchParameters(AbstractParameters):
    """W_h, as r ↦ W_hᵀr (`project`, hidden × n), and γ (`width`)."""

    def __init__(self, split: int, patch: int, hidden: int, gamma: float | Adaptive):
        super().__init__()
        self.split, self.patch = split, patch
        size = split * patch * patch
        self.project = Dense(size, hidden)
        nn.init.orthogonal_(self.project.weight)
        self.width = Width(gamma, size)

    def gain(self) -> Tensor:
        """‖W_h‖."""
        return self.project.norm(self.project.weight)

    def Q(self) -> Tensor:
        """W_hW_hᵀ, (n, n), in the precision of the weights."""
        with torch.autocast(self.project.weight.device.type, enabled=False):
            return self.project.weight.mT @ self.project.weight

    @torch.no_grad()
    def observe(self, a: Tensor, z: Tensor, operator: Callable[[Tensor], Tensor]) -> None:
        rule = self.width.gamma
        if isinstance(rule, Adaptive):
            r = a[: rule.samples] - operator(z[: rule.samples])
            self.width.observe(patch_distances(r, self.project.weight, split=self.split, patch=self.patch))


@final
@dataclasses.dataclass(frozen=True)
class Gaussian(AbstractRadialKernel):
    """ω = e^{−s}, the kernel of KerDEQ and GEQ: S = (1/2γ) Σᵢ exp(−γ‖rᵢW_h‖²). As a loss: Welsch's.

    rᵢ are the patches of r = Ux + b − Wz, s = γ‖rᵢW_h‖², and W_h is a trainable matrix: see `AbstractRadialKernel`.
    L = ‖W‖²‖W_h‖² whatever γ and the input, and E is strongly convex, so that the equilibrium is unique, for
    L < ½e^{3/2} ≈ 2.24.
    """

    steepest: ClassVar[float] = 1.0  # at s = 0
    lowest: ClassVar[float] = -2 * math.exp(-1.5)  # at s = 3/2

    @staticmethod
    def height(s: Tensor) -> Tensor:
        return 0.5 * torch.exp(-s)

    @staticmethod
    def weight(s: Tensor) -> Tensor:
        return torch.exp(-s)

    @staticmethod
    def slope(s: Tensor) -> Tensor:
        return -torch.exp(-s)


@final
@dataclasses.dataclass(frozen=True)
class Multiquadric(AbstractRadialKernel):
    """ω = (1 + s)^{−1/2}. As a loss: pseudo-Huber, quadratic near zero and linear far away.

    ω + 2sω′ = (1 + s)^{−3/2} > 0, so E is strongly convex with μ ≥ 1 for EVERY weight: one equilibrium, whatever
    `norm`.
    """

    steepest: ClassVar[float] = 1.0  # at s = 0
    lowest: ClassVar[float] = 0.0  # as s → ∞

    @staticmethod
    def height(s: Tensor) -> Tensor:
        return -s / (1 + torch.sqrt(1 + s))  # 1 − √(1 + s), without cancellation

    @staticmethod
    def weight(s: Tensor) -> Tensor:
        return torch.rsqrt(1 + s)

    @staticmethod
    def slope(s: Tensor) -> Tensor:
        return -0.5 * torch.rsqrt(1 + s) / (1 + s)


@final
@dataclasses.dataclass(frozen=True)
class Cauchy(AbstractRadialKernel):
    """ω = 1/(1 + s). As a loss: the Lorentzian, ½ log(1 + s).

    ω + 2sω′ = (1 − s)/(1 + s)² ≥ −1/8, so E is strongly convex for L < 8.
    """

    steepest: ClassVar[float] = 1.0  # at s = 0
    lowest: ClassVar[float] = -1 / 8  # at s = 3

    @staticmethod
    def height(s: Tensor) -> Tensor:
        u = 1 + s
        return -0.5 * (torch.log(u) + (s - (u - 1)) / u)  # log1p, by functions that Triton has too

    @staticmethod
    def weight(s: Tensor) -> Tensor:
        return 1 / (1 + s)

    @staticmethod
    def slope(s: Tensor) -> Tensor:
        return -1 / ((1 + s) * (1 + s))
