"""Spectra of kernel weights: whether kGLM's Assumptions 1 and 2 hold, and what is guaranteed without them."""

import dataclasses
import math
from typing import final

import torch
from torch import Tensor

from .families import FLAT, AbstractFamily, Prior


@final
@dataclasses.dataclass(frozen=True)
class Guarantee:
    """What is known about the equilibrium (7), z = σ(W₁z + W₂T + W₃ρ(z)); `str` says it in words.

    Beyond the paper: A′ + Q′ is monotone, so whenever K is positive semi-definite the equilibrium exists, is unique,
    and its readout is the kernel GLM's prediction. Assumption 1 is never needed (α = (T − z − ρ)/λ minimises J for
    any such K, and k(·, X) does not see the null space of K), Assumption 2 only makes plain iteration converge.
    """

    smallest: float  # least eigenvalue of K, or a lower bound
    norm: float  # ‖K/λ‖, or an upper bound
    contraction: float  # ‖K/λ‖ sup A″ sup(1 + ρ′), Assumption 2's number
    lipschitz: float  # L = ‖K/λ‖ sup(A″ + Q″), of the map in canonical coordinates
    rounding: float  # eigenvalues closer to 0 than this are 0
    bounded: bool = True  # A″ + Q″ has a bound; else `contraction` and `lipschitz` hold for certain targets at best

    @property
    def assumption1(self) -> bool:
        """Assumption 1: K is strictly positive definite."""
        return self.smallest > self.rounding

    @property
    def semidefinite(self) -> bool:
        """K is positive semi-definite to rounding: the layer is the kernel GLM."""
        return self.smallest >= -self.rounding

    @property
    def assumption2(self) -> bool:
        """Assumption 2: the map contracts (Proposition 4), so plain iteration converges to its only fixed point."""
        return self.contraction < 1

    @property
    def relaxation(self) -> float:
        """2 / (2 + L): with it, iteration in canonical coordinates contracts by L / (2 + L) in the kernel's norm.

        It is gradient descent on the inner problem in the kernel's space: λ-strongly convex, λ(1 + L)-smooth.
        """
        return 2 / (2 + self.lipschitz)

    def __str__(self) -> str:
        least, number = f"(least eigenvalue {self.smallest:.1e})", f"{self.contraction:.3g}"
        if self.assumption1:
            words = [f"Assumption 1 holds: K is positive definite {least}."]
        elif self.semidefinite:
            words = ["Assumption 1 fails: K is singular to rounding. It is not needed:"]
            words += ["the readout is the same for every minimiser."]
        else:
            words = [f"K is not positive semi-definite {least}: no convex kernel GLM belongs to this layer;"]
            words += ["an equilibrium is a stationary point of J at best."]
        if self.assumption2:
            words += [f"Assumption 2 holds: the map contracts by {number},"]
            words += ["so plain iteration finds the only equilibrium (Proposition 4)."]
            if not self.bounded:
                words += ["That is for the targets given: A″ has no bound, so the layer uses damped Newton."]
        elif not self.semidefinite:
            words += [f"Assumption 2 fails (its number is {number}): nothing is known about uniqueness."]
        else:
            words += [f"Assumption 2 fails (its number is {number}): plain iteration may not converge."]
            way = f"relaxed iteration in canonical coordinates with step {self.relaxation:.2g} finds it"
            if not self.bounded:
                way = "A″ has no bound, so no step serves all targets, but damped Newton finds it for every λ > 0"
            words += [f"The equilibrium is unique all the same; {way}."]
        if self.semidefinite:
            words += ["The layer and the kernel GLM are the same function of the targets (Corollary 6)."]
        return " ".join(words)


def check_assumptions(
    K: Tensor,
    lam: float,
    family: AbstractFamily,
    prior: Prior = FLAT,
    *,
    size: tuple[int, int] | None = None,
    drive: Tensor | None = None,
) -> Guarantee:
    """Check Assumption 1 and Assumption 2 for a matrix K (n, n), or filters (c, c, k, k) and images of `size` (h, w).

    Filters give rigorous bounds, never exact: the convolution, zero-padded, is a corner of the circular one on a larger
    torus, whose spectrum the FFT gives. The `drive` (K/λ)T + m helps a family whose A″ is unbounded (Poisson): if
    K ≥ 0 entrywise, σ > 0 and the prior is flat, iterates stay below its maximum, where A″ is bounded.
    """
    if size is None:
        eigenvalues, terms = torch.linalg.eigvalsh(K.double()), len(K)
    else:
        radius = K.shape[-1] // 2
        torus = size[0] + 2 * radius, size[1] + 2 * radius
        row, column = (torch.arange(n, device=K.device, dtype=torch.float64) / n for n in torus)
        # moving the filter's centre to the origin makes a symmetric filter's symbol Hermitian
        phase = torch.exp(2j * math.pi * radius * (row[:, None] + column[None, :]))
        eigenvalues, terms = torch.linalg.eigvalsh(_symbol(K.double(), torus) * phase[:, :, None, None]), 1000
    largest = eigenvalues.abs().max().item()
    norm, curvature = largest / lam, prior.max_curvature()
    below = math.inf if drive is None or not prior.flat or bool((K < 0).any()) else drive.max().item()
    lowest, highest = family.variance_range(below)
    # ρ′ = Q″ ∘ (A′)⁻¹ / A″ ∘ (A′)⁻¹; the published sup takes A″ and ρ′ at one z, but in the map they meet at two
    steepest = 0.0 if curvature == 0 else curvature / lowest if lowest > 0 else math.inf
    return Guarantee(
        smallest=eigenvalues.min().item(),
        norm=norm,
        contraction=norm * highest * (1 + steepest),
        lipschitz=norm * (highest + curvature),
        rounding=terms * torch.finfo(K.dtype).eps * largest,
        bounded=math.isfinite(family.variance_range()[1] + curvature),
    )


def _symbol(weight: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the convolution's action per frequency (Sedghi et al., 2018): (…, out, in, k, k) → (…, h, w, out, in).

    Their singular values, all frequencies together, are those of the circular convolution.
    """
    if weight.shape[-2] > size[0] or weight.shape[-1] > size[1]:
        raise ValueError(f"A filter {tuple(weight.shape[-2:])} does not fit an image {size}.")
    return torch.fft.fft2(weight, s=size).movedim((-2, -1), (-4, -3))


def spectral_norm(weight: Tensor, size: tuple[int, int] | None = None) -> Tensor:
    """Return ‖W‖, exact, of a matrix (m, n) or of circular convolutions (…, out, in, k, k) on images of `size`, (…)."""
    if weight.ndim == 2:
        return torch.linalg.matrix_norm(weight, ord=2)
    if weight.ndim < 4:
        raise ValueError(f"Expected a weight (m, n) or (…, out, in, kh, kw), got shape {tuple(weight.shape)}.")
    if size is None:
        raise ValueError("The norm of a convolution depends on the image: pass `size=(height, width)`.")
    return torch.linalg.matrix_norm(_symbol(weight, size), ord=2).amax((-2, -1))
