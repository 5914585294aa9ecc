"""The settings of a multi-branch equilibrium classifier: plain values only, so that TOML can say them."""

import dataclasses
from typing import Any

from ..cells import AbstractCell
from ..equilibrium import Equilibrium
from ..gradients import AbstractGradient, ConjugateGradient, Implicit, InFeatures, Phantom, Unrolled
from ..kernels import AbstractKernel, Adaptive, Fixed, Gaussian, Linear, Polynomial, Sigmoid
from ..solvers import AbstractSolver, Anderson, Broyden, Picard, Proximal


@dataclasses.dataclass(frozen=True)
class SolveConfig:
    """How every equilibrium layer of a model is solved and differentiated."""

    solver: str = "proximal"  # proximal, picard, anderson, broyden
    memory: int = 5  # of proximal, anderson, broyden; proximal with 0 is the bare step
    relaxation: float = 1.0  # of picard, forward and backward, and of anderson
    tol: float = 1e-3
    max_steps: int = 30
    forward: str = "state"  # or features: iterate on v = Wz, smaller, where that pays (picard, anderson, broyden)
    check_every: int = 0  # steps between two looks at the residual; 0 leaves it to `kerneq.solve`
    gradient: str = "implicit"  # implicit, phantom, unrolled
    backward: str = "features"  # of the implicit gradient: features (the cheapest), state (conjugate gradient), map
    gradient_steps: int = 20  # of the backward solve, the phantom steps, or the unrolled ones
    gradient_solver: str = "anderson"  # in the features or of the map: anderson, or picard, cheaper where f contracts
    gradient_tol: float = 1e-3  # of the backward solve
    gradient_relaxation: float = 0.8  # of the phantom steps

    def make_layer(self, cell: AbstractCell) -> Equilibrium:
        return Equilibrium(
            cell,
            solver=self._forward(),
            gradient=self.make_gradient(),
            tol=self.tol,
            max_steps=self.max_steps,
            check_every=self.check_every or None,
        )

    def _forward(self) -> AbstractSolver[Any] | InFeatures:
        match self.forward:
            case "state":
                return self.make_solver()
            case "features":
                return InFeatures(self.make_solver())
        raise ValueError(f"`forward` must be state or features, got {self.forward!r}.")

    def make_solver(self) -> AbstractSolver[Any]:
        match self.solver:
            case "proximal":
                return Proximal(memory=self.memory)
            case "picard":
                return Picard(self.relaxation)
            case "anderson":
                return Anderson(memory=self.memory, relaxation=self.relaxation)
            case "broyden":
                return Broyden(memory=self.memory)
        raise ValueError(f"`solver` must be proximal, picard, anderson or broyden, got {self.solver!r}.")

    def make_backward_solver(self) -> AbstractSolver[Any]:
        match self.gradient_solver:
            case "anderson":
                return Anderson(memory=3)
            case "picard":
                return Picard(self.relaxation)
        raise ValueError(f"`gradient_solver` must be anderson or picard, got {self.gradient_solver!r}.")

    def make_gradient(self) -> AbstractGradient:
        match self.gradient:
            case "implicit":
                solver, look = self._backward(), self.check_every or None
                # While training, a backward solve that stops at its step limit is a choice, not an accident.
                return Implicit(solver, self.gradient_tol, self.gradient_steps, look, on_failure="return")
            case "phantom":
                return Phantom(self.gradient_steps, self.gradient_relaxation)
            case "unrolled":
                return Unrolled(self.gradient_steps)
        raise ValueError(f"`gradient` must be implicit, phantom or unrolled, got {self.gradient!r}.")

    def _backward(self) -> AbstractSolver[Any] | ConjugateGradient | InFeatures:
        match self.backward:
            case "features":
                return InFeatures(self.make_backward_solver())
            case "state":
                return ConjugateGradient()
            case "map":  # u = Jᵀu + g as it stands, for maps that come from no energy
                return self.make_backward_solver()
        raise ValueError(f"`backward` must be features, state or map, got {self.backward!r}.")


@dataclasses.dataclass(frozen=True)
class ClassifierConfig(SolveConfig):
    """stem → equilibrium branches at several scales → fusion → head."""

    kernel: str = "gaussian"  # gaussian, linear, polynomial, sigmoid
    width: int = 256  # channels of the stem and of every state z
    features: tuple[int, ...] = (64, 128, 128, 128, 256, 256)  # channels of v = Wz, a branch each
    scales: tuple[int, ...] = (1, 2, 4, 4, 8, 8)  # how often smaller than the stem's output each branch is
    fusion: int = 4  # the scale at which the branches are averaged
    stem: str = "cifar"  # cifar: three 3×3 convolutions; imagenet: two, each with stride 2; plain: one
    norm: float = 1.0  # bound on ‖W‖‖W_h‖
    gamma: float = 0.2  # γ, or with `adaptive` the share in γ = share / M
    adaptive: bool = True
    patch: int = 2
    split: int = 8
    hidden: int = 64
    activity: float = 0.5  # sᵢ = γ‖rᵢW_h‖² at initialisation, where γ is fixed
    overlap: bool = True  # on a GPU, solve the branches side by side
    degree: int = 2  # of the polynomial kernel
    offset: float = 1.0

    def __post_init__(self) -> None:
        if len(self.features) != len(self.scales) or not self.features:
            raise ValueError(
                f"`features` and `scales` need one entry a branch, got {len(self.features)} and {len(self.scales)}."
            )
        if not self.activity > 0:
            raise ValueError(f"`activity` must be positive, got {self.activity}.")

    def make_kernel(self) -> AbstractKernel:
        match self.kernel:
            case "gaussian":
                gamma = Adaptive(self.gamma) if self.adaptive else Fixed(self.gamma)
                return Gaussian(gamma, patch=self.patch, split=self.split, hidden=self.hidden)
            case "linear":
                return Linear()
            case "polynomial":
                return Polynomial(self.degree, self.offset)
            case "sigmoid":
                return Sigmoid()
        raise ValueError(f"`kernel` must be gaussian, linear, polynomial or sigmoid, got {self.kernel!r}.")

    @property
    def input_scale(self) -> float:
        """The standard deviation of a at initialisation: with W_h an isometry, E sᵢ = γ·n·scale² = `activity`."""
        if self.kernel != "gaussian" or self.adaptive:
            return 1.0
        return (self.activity / (self.gamma * self.split * self.patch**2)) ** 0.5
