"""Radial kernels on patches: Gaussian (KerDEQ, GEQ), multiquadric and Cauchy (ours), and γ, a number or a rule.

Every one is a robust loss ρ of the hidden problem min ½‖z‖² + φ(z) + Σᵢ ρ(‖(a − Wz)ᵢW_h‖) (docs/theory.md, fact 9).

A kernel is three functions of one variable, s = γt with t = ‖rW_h‖² = rQrᵀ: the height η, the weight ω = −2η′ and its
slope ω′. With rᵢ the patches of r = a − v, qᵢ = rᵢQ, Q = W_hW_hᵀ symmetric, and u, τ the cotangents of m, S:

    S = Σᵢ η(sᵢ)/γ    mᵢ = ∂S/∂vᵢ = ω(sᵢ) qᵢ    −∂²S/∂vᵢ² = ω(sᵢ) Q + 2γω′(sᵢ) qᵢᵀqᵢ
    pᵢ = ⟨uᵢQ, rᵢ⟩    cᵢ = γω′(sᵢ) pᵢ − τω(sᵢ)/2
    ∂r: ω(sᵢ) uᵢQ + 2cᵢqᵢ    ∂Q: Σᵢ rᵢᵀ(ω(sᵢ) uᵢ + cᵢrᵢ)    ∂γ: Σᵢ tᵢω′(sᵢ) pᵢ − τ(η(sᵢ) + sᵢω(sᵢ)/2)/γ²

Two forms. Plain PyTorch, here, takes every device and dtype, every formula and patch, and can be compiled, exported,
vmapped and differentiated as often as one likes. Triton's (`fused.radial`) is one pass over memory a direction, with
the gradients above; it saves only its inputs, and a second derivative goes through the plain form.
"""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from ..fused.radial import fused_hvp, fused_step, has_programs
from ..operators import Operator
from ..tensors import check_nonnegative, check_positive, check_share, check_whole, in_backward, working_dtype
from .base import AbstractKernel, AbstractParameters, Binding, KernelConstants, Number, Slope


@final
@dataclasses.dataclass(frozen=True)
class Adaptive:
    """γ = share / M, M the smallest ‖rᵢW_h‖² among the patches (GEQ Sec. 4.1: 0.2 / M).

    The paper gives no rule for M. Ours is a running mean of the minimum over (the first samples of) a batch at the
    equilibria found in training, frozen in evaluation and saved with the model. Training can drive single patches to
    r ≈ 0 and γ to infinity, which switches the equilibrium off; so M is never below a share of the mean. As
    published: `floor=0, samples=None`.
    """

    share: float = 0.2
    momentum: float = 0.1
    floor: float = 0.2  # M is at least this share of the mean over the patches; 0: the minimum itself
    samples: int | None = 32  # of a batch that are used; None: all

    def __post_init__(self) -> None:
        check_positive("share", self.share)
        check_share("momentum", self.momentum)
        check_nonnegative("floor", self.floor)
        if self.samples is not None:
            check_whole("samples", self.samples)


@final
class Width(nn.Module):
    """γ of one cell: a number (KerDEQ), or a rule that follows the data (GEQ Sec. 4.1); its M is saved with the model.

    The number is no buffer: those are rounded with the weights, and empty after `to_empty`.
    """

    def __init__(self, gamma: float | Adaptive, size: int):
        super().__init__()
        self.gamma = gamma
        if isinstance(gamma, Adaptive):
            self.register_buffer("smallest", torch.tensor(float(size)))  # M; `size` is E‖rᵢ‖² for unit entries
            self.register_buffer("looks", torch.tensor(0.0))  # how often M was updated
        self.number: Tensor | None = None  # γ, where it is one
        self.used: Tensor | None = None  # M in the last forward pass, which gradient checkpointing repeats

    def forward(self, a: Tensor) -> Tensor:
        """Return γ as it is used during one solve for a."""
        if isinstance(self.gamma, Adaptive):
            if self.used is None or not in_backward():
                self.used = self.get_buffer("smallest").clone()
            return (self.gamma.share / self.used).to(working_dtype(a.dtype))
        number, dtype = self.number, working_dtype(a.dtype)
        if number is None or (number.dtype, number.device) != (dtype, a.device):
            with torch.inference_mode(False):  # it outlives the call, as the vector of a norm does
                number = torch.full((), self.gamma, dtype=dtype, device=a.device)
            if not torch.compiler.is_compiling():
                self.number = number  # kept: a CUDA graph knows it by its address
        return number

    def observe(self, distances: Tensor) -> None:
        """Update M with ‖rᵢW_h‖² of every patch at an equilibrium."""
        assert isinstance(self.gamma, Adaptive)
        smallest, looks = self.get_buffer("smallest"), self.get_buffer("looks")
        found = torch.maximum(distances.min(), self.gamma.floor * distances.mean()).to(smallest)
        # One bad batch must not spoil γ for good, nor a patch with r = 0.
        found = torch.where(found.isfinite() & (found > 0), found, smallest)
        smallest.lerp_(found, torch.where(looks == 0, 1.0, self.gamma.momentum).to(smallest))
        looks += 1


class AbstractLossKernel(AbstractKernel):
    """S = −ρ(a − v), a loss of what Wz leaves of a; its slopes, the eigenvalues of ∂²ρ for W_h = 1, have two bounds."""

    in_state: ClassVar[bool] = False
    through_features: ClassVar[bool] = True
    steepest: ClassVar[float]  # the supremum of the slopes' size
    lowest: ClassVar[float]  # their infimum

    @property
    def convex_loss(self) -> bool:
        return self.lowest >= 0 and self.steepest <= 1

    def max_norm(self, norm: float) -> float:
        return norm / self.steepest**0.5

    def bounds(self, square: Number, norm: float) -> tuple[Number, Number]:
        return self.steepest * square, 1 + min(0.0, self.lowest) * square

    def state_hvp(self, at: Binding, z: Tensor) -> None:
        return None

    def unit(self, norm: float, size: int) -> float:
        return 1.0

    def input_lipschitz(self, gain: float) -> float:
        """Return the Lipschitz constant of aW_h ↦ z*, patch by patch, where ‖W_hᵀW‖ ≤ `gain`; ∞ where z* may not be
        unique."""
        return input_lipschitz(gain, self.lowest, self.steepest)

    def constants(self, norm: float, hidden: float) -> KernelConstants:
        gain = norm * hidden
        lipschitz, convexity = self.bounds(gain**2, norm)
        return KernelConstants(
            gain,
            push=norm * hidden**2 * self.steepest,
            lipschitz=lipschitz,
            threshold=None if self.lowest >= 0 else -self.steepest / self.lowest,
            convexity=convexity,
            sensitivity=self.input_lipschitz(gain),
        )


@dataclasses.dataclass(frozen=True)
class AbstractRadialKernel(AbstractLossKernel):
    """S = Σᵢ η(sᵢ)/γ, sᵢ = γ‖rᵢW_h‖², on the patches rᵢ of r = a − v: GEQ (16), KerDEQ (12) and its Algorithm 1.

    A kernel is η (`height`), ω = −2η′ (`weight`) and ω′ (`slope`), written with torch's functions, and two constants:
    `steepest`, the supremum of |ω| and |ω + 2sω′|, and `lowest`, the infimum of ω + 2sω′. All else follows: energy,
    L = steepest·‖W‖²‖W_h‖², μ = 1 + min(0, lowest)·‖W‖²‖W_h‖², backward product, and the Triton program, where the
    three functions are arithmetic (no `**`) and `torch.exp`, `log`, `sqrt`, `rsqrt` …, which `triton.language` has too.

    In a convolutional cell a patch is `split` channels × `patch` × `patch` pixels (8 channels where not said); in a
    dense one it is `split` entries, or the whole vector.
    """

    equation: ClassVar[str] = "z = relu(Wᵀm), mᵢ = ω(γ‖rᵢW_h‖²) rᵢW_hW_hᵀ, r = Ux + b − Wz"
    reach: ClassVar[float] = math.inf  # sup of √s |ω|, where it is stated: how hard a patch pushes, however long it is

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

    def parameters(self, features: int, conv: bool) -> "PatchParameters":
        split = self.split or (8 if conv else features)
        if features % split:
            raise ValueError(f"`split` must divide the number of features: {features} is not a multiple of {split}.")
        return PatchParameters(split, self.patch if conv else 1, self.hidden, self.gamma)

    def bind(self, parameters: AbstractParameters | None, a: Tensor, norm: float) -> Binding:
        assert isinstance(parameters, PatchParameters)
        patch = parameters.patch
        if a.dim() == 4 and (a.shape[2] % patch or a.shape[3] % patch):
            raise ValueError(
                f"`patch` must divide the picture: {a.shape[2]}×{a.shape[3]} is not a multiple of {patch}."
            )
        return Binding(a, parameters.Q(), parameters.width(a), parameters.split, patch)

    def differentiate(self, at: Binding, z: Tensor | None, v: Tensor | None, value: bool) -> Slope:
        assert at.Q is not None and at.gamma is not None
        m, total = radial_step(type(self), at.a, v, at.Q, at.gamma, split=at.split, patch=at.patch, value=value)
        return Slope(None, m, total) if at.bias is None else at.add_bias(z, m, total)

    def hvp(self, at: Binding, v: Tensor) -> Callable[[Tensor], Tensor]:
        assert at.Q is not None and at.gamma is not None
        return radial_hvp(type(self), at.a, v, at.Q, at.gamma, split=at.split, patch=at.patch)

    def weights(self, at: Binding, v: Tensor) -> Tensor:
        """Return ω(sᵢ): 1 where v explains the patch of a, towards 0 where it does not."""
        assert at.Q is not None and at.gamma is not None
        _, _, s = _products(at.a.to(at.Q.dtype), v, at.Q, at.gamma, at.split, at.patch, last=False)
        height, width = at.a.shape[2:] or (at.patch, at.patch)
        return self.weight(s).view(len(at.a), -1, height // at.patch, width // at.patch)


Formula = type[AbstractRadialKernel]  # η, ω and ω′ are static methods


def radial_step(
    formula: Formula, a: Tensor, v: Tensor | None, Q: Tensor, gamma: Tensor,
    *, split: int, patch: int, value: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return m = ∂S/∂v like `a`, and with `value` also S per sample, (batch,), in float32 (float64 for float64).

    `a` and `v` are (batch, channels, height, width), or (batch, features): pictures of one pixel. r = a − v is cut
    into patches of `split` channels × `patch` × `patch` pixels, whose n entries Q (n × n, symmetric) counts in the
    order (channel, row, column). No `v` means v = 0, and nothing is read for it. γ is a number in float32 (float64 for
    float64). Differentiable in a, v, Q and γ.
    """
    if v is not None and v.shape != a.shape:
        raise ValueError(f"`v` must have the shape of `a`, {tuple(a.shape)}, got {tuple(v.shape)}.")
    if _runs_fused(formula, a, split, patch):
        return fused_step(formula, plain_step, a, v, Q, gamma, split, patch, value)
    return plain_step(formula, a, v, Q, gamma, split, patch, value)


def plain_step(
    formula: Formula, a: Tensor, v: Tensor | None, Q: Tensor, gamma: Tensor, split: int, patch: int, value: bool
) -> tuple[Tensor, Tensor | None]:
    """`radial_step` in plain PyTorch; m in the dtype and memory order of `a`."""
    last = a.dim() == 4 and not a.is_contiguous()  # then it is stored channels-last
    _, q, s = _products(a, v, Q, gamma, split, patch, last)
    m = formula.weight(s).unsqueeze(-1) * q
    return join(m, a, split, patch, last), formula.height(s).sum(1) / gamma if value else None


def radial_hvp(
    formula: Formula, a: Tensor, v: Tensor, Q: Tensor, gamma: Tensor, *, split: int, patch: int
) -> Callable[[Tensor], Tensor]:
    """Return y ↦ −(ω Q + 2γω′ qᵀq) y, patch by patch, which is ∂²S/∂v² y; no gradients flow through it.

    ∂m/∂v is this (symmetric) matrix, so that the product is the pullback of the step to v. In plain PyTorch all that
    does not depend on y is computed once.
    """
    a, v, Q = a.detach(), v.detach(), Q.detach()
    gamma = gamma.detach()
    if _runs_fused(formula, a, split, patch):
        return fused_hvp(formula, a, v, Q, gamma, split, patch)
    last = a.dim() == 4 and not a.is_contiguous()  # then it is stored channels-last
    Q, q, s = _products(a, v, Q, gamma, split, patch, last)
    w, slope = -formula.weight(s).unsqueeze(-1), -2 * gamma * formula.slope(s)

    def product(y: Tensor) -> Tensor:
        y = cut(y, split, patch, last).to(Q.dtype)
        c = (slope * (y * q).sum(-1)).unsqueeze(-1)  # ⟨yQ, r⟩ = ⟨y, q⟩
        return join(torch.addcmul(w * (y @ Q), c, q), a, split, patch, last)

    return product


def patch_distances(r: Tensor, weight: Tensor, *, split: int, patch: int) -> Tensor:
    """Return t = ‖rᵢW_h‖² of every patch, (batch, patches); `weight` is W_hᵀ, hidden × n."""
    rows = cut(r.to(weight.dtype), split, patch, last=False)
    return (rows @ weight.mT).square().sum(-1)


def _products(
    a: Tensor, v: Tensor | None, Q: Tensor, gamma: Tensor, split: int, patch: int, last: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Q in the order and dtype of the patches r of a − v, q = rQ, (batch, patches, n), and s = γ⟨q, r⟩.

    q is in float32 at least, as in Triton's form: in float16 the square of 256 is infinite, and ω of it 0.
    """
    r = cut(a if v is None else (a - v).to(a.dtype), split, patch, last)
    if last:  # from (channel, pixel), as Q's entries are counted, to (pixel, channel)
        pixels = patch * patch
        Q = Q.reshape(split, pixels, split, pixels).permute(1, 0, 3, 2).reshape(Q.shape)
    Q = Q.to(r.dtype)
    q = (r @ Q).to(gamma.dtype)
    return Q, q, gamma * (q * r).sum(-1)


def cut(x: Tensor, split: int, patch: int, last: bool) -> Tensor:
    """Cut (batch, channels, height, width), or (batch, features), into patches (batch, patches, n).

    Patches and entries run (row, column, channel) if `last`, else (channel, row, column), so that either copy moves
    the longest runs its memory has.
    """
    if x.dim() == 2:
        return x.reshape(x.shape[0], -1, split)
    B, C, H, W = x.shape
    if last:
        blocks = x.permute(0, 2, 3, 1).reshape(B, H // patch, patch, W // patch, patch, C // split, split)
    else:
        blocks = x.reshape(B, C // split, split, H // patch, patch, W // patch, patch)
    return blocks.permute(0, 1, 3, 5, 2, 4, 6).reshape(B, -1, split * patch * patch)


def join(x: Tensor, like: Tensor, split: int, patch: int, last: bool) -> Tensor:
    """Undo `cut`: patches back into the shape, memory order and dtype of `like`."""
    x = x.to(like.dtype)
    if like.dim() == 2:
        return x.reshape(like.shape)
    B, C, H, W = like.shape
    h, w, g = H // patch, W // patch, C // split
    if last:
        blocks = x.reshape(B, h, w, g, patch, patch, split).permute(0, 1, 4, 2, 5, 3, 6)
        return blocks.reshape(B, H, W, C).permute(0, 3, 1, 2)
    return x.reshape(B, g, h, w, split, patch, patch).permute(0, 1, 4, 2, 5, 3, 6).reshape(B, C, H, W)


def _runs_fused(formula: Formula, a: Tensor, split: int, patch: int) -> bool:
    return a.is_cuda and has_programs(formula, a, split, patch)


def input_lipschitz(w: float, lowest: float, steepest: float = 1.0) -> float:
    """Return the least K with ‖z*(a) − z*(a′)‖ ≤ K‖a − a′‖ for every W with ‖W‖ ≤ w, where ωr has slopes in [−c, S].

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
    """W_h of GEQ (16), as r ↦ W_hᵀr (`project`, hidden × n), and γ (`width`)."""

    def __init__(self, split: int, patch: int, hidden: int, gamma: float | Adaptive):
        super().__init__()
        self.split, self.patch = split, patch
        size = split * patch * patch
        self.project = Operator(size, hidden)
        nn.init.orthogonal_(self.project.weight)
        self.width = Width(gamma, size)

    def gain(self) -> Tensor:
        """‖W_h‖."""
        return self.project.norm(self.project.weight)

    @property
    def excess(self) -> float:
        return self.project.excess

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
    """ω = e^{−s}, the kernel of KerDEQ (5), (6) and GEQ (5), (6): S = (1/2γ) Σᵢ exp(−γ‖rᵢW_h‖²). As a loss: Welsch's.

    rᵢ are the patches of r = Ux + b − Wz, s = γ‖rᵢW_h‖², and W_h is a trainable matrix: see `AbstractRadialKernel`.
    L = ‖W‖²‖W_h‖² whatever γ and the input, and E is strongly convex, so that the equilibrium is unique, for
    L < ½e^{3/2} ≈ 2.24 (docs/theory.md, fact 2).
    """

    equation: ClassVar[str] = "z = relu(Wᵀm), mᵢ = exp(−γ‖rᵢW_h‖²) rᵢW_hW_hᵀ, r = Ux + b − Wz"
    steepest: ClassVar[float] = 1.0  # at s = 0
    lowest: ClassVar[float] = -2 * math.exp(-1.5)  # at s = 3/2
    reach: ClassVar[float] = (2 * math.e) ** -0.5  # at s = 1/2

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

    equation: ClassVar[str] = "z = relu(Wᵀm), mᵢ = (1 + γ‖rᵢW_h‖²)^{−1/2} rᵢW_hW_hᵀ, r = Ux + b − Wz"
    steepest: ClassVar[float] = 1.0  # at s = 0
    lowest: ClassVar[float] = 0.0  # as s → ∞
    reach: ClassVar[float] = 1.0  # as s → ∞

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

    equation: ClassVar[str] = "z = relu(Wᵀm), mᵢ = (1 + γ‖rᵢW_h‖²)^{−1} rᵢW_hW_hᵀ, r = Ux + b − Wz"
    steepest: ClassVar[float] = 1.0  # at s = 0
    lowest: ClassVar[float] = -1 / 8  # at s = 3
    reach: ClassVar[float] = 0.5  # at s = 1

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
