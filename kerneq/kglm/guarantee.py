"""Which of the paper's assumptions hold for a kernel matrix, and what can be promised without them."""

import dataclasses
import math
from typing import final

import torch
from torch import Tensor

from kerneq.kglm.family import AbstractFamily
from kerneq.kglm.prior import FLAT, AbstractPrior


@final
@dataclasses.dataclass(frozen=True)
class Guarantee:
    """What is known about z = σ(W₁z + W₂T + W₃ρ(z)); `str` says it in words.

    Beyond the paper: A′ + Q′ is monotone, so whenever K is positive semi-definite the equilibrium exists,
    is unique, and its readout is the kernel GLM's prediction. Assumption 1 is never needed (α = (T − z −
    ρ)/λ minimises J for any such K, and k(·, X) does not see the null space of K), Assumption 2 only makes
    plain iteration converge.
    """

    smallest: float  # least eigenvalue of K, or a lower bound
    norm: float  # ‖K/λ‖, or an upper bound
    contraction: float  # ‖K/λ‖ sup A″ sup(1 + ρ′), Assumption 2's number
    canonical: float  # L = ‖K/λ‖ sup(A″ + Q″), the Lipschitz constant in canonical coordinates
    rounding: float  # eigenvalues closer to 0 than this are 0

    @property
    def assumption1(self) -> bool:
        """K is strictly positive definite."""
        return self.smallest > self.rounding

    @property
    def semidefinite(self) -> bool:
        return self.smallest >= -self.rounding

    @property
    def assumption2(self) -> bool:
        """The map contracts, so plain iteration converges to its only fixed point."""
        return self.contraction < 1

    @property
    def relaxation(self) -> float:
        """2 / (2 + L): with it, iteration in canonical coordinates contracts by L / (2 + L) in the kernel's
        norm.

        It is gradient descent on the inner problem in the kernel's space: λ-strongly convex, λ(1 + L)-smooth.
        """
        return 2 / (2 + self.canonical)

    def __str__(self) -> str:
        words = f"{self._first()} {self._second()}"
        if self.semidefinite:
            words += " The layer and the kernel GLM are the same function of the targets (Corollary 6)."
        return words

    def _first(self) -> str:
        if self.assumption1:
            return f"Assumption 1 holds: K is positive definite (least eigenvalue {self.smallest:.1e})."
        if self.semidefinite:
            return (
                "Assumption 1 fails: K is singular to rounding. It is not needed: the readout is the same "
                "for every minimiser."
            )
        return (
            f"K is not positive semi-definite (least eigenvalue {self.smallest:.1e}): no convex kernel GLM "
            "belongs to this layer; an equilibrium is a stationary point of J at best."
        )

    def _second(self) -> str:
        number = f"{self.contraction:.3g}"
        if self.assumption2:
            return (
                f"Assumption 2 holds: the map contracts by {number}, so plain iteration finds the only "
                "equilibrium (Proposition 4)."
            )
        if not self.semidefinite:
            return f"Assumption 2 fails (its number is {number}): nothing is known about uniqueness."
        way = "A″ has no bound, so use Newton's method or state a bound on the data"
        if math.isfinite(self.canonical):
            way = f"relaxed iteration in canonical coordinates with step {self.relaxation:.2g} finds it"
        return (
            f"Assumption 2 fails (its number is {number}): plain iteration may not converge. "
            f"The equilibrium is unique all the same; {way}."
        )


def certify(
    K: Tensor,
    lam: float,
    family: AbstractFamily,
    prior: AbstractPrior = FLAT,
    *,
    t: Tensor | None = None,
    offset: Tensor | None = None,
) -> Guarantee:
    """The guarantee for a dense kernel matrix. Targets `t` = T(Y) help a family whose A″ is unbounded
    (Poisson).

    There, if K ≥ 0 entrywise and σ > 0, iterates stay below η_max = max((K/λ)T + m), where A″ is bounded.
    """
    eigenvalues = torch.linalg.eigvalsh(K.double())
    below = math.inf
    if t is not None and math.isinf(family.curvature()) and bool((K >= 0).all()):
        top = t @ K / lam if offset is None else t @ K / lam + offset
        below = top.max().item()
    rounding = K.shape[0] * torch.finfo(K.dtype).eps * eigenvalues[-1].item()
    return from_spectrum(eigenvalues[0].item(), eigenvalues.abs().max().item(), lam, family, prior, rounding, below)


def from_spectrum(
    smallest: float,
    largest: float,
    lam: float,
    family: AbstractFamily,
    prior: AbstractPrior,
    rounding: float,
    below: float = math.inf,
) -> Guarantee:
    """The guarantee from bounds on the spectrum of K."""
    norm, bend = largest / lam, prior.curvature()
    # ρ′ = Q″ ∘ (A′)⁻¹ / A″ ∘ (A′)⁻¹; the published sup takes A″ and ρ′ at one z, but in the map they meet
    # at two
    floor = family.floor()
    steepest = 0.0 if bend == 0 else (bend / floor if floor > 0 else math.inf)
    curve = family.curvature(below)
    return Guarantee(smallest, norm, norm * curve * (1 + steepest), norm * (curve + bend), rounding)
