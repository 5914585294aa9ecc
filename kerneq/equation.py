"""The equation z = σ(d(z)) at one batch of inputs: what a solver and a gradient see.

`AbstractMap` is any map z ↦ f(z). `Equation` is the map of a cell, which knows more: the hidden problem it comes from,
a smaller space to be solved in (`FeatureMap`), and its own derivative in closed form (`Adjoint`).
"""

import abc
import dataclasses
import functools
import math
import sys
import types
from collections.abc import Callable, Hashable
from typing import Any, Self, final

import torch
from torch import Tensor

from .fused.iterates import relative_residual, rounding_share
from .kernels.base import AbstractKernel, Binding, Slope
from .operators import BoundOperator, bound
from .prox import AbstractProx, ReLU
from .tensors import magnitude, map_tensors, per_sample_norm, take_samples, version, widened

NEAR = 8.0  # times `tol`: from there on the residual of z is measured where v is iterated, at L = 1; less above


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Everything one evaluation at z tells; the parts of E(z) are per sample, and added up only if somebody looks."""

    z: Tensor
    image: Tensor  # f(z)
    drive: Tensor | None = None  # d(z)
    similarity: Tensor | None = None  # S(z), where E(z) was wanted
    length: Tensor | None = None  # ‖z‖
    penalty: Tensor | None = None  # 1ᵀφ(z); None: 0
    state: Tensor | None = None  # what z stands for, where the map lives in another space than the equilibrium
    slope: Slope | None = None  # of S at that state, where it was needed
    features: Tensor | None = None  # Wz, where z is a state and not 0

    @functools.cached_property
    def gap(self) -> Tensor:
        """f(z) − z, computed once for the residual and for the solver."""
        return self.image - self.z

    @functools.cached_property
    def measured(self) -> tuple[Tensor, Tensor]:
        """‖f(z) − z‖ / ‖f(z)‖ and ‖f(z) − z‖ of each sample."""
        return relative_residual(self)

    @functools.cached_property
    def energy(self) -> Tensor | None:
        """E(z) = ½‖z‖² + 1ᵀφ(z) − S(z)."""
        if self.similarity is None or self.length is None:
            return None
        half = 0.5 * self.length.square()
        return (half if self.penalty is None else half + self.penalty) - self.similarity

    @functools.cached_property
    def rounding(self) -> Tensor | None:
        """How far E(z) may be off by rounding alone."""
        if self.similarity is None or self.length is None:
            return None
        return rounding_share(self.image) * (0.5 * self.length.square() + self.similarity.abs())

    @property
    def value(self) -> Tensor:
        """The point of the equation's own space that was evaluated."""
        return self.z if self.state is None else self.state


@dataclasses.dataclass(frozen=True)
class Measurement:
    """How far samples are from their equilibrium, and what decides which of two points is the better one."""

    residual: Tensor  # ‖f(z) − z‖ / ‖f(z)‖
    gap: Tensor  # ‖f(z) − z‖
    merit: Tensor | None = None  # lower is better; None: the residual
    slack: Tensor | None = None  # a merit higher by no more than this counts as equal


@dataclasses.dataclass(frozen=True)
class Linearisation:
    """f at z through the graph of one evaluation: J = ∂f/∂z."""

    z: Tensor  # a leaf
    image: Tensor  # f(z), with its graph

    def vjp(self, u: Tensor) -> Tensor:
        """Jᵀu."""
        if not self.image.requires_grad:  # f does not look at z, nor at anything else that has a gradient
            return torch.zeros_like(u)
        with torch.enable_grad():
            (pulled,) = torch.autograd.grad(
                self.image, self.z, u.to(self.image.dtype), retain_graph=True, allow_unused=True
            )
        return torch.zeros_like(u) if pulled is None else pulled.to(u.dtype)

    def jacobian(self) -> Tensor:
        """J itself, (batch, n, n) for states of n entries, by n products."""
        units = torch.eye(math.prod(self.z.shape[1:]), dtype=self.z.dtype, device=self.z.device)
        rows = [self.vjp(unit.view(self.z.shape[1:]).expand_as(self.z)) for unit in units]
        return torch.stack([row.reshape(len(row), -1) for row in rows], dim=1)

    def solve(self, g: Tensor, transposed: bool = False) -> Tensor:
        """(I − J)⁻¹g, or (I − Jᵀ)⁻¹g, by elimination: n³ operations a sample; not finite where I − J is singular."""
        J = widened(self.jacobian())
        matrix = torch.eye(J.shape[-1], dtype=J.dtype, device=J.device) - (J.mT if transposed else J)
        return torch.linalg.solve_ex(matrix, g.to(J.dtype).reshape(len(g), -1))[0].view_as(g)


class AbstractMap(abc.ABC):
    """A map z ↦ f(z) of batches (batch, ...) whose fixed point is wanted.

    To write one: `__call__`, and mostly `rows`, so that finished samples cost nothing. The other methods say what more
    is known of a map; here all say "nothing", which is right for any function.
    """

    backward: list[Tensor] | None = None  # where a backward solve notes which samples have converged, if anywhere

    @abc.abstractmethod
    def __call__(self, z: Tensor) -> Tensor: ...

    def rows(self, index: Tensor) -> Self | None:
        """The same map for the samples in `index` only; None where that cannot be had."""
        return None

    def evaluate(self, z: Tensor, drive: bool = False, energy: bool = False) -> Evaluation:
        """One evaluation, with the drive and the energy where they are wanted and known."""
        return Evaluation(z, self(z))

    def check_start(self, z0: Tensor) -> None:
        """Refuse a start no solver can work from."""
        if not isinstance(z0, Tensor):
            raise TypeError(f"`z0` must be a tensor (batch, ...), got {type(z0).__name__}.")
        if z0.dim() == 0 or len(z0) == 0 or not z0.is_floating_point():
            raise ValueError(
                f"`z0` must be a floating-point tensor whose first dimension is the batch, of one sample at least, "
                f"got dtype {z0.dtype} and shape {tuple(z0.shape)}."
            )

    def start(self, z0: Tensor | None, drive: bool = False, energy: bool = False) -> Evaluation:
        """The evaluation at z0, which settles the dtype of the iterates: that of f, which autocast may choose."""
        if z0 is None:
            raise TypeError(f"`z0` may be None only for the equation of a cell, got {type(self).__name__}.")
        before = version(z0)
        at = self.evaluate(z0, drive, energy)
        if version(z0) != before:  # f(z) − z would be 0 wherever z is
            raise ValueError("f must not change z in place: write z * 0.5 and z + 1, not z.mul_(0.5) and z += 1.")
        if not isinstance(at.image, Tensor) or at.image.shape != z0.shape:
            got = tuple(at.image.shape) if isinstance(at.image, Tensor) else type(at.image).__name__
            raise ValueError(f"f must keep the shape of z: it got {tuple(z0.shape)} and gave {got}.")
        return dataclasses.replace(at, z=z0.to(at.image.dtype))

    def measure(self, at: Evaluation, tol: float | None = None) -> Measurement:
        """The residual at an evaluation, and E as the merit where it was asked for.

        With a `tol`, whoever asks wants to know only whether it is reached: see `FeatureMap`.
        """
        return Measurement(*at.measured, at.energy, at.rounding)

    def answer(self, at: Evaluation, following: Tensor) -> Tensor:
        """What a solve that ends at an evaluation returns, if the step from there, to `following`, is no loss."""
        return following

    def found(self, z: Tensor, at: Evaluation) -> None:  # noqa: B027
        """Told what a solve of this map returns, and its last evaluation; for maps that can use what that has made."""

    def error_bound(self, gap: Tensor) -> Tensor | None:
        """A bound on ‖z − z*‖, given ‖f(z) − z‖ of each sample."""
        return None

    @property
    def contraction(self) -> Tensor | None:
        """The Lipschitz constant of f, where it is known beforehand to be at most 1."""
        return None

    def in_features(self) -> "FeatureMap | None":
        """The same equation for v = Wz, where it can be solved for that."""
        return None

    def descend(self, at: Evaluation) -> Tensor:
        """A step that lowers the energy."""
        raise TypeError(
            f"`Proximal` descends an energy, so it needs an equation from `cell.bind(x)`, got {type(self).__name__}. "
            "Use `Picard`, `Anderson` or `Broyden` for a plain function."
        )

    def project(self, z: Tensor) -> Tensor:
        """z moved into the domain of φ, which a mixture of points may have left."""
        return z

    def linearise(self, z: Tensor) -> Linearisation:
        """f at z, ready to be differentiated any number of times."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return map_tensors(_recordable, self).linearise(_recordable(z))
        with torch.enable_grad():
            z = z.requires_grad_()
            return Linearisation(z, self(z))

    def closed_adjoint(self, z: Tensor) -> "Adjoint | None":
        """The derivative at the equilibrium z in closed form, where there is such a thing."""
        return None

    def tensors(self) -> tuple[Tensor, ...]:
        """Everything f is known to depend on that may have a gradient."""
        return ()

    def on(self, *tensors: Tensor) -> Self:
        """The same map on other tensors, in the order of `tensors`."""
        return self


@final
@dataclasses.dataclass(frozen=True)
class Function(AbstractMap):
    """Any function of a batch of states, and of inputs (batch, ...): with those it can be restricted to samples."""

    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...] = ()

    def __call__(self, z: Tensor) -> Tensor:
        return self.function(z, *self.inputs)

    def rows(self, index: Tensor) -> Self | None:
        if not self.inputs:
            return None
        return dataclasses.replace(self, inputs=tuple(take_samples(x, index) for x in self.inputs))

    def linearise(self, z: Tensor) -> Linearisation:
        """A function that torch.compile made is taken as it was: it gives its buffers away in one backward pass, and a
        solve makes many."""
        if "torch._dynamo" not in sys.modules:  # nobody compiles: do not wait for the import
            return super().linearise(z)
        with torch.compiler.set_stance("force_eager"):
            return super().linearise(z)


Map = Callable[[Tensor], Tensor]  # what users may give; an `AbstractMap` is one


def as_map(f: Map) -> AbstractMap:
    """f itself if it is a map of ours, else the function as one."""
    return f if isinstance(f, AbstractMap) else Function(f)


@final
@dataclasses.dataclass(eq=False)
class LastProducts:
    """The last two things that were made of a tensor; whoever needs them next asks for them by that very tensor."""

    of: Tensor | None = None
    version: int = 0  # of that tensor: written to, it is another
    made: tuple[Tensor | None, Tensor | None] = (None, None)

    def keep(self, of: Tensor, first: Tensor | None, second: Tensor | None) -> None:
        """Remember both, and nothing else."""
        self.of, self.version, self.made = of, version(of), (first, second)

    def take(self, of: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """What was made of this tensor, if that was the last one; forgotten now, so that it costs no memory."""
        made = self.made if of is self.of and version(of) == self.version else (None, None)
        self.of, self.made = None, (None, None)
        return made


@final
@dataclasses.dataclass(frozen=True)
class Equation(AbstractMap):
    """f(z) = σ(d(z)), the optimality condition of min E(z) = ½‖z‖² + 1ᵀφ(z) − S(z), at one batch of inputs.

    d(z) = ∇S = ∂S/∂z + Wᵀ ∂S/∂v at v = Wz. `bound` is L, the Lipschitz constant of d; `convexity` is μ, the strong
    convexity of E (it may be negative).
    """

    kernel: AbstractKernel
    binding: Binding
    operator: BoundOperator  # W, scaled
    prox: AbstractProx
    compiled: bool = False
    last: LastProducts = dataclasses.field(default_factory=LastProducts, compare=False)  # Wz and f(z)
    backward: list[Tensor] | None = dataclasses.field(default_factory=list, compare=False)

    @property
    def bound(self) -> Tensor:
        return self.binding.lipschitz

    @property
    def convexity(self) -> Tensor:
        return self.binding.convexity

    @property
    def contraction(self) -> Tensor | None:
        """L, where `norm` holds it under 1 (σ is nonexpansive), everywhere: a curved inner kernel promises less."""
        return self.bound if self.kernel.through_features and self.binding.limit <= 1 else None

    def __call__(self, z: Tensor) -> Tensor:
        return self.evaluate(z).image

    def drive(self, z: Tensor) -> Tensor:
        """d(z)."""
        drive = self.evaluate(z, drive=True).drive
        assert drive is not None
        return drive

    def energy(self, z: Tensor) -> Tensor:
        """E(z) of each sample, (batch,), φ included."""
        energy = self.evaluate(z, energy=True).energy
        assert energy is not None
        return energy

    def weights(self, z: Tensor) -> Tensor | None:
        """ω(sᵢ) of every patch of r = a − Wz, (batch, groups, rows, columns): how well W explains it, 1 the best.

        None for a kernel that has no patches.
        """
        return self.kernel.weights(self.binding, self.operator(z))

    def evaluate(self, z: Tensor, drive: bool = False, energy: bool = False) -> Evaluation:
        """One evaluation; with `energy`, E(z) comes out of the same products. Without `drive` σ may be part of them."""
        if self.compiled and not torch.is_grad_enabled():
            bare = self.on(*[tensor.detach() for tensor in self.tensors()])  # dynamo warns of tensors with a graph
            for tensor in (z, bare.binding.a):  # one program for every batch: samples leave as they finish
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
            kind = (self.operator.weight.shape, self.binding.a.shape[2:], self.kernel)
            made = _compiled(kind)(bare, z, drive, energy)
        else:
            made = self.products(z, drive, energy)
        v, image, d, similarity, length, penalty = made
        return Evaluation(z, image, d, similarity, length, penalty, features=v)

    def products(
        self, z: Tensor, drive: bool, energy: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Wz, f(z) and, where they are wanted, d(z) and the parts of E(z)."""
        v = self.operator(z)
        slope = self.kernel.differentiate(self.binding, z, v, value=energy)
        return v, *self.image(slope, drive), *self.parts(z, slope)

    def image(self, slope: Slope, drive: bool) -> tuple[Tensor, Tensor | None]:
        """σ(∂S/∂z + Wᵀ ∂S/∂v) and, where it is wanted, its argument d."""
        if slope.dv is None:
            assert slope.dz is not None
            dz = slope.dz.detach()  # at z = 0, the start of a solve; it may be a itself, and with σ = 1 the value
            return self.prox(dz), dz
        if not drive and isinstance(self.prox, ReLU):
            return self.operator.adjoint_relu(slope.dv, slope.dz), None
        d = self.operator.adjoint(slope.dv)
        d = d if slope.dz is None else d + slope.dz
        return self.prox(d), d

    def parts(
        self, z: Tensor, slope: Slope, feasible: bool = False
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """S, ‖z‖ and 1ᵀφ(z) of each sample, where S is known; `feasible`: φ(z) is finite."""
        if slope.value is None:
            return None, None, None
        free = feasible and self.prox.indicator
        return slope.value, per_sample_norm(z), None if free else self.prox.penalty(z)

    def check_start(self, z0: Tensor) -> None:
        super().check_start(z0)
        a = self.binding.a
        shape = (len(a), self.operator.weight.shape[1], *a.shape[2:])
        if z0.shape != shape:
            raise ValueError(f"`z0` must have the shape of the state, {shape}, got {tuple(z0.shape)}.")

    def start(self, z0: Tensor | None, drive: bool = False, energy: bool = False) -> Evaluation:
        """At z = 0 (None) there is no Wz to compute; the z of the evaluation holds one zero for all entries."""
        if z0 is not None:
            return super().start(z0, drive, energy)
        slope = self.kernel.differentiate(self.binding, None, None, value=energy)
        image, d = self.image(slope, drive)
        zero = image.new_zeros(()).expand_as(image)
        return Evaluation(zero, image, d, *self.parts(zero, slope))

    def descend(self, at: Evaluation) -> Tensor:
        """T(z) = prox_{αφ}((1 − α) z + α d(z)), α = 2/(2 + L): the relaxation is inside the prox.

        Its fixed points are those of f, and E falls by at least ½‖T(z) − z‖², whatever the weights (facts, 3).
        """
        assert at.drive is not None
        alpha = (2 / (2 + self.bound)).to(at.z.dtype)
        return self.prox(torch.lerp(at.z, at.drive, alpha), alpha)

    def project(self, z: Tensor) -> Tensor:
        return self.prox(z, 0.0)

    def error_bound(self, gap: Tensor) -> Tensor:
        """‖z − z*‖ ≤ (1 + L/μ)‖f(z) − z‖ where E is μ-strongly convex (facts, 4), else infinite."""
        return torch.where(self.convexity > 0, (1 + self.bound / self.convexity) * gap, torch.inf)

    def in_features(self) -> "FeatureMap | None":
        return FeatureMap(self) if self.kernel.through_features else None

    def found(self, z: Tensor, at: Evaluation) -> None:
        if z is at.z:
            self.last.keep(z, at.features, at.image)

    def features(self, z: Tensor) -> Tensor:
        """Wz; not made again where the solve that found z has made it, or the gradient that was attached to z.

        The one a solve has made has no graph, so it will not do where W is to have a gradient.
        """
        v, _ = self.last.take(z)
        graph = torch.is_grad_enabled() and self.operator.weight.requires_grad
        return self.operator(z) if v is None or (graph and not v.requires_grad) else v

    def closed_adjoint(self, z: Tensor) -> "Adjoint":
        operator = bound(self.operator.weight.detach())
        v, image = self.last.take(z)
        z = z.detach()
        v = operator(z) if v is None else v.detach()  # it has a graph where a gradient was attached to z before
        slope = self.kernel.differentiate(self.binding, z, v, value=False)
        assert slope.dv is not None
        if image is None:
            with torch.no_grad():
                image = self.image(slope, drive=False)[0]
        hvp, state_hvp = self.kernel.hvp(self.binding, v), self.kernel.state_hvp(self.binding, z)
        sign = self.kernel.hvp_sign
        return Adjoint(z, v, image, slope.dv, slope.dz, self.operator.weight, operator, self.prox, hvp, sign, state_hvp)

    def rows(self, index: Tensor) -> Self:
        binding = dataclasses.replace(self.binding, a=take_samples(self.binding.a, index))
        return dataclasses.replace(self, binding=binding, last=LastProducts())

    def tensors(self) -> tuple[Tensor, ...]:
        parts = (self.operator.weight, self.binding.a, self.binding.Q, self.binding.gamma)
        return tuple(tensor for tensor in parts if tensor is not None)

    def on(self, *tensors: Tensor) -> Self:
        weight, a, *rest = tensors
        Q, gamma = rest or (None, None)
        binding = dataclasses.replace(self.binding, a=a, Q=Q, gamma=gamma)
        return dataclasses.replace(self, operator=bound(weight), binding=binding, last=LastProducts())


@functools.cache
def _compiled(kind: Hashable) -> Any:
    """A code object for every kind of equation: dynamo gives one up after eight variants, and a model has many."""
    own = types.FunctionType(Equation.products.__code__.replace(), globals(), "products")
    return torch.compile(own)


@final
@dataclasses.dataclass(frozen=True)
class FeatureMap(AbstractMap):
    """The equation for v = Wz, which is smaller than z: v ↦ Wσ(Wᵀ∂S/∂v + ∂S/∂z), where σ(…) is z.

    As Lipschitz as the equation itself: ‖W‖² times that of ∂S/∂v. Its energy is that of z, the state of the image.
    """

    equation: Equation

    @property
    def bound(self) -> Tensor:
        return self.equation.bound

    @property
    def stretch(self) -> Tensor:
        """‖W‖²."""
        binding = self.equation.binding
        return (binding.operator_norm * binding.scale).detach().square()

    @property
    def contraction(self) -> Tensor | None:
        return self.equation.contraction

    @functools.cached_property
    def nearness(self) -> Tensor | float:
        """Times `tol`: the residual of v under which that of z is measured."""
        return NEAR if self.equation.binding.limit <= 1 else NEAR / self.bound.clamp(1, NEAR)

    def __call__(self, v: Tensor) -> Tensor:
        return self.evaluate(v).image

    def evaluate(self, v: Tensor, drive: bool = False, energy: bool = False) -> Evaluation:
        return self._mapped(v, self.lift(v), energy)

    def start(self, z0: Tensor | None, drive: bool = False, energy: bool = False) -> Evaluation:
        """At v = Wz₀; without a z₀ at v = 0, where there is no Wz to compute."""
        v = None if z0 is None else self.equation.operator(z0)
        return self._mapped(v, self.lift(v), energy)

    def _mapped(self, v: Tensor | None, z: Tensor, energy: bool) -> Evaluation:
        """The evaluation at v (None: 0), where z is known."""
        f = self.equation
        image = f.operator(z)
        v = torch.zeros_like(image) if v is None else v
        if not energy:
            return Evaluation(v, image, state=z)
        slope = f.kernel.differentiate(f.binding, z, image, value=True)
        return Evaluation(v, image, None, *f.parts(z, slope, feasible=True), z, slope)

    def answer(self, at: Evaluation, following: Tensor) -> Tensor:
        """z = σ(…) is a step further than v already."""
        return at.value

    def found(self, z: Tensor, at: Evaluation) -> None:
        """f(z) is known if its residual was measured; nothing is of samples that ended at different steps."""
        if z is at.state and z is not self.equation.last.of:
            self.equation.last.keep(z, at.image, None)

    def lift(self, v: Tensor | None) -> Tensor:
        """z = σ(Wᵀ∂S/∂v + ∂S/∂z) at v (None: 0)."""
        f = self.equation
        slope = f.kernel.differentiate(f.binding, v, v, value=False)  # whatever stands for z is not looked at
        return f.image(slope, drive=False)[0]

    def measure(self, at: Evaluation, tol: float | None = None) -> Measurement:
        """The residual of z in the equation itself, f(z) − z = lift(Wz) − z.

        That costs half an evaluation. With a `tol`, the residual of v stands for it in samples that are far from it:
        z is a step further than v, and mostly several times as near.
        """
        f, z = self.equation, at.value
        near, gap = at.measured
        far = None if tol is None else near > self.nearness * tol
        merit = near if at.energy is None else at.energy
        if far is None or not bool(far.all()):
            slope = at.slope or f.kernel.differentiate(f.binding, z, at.image, value=False)
            image = f.image(slope, drive=False)[0]
            f.last.keep(z, at.image, image)
            residual, distance = Evaluation(z, image).measured
            near = residual if far is None else torch.where(far, near, residual)
            gap = distance if far is None else torch.where(far, gap, distance)
        return Measurement(near, gap, merit, at.rounding)

    def rows(self, index: Tensor) -> Self:
        return dataclasses.replace(self, equation=self.equation.rows(index))


@final
@dataclasses.dataclass(frozen=True)
class Adjoint:
    """The loop z = σ(Wᵀm + ∂S/∂z), m = ∂S/∂v at v = Wz, opened at its last link, for the backward pass.

    With g = ∂L/∂z, the adjoint system is w = D(g + Hw), H = P ± WᵀNW: N = ±∂²S/∂v² and P = ∂²S/∂z² are known in closed
    form; the sign of N is apart, which saves a pass. Where there is no P it becomes y = WDg ± WDWᵀNy in the space of
    y = Ww, and w = D(g ± WᵀNy) follows.
    """

    z: Tensor  # the equilibrium
    v: Tensor  # Wz
    image: Tensor  # f(z), whose entries say what D is; those of z do not: a mixture of iterates has no zeros
    m: Tensor  # with its graph, but for that of v
    dz: Tensor | None  # ∂S/∂z, with its graph
    weight: Tensor  # of W, with its graph
    operator: BoundOperator  # W, without
    prox: AbstractProx
    hvp: Callable[[Tensor], Tensor]  # N
    sign: int
    state_hvp: Callable[[Tensor], Tensor] | None  # P; None: 0

    def in_features(self, g: Tensor) -> "FeatureAdjointMap":
        """y ↦ WDg ± WDWᵀNy, in a unit of its own."""
        source = self.operator(self.masked(g))
        unit = magnitude(source)
        return FeatureAdjointMap(self, g, source / unit, unit)

    def in_state(self, g: Tensor) -> "StateAdjointMap":
        """w ↦ Dg + DHw, in a unit of its own."""
        source = self.masked(g)
        unit = magnitude(source)
        return StateAdjointMap(self, source / unit, unit)

    def masked(self, g: Tensor) -> Tensor:
        """Dg."""
        return self.prox.vjp(self.image.to(g.dtype), g)

    def symmetric(self, w: Tensor) -> Tensor:
        """(I − DHD) w for w = Dw."""
        u = w.to(self.z.dtype)
        curved = None if self.state_hvp is None else self.state_hvp(u)
        return w - self.masked_adjoint(self.hvp(self.operator(u)), curved, self.sign).to(w.dtype)

    def masked_adjoint(self, n: Tensor, g: Tensor | None, sign: int) -> Tensor:
        """D(g ± Wᵀn), or ±DWᵀn without g."""
        if isinstance(self.prox, ReLU):
            return self.operator.adjoint_masked(n, self.image, g, sign)
        drive = sign * self.operator.adjoint(n)
        return self.prox.vjp(self.image, drive if g is None else g + drive)


@final
@dataclasses.dataclass(frozen=True)
class FeatureAdjointMap(AbstractMap):
    """y ↦ WDg ± WDWᵀNy, whose value at y = 0 is known.

    It is linear in g, which may be too small or too large to be squared: so WDg and y are in units of WDg's own size.
    """

    adjoint: Adjoint
    g: Tensor
    source: Tensor  # WDg
    unit: Tensor  # of source and y; a power of two a sample
    last: LastProducts = dataclasses.field(default_factory=LastProducts, compare=False)  # Ny and DWᵀNy

    def __call__(self, y: Tensor) -> Tensor:
        adjoint = self.adjoint
        n = adjoint.hvp(y)
        masked = adjoint.masked_adjoint(n, None, 1)
        self.last.keep(y, n, masked)
        return adjoint.operator.added(self.source, masked, adjoint.sign)

    def recover(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """w = D(g ± WᵀNy), y and Ny, in the unit of g."""
        adjoint = self.adjoint
        n, masked = self.last.take(y)
        scaled = y * self.unit
        if n is None or masked is None:
            n = adjoint.hvp(scaled)
            return adjoint.masked_adjoint(n, self.g, adjoint.sign), scaled, n
        w = torch.addcmul(adjoint.masked(self.g), masked, self.unit, value=adjoint.sign)
        return w, scaled, scaled if n is y else n * self.unit  # N = 1 for the linear kernel

    def start(self, z0: Tensor | None, drive: bool = False, energy: bool = False) -> Evaluation:
        if z0 is not None:
            return super().start(z0)
        return Evaluation(0 * self.source, self.source)  # where g is no number y is none: a 0 would go unnoticed


@final
@dataclasses.dataclass(frozen=True)
class StateAdjointMap(AbstractMap):
    """w ↦ Dg + DHw, linear in g too: Dg and w are in units of Dg's own size."""

    adjoint: Adjoint
    source: Tensor  # Dg
    unit: Tensor  # of source and w; a power of two a sample
    last: LastProducts = dataclasses.field(default_factory=LastProducts, compare=False)  # Ww and NWw

    def __call__(self, w: Tensor) -> Tensor:
        adjoint = self.adjoint
        y, n = self.products(w)
        self.last.keep(w, y, n)
        g = self.source if adjoint.state_hvp is None else self.source + adjoint.state_hvp(w)
        return adjoint.masked_adjoint(n, g, adjoint.sign)

    def products(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Ww and NWw."""
        y, n = self.last.take(w)
        if y is None or n is None:
            y = self.adjoint.operator(w)
            n = self.adjoint.hvp(y)
        return y, n

    def recover(self, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """w, y = Ww and Ny, in the unit that g had."""
        w = w.to(self.source.dtype)
        y, n = self.products(w)
        return w * self.unit, y * self.unit, n * self.unit


def _recordable(t: Tensor) -> Tensor:
    """t itself, or a copy of one made in inference mode, which autograd refuses to record."""
    return t.detach().clone() if t.is_inference() else t
