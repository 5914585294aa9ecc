"""What it means to check a claim by numbers: the worst case that can be found, against the bound.

The left-hand side of an inequality over its right-hand side is a ratio, at most 1 where the inequality holds. Claims
are attacked: `ascend` optimises weights and inputs by gradient ascent to make the ratio as large as it can.
"""

import dataclasses
import enum
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from ...equilibrium import fixed_point
from ...gradients import Implicit
from ...kernels import AbstractRadialKernel, Gaussian
from ...solvers import Newton
from .propositions import geq_map, opteq_map

ROUNDING = 1e-6  # a ratio above 1 by no more than this is rounding
RESTARTS = 32  # of a search, side by side
SOLVED = 1e-9  # relative residual of an equilibrium that counts as evidence


class Verdict(enum.Enum):
    """How a claim fared."""

    HOLDS = "holds"
    CORRECTED = "holds when corrected"
    FAILS = "fails"


@final
@dataclasses.dataclass(frozen=True)
class WorstCase:
    """The largest left-hand side over right-hand side that was found, and where."""

    published: float  # of the claim as it is stated
    where: str  # the worst case, in words
    corrected: float | None = None  # of its corrected form, where there is one

    @property
    def verdict(self) -> Verdict:
        """NaN and negative ratios (a negative bound) are failures."""
        if 0 <= self.published <= 1 + ROUNDING:
            return Verdict.HOLDS
        fixed = self.corrected is not None and 0 <= self.corrected <= 1 + ROUNDING
        return Verdict.CORRECTED if fixed else Verdict.FAILS


Claim = Callable[[], WorstCase]  # checks what the first line of its docstring states: "SOURCE: CLAIM. Erratum: …."


@final
@dataclasses.dataclass(frozen=True)
class Finding:
    """What the check of a claim found."""

    claim: str
    published: str  # where
    erratum: str | None  # what is wrong with it as published, where that is known
    evidence: WorstCase
    seconds: float

    @property
    def verdict(self) -> Verdict:
        return self.evidence.verdict

    @property
    def explained(self) -> bool:
        """Whether this is what is known: a claim that fails has a known error and a corrected form that holds."""
        return self.verdict is (Verdict.HOLDS if self.erratum is None else Verdict.CORRECTED)

    @property
    def worst(self) -> str:
        """The ratios in few digits."""
        found = (self.evidence.published, self.evidence.corrected)
        return " → ".join(f"{ratio:.3g}" for ratio in found if ratio is not None)

    def row(self) -> dict[str, str | float | bool | None]:
        """Return the finding as JSON has it."""
        return {
            "claim": self.claim,
            "published": self.published,
            "verdict": self.verdict.value,
            "explained": self.explained,
            "ratio": self.evidence.published,
            "corrected_ratio": self.evidence.corrected,
            "worst_case": self.evidence.where,
            "erratum": self.erratum,
            "seconds": round(self.seconds, 3),
        }


def read_statement(claim: Claim) -> tuple[str, str, str | None]:
    """Return what a claim says, where it is published, and its known error."""
    source, _, words = (claim.__doc__ or "").partition("\n")[0].removesuffix(".").partition(": ")
    name, _, erratum = words.partition(". Erratum: ")
    return name, source, erratum or None


def check_claims(claims: Sequence[Claim]) -> Iterator[Finding]:
    """Check each claim, in float64, on one thread, from a seed of its own."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    for claim in claims:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            torch.set_default_dtype(torch.float64)
            torch.set_num_threads(1)
            start = time.perf_counter()
            try:
                evidence = claim()
            finally:
                torch.set_default_dtype(dtype)
                torch.set_num_threads(threads)
        yield Finding(*read_statement(claim), evidence, time.perf_counter() - start)


def ascend(ratio: Callable[..., Tensor], *starts: Tensor, steps: int = 40, rate: float = 0.05) -> float:
    """Return the largest of ratio(*points), (restarts,), met by gradient ascent (Adam on its logarithm) from `starts`.

    Each start is (restarts, ...): the restarts climb side by side. Values that are not finite are not counted; if none
    is, the answer is NaN.
    """
    points = [start.clone().requires_grad_() for start in starts]
    optimiser = torch.optim.Adam(points, lr=rate)
    met: list[float] = []
    for _ in range(steps):
        value = ratio(*points)
        finite = value[value.isfinite()]
        met += [float(finite.detach().max())] if len(finite) else []
        rising = finite[finite > 0]
        if not len(rising):
            break
        optimiser.zero_grad()
        (-rising.log().sum()).backward()  # type: ignore[no-untyped-call]
        for point in points:
            if point.grad is not None:
                point.grad.nan_to_num_(0.0)
        optimiser.step()
    return max(met, default=math.nan)


def find_largest(*ratios: float | Tensor) -> float:
    """Return the largest of numbers and entries; NaN where one is NaN, or a claim would hold that was never tested."""
    return float(torch.cat([torch.as_tensor(ratio, dtype=torch.float64).reshape(-1) for ratio in ratios]).max())


def draw_normal(*sizes: tuple[int, ...]) -> list[Tensor]:
    """Return normal random numbers of each size, for every restart."""
    return [torch.randn(RESTARTS, *size) for size in sizes]


def scale_to_norm(raw: Tensor, norm: float) -> Tensor:
    """Return matrices (restarts, rows, columns) scaled to a spectral norm."""
    return raw * (norm / torch.linalg.matrix_norm(raw, 2))[:, None, None]


def solve_geq(W: Tensor, a: Tensor, gamma: float, kernel: type[AbstractRadialKernel] = Gaussian) -> Tensor:
    """Return z = σ(ωWᵀr), r = a − Wz, with weights of its own for each restart; NaN where it was not found."""
    return find_fixed_point(geq_map(W, a, gamma, kernel), torch.zeros(len(W), W.shape[2]))


def solve_opteq(M: Tensor, a: Tensor) -> Tensor:
    """Return z = σ(Mz + a), the same for OptEq; ‖M‖ < 1."""
    return find_fixed_point(opteq_map(M, a), torch.zeros_like(a))


def find_fixed_point(f: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Return the fixed point of f by Newton's method, with gradients; NaN where it was not found."""
    implicit = Implicit(Newton(), on_failure="return")
    solution = fixed_point(f, start, solver=Newton(), gradient=implicit, tol=SOLVED, max_steps=40)
    return torch.where(solution.converged[:, None], solution.value, torch.nan)
