"""A cell is the trainable equation z = σ(d(z; x)); `bind(x)` is that equation at one batch of inputs."""

import abc
import copy
import dataclasses
from collections.abc import Callable
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from .equation import Equation
from .kernels.base import AbstractKernel, AbstractParameters
from .maps import AbstractMap, Function, Point, as_map
from .operators import Operator, Scaling, compute_scale
from .prox import AbstractProx, ReLU
from .randomness import FixedRandomness
from .solution import NonfiniteInputError
from .structure import Tree
from .tensors import autocasted, check_kind, check_positive, check_whole

__all__ = ["AbstractCell", "AbstractKernelCell", "ConvCell", "DenseCell", "Equation", "FunctionCell", "Output"]
__dir__ = __all__.copy  # `dir` lists the public names only

OBSERVED = 32  # samples of a batch that `diagnostics` averages over: enough for a mean, at next to no cost
Output = Literal["state", "features"]  # what a layer returns: z*, or v* = Wz*
Shape = tuple[int | None, ...]  # None where any number will do


class AbstractCell(nn.Module, abc.ABC):
    """A module that turns an input into a map whose fixed point is wanted. To write one: `bind` and `initial`."""

    @abc.abstractmethod
    def bind(self, x: Tensor) -> AbstractMap:
        """Return the map at x. What does not depend on z (input drive, weight normalisation) is computed here, once."""

    @abc.abstractmethod
    def initial(self, f: AbstractMap) -> Tree:
        """Return where a solve of f starts; None for z = 0, which the equation of a cell evaluates cheaply."""

    def output(self, f: AbstractMap, at: Point) -> Tensor:
        """Return the output of the layer for an equilibrium of f, with a graph."""
        return at.z

    def output_error(self, f: AbstractMap, error: Tensor) -> Tensor:
        """Return a bound on the error of that output where z is off by at most `error`, (batch,)."""
        return error

    def observe(self, f: AbstractMap, z: Tensor) -> None:  # noqa: B027
        """Adapt to an equilibrium z found in training."""

    def compile_map(self) -> None:  # noqa: B027
        """Use torch.compile for the map inside a solve, where that pays."""

    def diagnostics(self) -> dict[str, float]:
        """Return numbers worth following over a training run."""
        return {}

    def describe(self) -> dict[str, str]:
        """Return what the equation is, for people to read."""
        return {"cell": type(self).__name__}


@final
class FunctionCell(AbstractCell):
    """The map z ↦ f(z, *inputs, **named) of any module or function; what `Equilibrium(f)` makes of f.

    `init(*inputs, **named)` is the state at which a solve starts; unless given, zeros like the first input.
    """

    def __init__(self, f: Callable[..., Tree], init: Callable[..., Tree] | None = None):
        super().__init__()
        if not callable(f):
            raise TypeError(f"A layer is made of a cell, a module or a function f(z, x), got {f!r}.")
        self.f, self.init = f, init

    def bind(self, *inputs: Any, **named: Any) -> AbstractMap:
        return bind_function(self.f, inputs, named)

    def initial(self, f: AbstractMap) -> Tree:
        """Return what `init` makes of the inputs, or zeros like the first one."""
        inputs, named = (f.inputs, f.named) if isinstance(f, Function) else ((), {})
        if self.init is not None:
            return self.init(*inputs, **named)
        likely = [t for t in (*inputs, *named.values()) if isinstance(t, Tensor) and t.is_floating_point()]
        if not likely:
            raise ValueError(
                "The layer does not know where to start, as no input is a tensor of floating-point numbers: give "
                "`layer(…, z0=…)`, or `kerneq.Equilibrium(f, init=…)`, a function of the inputs."
            )
        return torch.zeros_like(likely[0])

    def describe(self) -> dict[str, str]:
        return {"function": getattr(self.f, "__name__", type(self.f).__name__)}


def bind_function(f: Callable[..., Tree], inputs: tuple[Any, ...], named: dict[str, Any]) -> AbstractMap:
    """Return f at these inputs as a map of the state alone."""
    if isinstance(f, FixedRandomness) and f.draws:
        return Function(f.fix(), inputs, named, restrictable=False)
    return Function(f, inputs, named) if inputs or named else as_map(f)


class AbstractKernelCell(AbstractCell):
    """Kernel + operator + prox. a = Ux + b is made by `inject`; norm bounds ‖W‖‖W_h‖, so that L ≤ norm²
    (for a curved inner kernel see `kernels.inner`: its share of norm² is stated there).

    With `bias` σ is shifted, z = σ(d(z; x) + b): the hidden problem gains −⟨b, z⟩. That is for kernels of a − Wz; in
    the others a itself is added to d.

    With `output="features"` the layer returns v* = Wz*, not z*. For the linear kernel that is OptEq's own form,
    v = Wσ(Wᵀv + Ux + b), with W̃ = Wᵀ: GEQ (1).
    """

    inject: nn.Module
    shape: Shape  # of the input

    def __init__(
        self,
        kernel: AbstractKernel,
        operator: Operator,
        norm: float,
        prox: AbstractProx,
        output: Output,
        bias: bool,
    ):
        super().__init__()
        if output not in ("state", "features"):
            raise ValueError(f"`output` must be state or features, got {output!r}.")
        check_kind("kernel", kernel, AbstractKernel)
        check_positive("norm", norm)
        features, state = operator.weight.shape[:2]
        if bias and kernel.in_state:
            raise ValueError(f"`bias` is for kernels of a − Wz: {kernel!r} has that of Ux + b, in the same place.")
        self.kernel, self.operator = kernel, operator
        self.bias = nn.Parameter(torch.zeros(state)) if bias else None  # inside σ
        self.similarity = kernel.parameters(features, conv=operator.weight.dim() == 4)
        self.channels = state if kernel.in_state else features  # of a
        self.norm, self.prox, self.gives = float(norm), prox, output
        self.compiled = False
        self.seen: tuple[Tensor, Tensor] | None = None  # a and z of some samples of the last batch in training

    def bind(self, x: Tensor) -> Equation:
        self._check(x)
        a = self.inject(x)
        self._check_injected(a)
        a = autocasted(a)  # as W is, whatever `inject` made: autocast is off in the backward pass
        if a.is_cpu and a.dim() == 4:
            a = a.contiguous(memory_format=torch.channels_last)  # patches are quick to cut in this order
        return self._equation(self.similarity, a, self.operator.norm(a), self.compiled)

    def _equation(
        self, similarity: AbstractParameters | None, a: Tensor, operator_norm: Tensor, compiled: bool
    ) -> Equation:
        """Return the equation for a = Ux + b, given the norm of W as it is now."""
        kernel, norm = self.kernel, self.norm
        product = operator_norm if similarity is None else operator_norm * similarity.gain()
        most, excess = kernel.max_norm(norm), 1.0 if similarity is None else similarity.excess
        scaling = Scaling(operator_norm, product, compute_scale(product, most), self.operator.excess * excess)
        bound, convexity = kernel.bounds(scaling.square, norm)
        binding = kernel.bind(similarity, a, norm)
        if self.bias is not None:
            binding = dataclasses.replace(binding, bias=self.bias.to(a.dtype))
        W = self.operator.bind(scaling.scale)
        return Equation(kernel, binding, W, self.prox, scaling, bound, convexity, norm, compiled)

    def initial(self, f: AbstractMap) -> None:
        """Return None: z = 0, whose evaluation needs no Wz."""
        return None

    def output(self, f: AbstractMap, at: Point) -> Tensor:
        """Return z, or v = Wz with the W of the equation, scaled to its bound."""
        assert isinstance(f, Equation)
        return f.features(at) if self.gives == "features" else at.z

    def output_error(self, f: AbstractMap, error: Tensor) -> Tensor:
        """Return the error, or ‖W‖ times it."""
        assert isinstance(f, Equation)
        return f.scaling.norm_bound * error if self.gives == "features" else error

    def compile_map(self) -> None:
        self.compiled = True

    @torch.no_grad()
    def observe(self, f: AbstractMap, z: Tensor) -> None:
        """Keep a few samples for `diagnostics`, and let a γ that adapts to the data do so."""
        assert isinstance(f, Equation)
        self.seen = f.binding.a[:OBSERVED].clone(), z[:OBSERVED].clone()
        if self.similarity is not None:
            self.similarity.observe(f.binding.a, z, f.operator)

    @torch.no_grad()
    def diagnostics(self) -> dict[str, float]:
        """Return ‖W‖‖W_h‖ before and after scaling, the mean E of the samples last seen, and γ where there is one."""
        weight = self.operator.weight
        norm = self.operator.last_norm()
        a, z = self.seen if self.seen is not None else (weight.new_zeros(1), None)  # the bound does not depend on a
        a = a.to(weight)
        similarity = copy.deepcopy(self.similarity)  # in training, asking for the norm of W_h moves its vector
        # Compiling would take too long for one energy.
        f = self._equation(similarity, a, weight.new_ones(()) if norm is None else norm, compiled=False)
        f = dataclasses.replace(f, binding=dataclasses.replace(f.binding, a=a))  # a is in the kernel's unit already
        numbers = {} if f.binding.gamma is None else {"gamma": float(f.binding.gamma)}
        if norm is None:
            return numbers
        raw, scale = float(f.scaling.product), float(f.scaling.scale)
        # At σ(d(z)): a mixture of iterates may lie outside the range of σ, where E is infinite.
        energy = float(f.energy(f(z.to(weight))).mean()) if z is not None else torch.nan
        return {"norm_raw": raw, "norm": raw * scale, "energy": energy} | numbers

    def describe(self) -> dict[str, str]:
        """Return kernel, sizes and what the bound on ‖W‖‖W_h‖ implies."""
        features, state = self.operator.weight.shape[:2]
        bound, convexity = self.kernel.bounds(self.kernel.max_norm(self.norm) ** 2, self.norm)
        unique = "one equilibrium for every input" if convexity > 0 else "there may be several equilibria"
        return {
            "kernel": str(self.kernel),
            "sizes": f"x of {self.shape[1]}, state z of {state}, compared in {features} features",
            "bound": f"‖W‖‖W_h‖ ≤ {self.norm:g}, so L ≤ {bound:.3g} and μ ≥ {convexity:.3g}: {unique}",
        }

    def extra_repr(self) -> str:
        features, state = self.operator.weight.shape[:2]
        return f"kernel={self.kernel}, state={state}, features={features}, norm={self.norm:g}, prox={self.prox}"

    def _check(self, x: Tensor) -> None:
        """Raise, in one sentence, if this cell cannot work with the input."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"The input must be a floating-point tensor, got {got}.")
        if not _fits(x, self.shape):
            raise ValueError(f"The input must have shape {_format_shape(self.shape)}, got {tuple(x.shape)}.")
        if x.numel() == 0:
            raise ValueError(f"The input must hold at least one sample, got shape {tuple(x.shape)}.")
        dtype = self.operator.weight.dtype
        if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(
                f"The input is {x.dtype} but the weights are {dtype}: convert one with `.to({dtype})`, or use autocast."
            )
        # On a GPU reading the numbers would wait for the device; there the solve ends with Status.NONFINITE.
        if not x.is_cuda and not torch.compiler.is_compiling() and not bool(x.isfinite().all()):
            raise NonfiniteInputError("The input has infinite or NaN entries; clean it before the equilibrium layer.")

    def _check_injected(self, a: Tensor) -> None:
        """Raise unless `inject` made a tensor with the channels that the kernel needs."""
        shape = (None, self.channels, *self.shape[2:])
        if not isinstance(a, Tensor) or not _fits(a, shape):
            where = "state" if self.kernel.in_state else "features"
            want, got = _format_shape(shape), tuple(a.shape) if isinstance(a, Tensor) else type(a).__name__
            raise ValueError(f"`inject` must give the shape {want}, that of the {where}, for this kernel, got {got}.")


def _fits(t: Tensor, shape: Shape) -> bool:
    # `in` would compare a compiler's symbolic sizes by identity.
    return t.dim() == len(shape) and all(want is None or want == got for want, got in zip(shape, t.shape, strict=True))


def _format_shape(shape: Shape) -> str:
    return f"({', '.join(str(n or 'any') for n in shape)})"


@final
class DenseCell(AbstractKernelCell):
    """The equation on vectors: x (batch, inputs) ↦ z (batch, state), v = Wz (batch, features), W a matrix.

    a = Ux + b, or whatever `inject` makes of x: (batch, features), or (batch, state) for an inner kernel.
    """

    def __init__(
        self,
        kernel: AbstractKernel,
        *,
        inputs: int,
        state: int,
        features: int,
        norm: float = 1.0,  # bound on ‖W‖‖W_h‖
        prox: AbstractProx = ReLU(),  # noqa: B008  (a frozen value)
        inject: nn.Module | None = None,
        output: Output = "state",
        bias: bool = False,  # inside σ
    ):
        for name, value in (("inputs", inputs), ("state", state), ("features", features)):
            check_whole(name, value)
        super().__init__(kernel, Operator(state, features), norm, prox, output, bias)
        self.shape = (None, inputs)
        self.inject = inject or nn.Linear(inputs, self.channels)


@final
class ConvCell(AbstractKernelCell):
    """The equation on feature maps: x (batch, inputs, height, width) ↦ z (batch, state, height, width).

    v = W ∗ z has `features` channels, W a zero-padded convolution of `size` × `size`. a = U ∗ x + b, or whatever
    `inject` makes of x, has `features` channels, or `state` for an inner kernel. For a radial kernel `patch` must
    divide height and width, and `split` the features.
    """

    def __init__(
        self,
        kernel: AbstractKernel,
        *,
        inputs: int,
        state: int,
        features: int,
        size: int = 3,
        norm: float = 1.0,  # bound on ‖W‖‖W_h‖
        prox: AbstractProx = ReLU(),  # noqa: B008  (a frozen value)
        inject: nn.Module | None = None,
        output: Output = "state",
        bias: bool = False,  # inside σ
    ):
        for name, value in (("inputs", inputs), ("state", state), ("features", features), ("size", size)):
            check_whole(name, value)
        if size % 2 == 0:
            raise ValueError(f"`size` must be odd, so that the convolution keeps the picture's size, got {size}.")
        super().__init__(kernel, Operator(state, features, size), norm, prox, output, bias)
        self.shape = (None, inputs, None, None)
        self.inject = inject or nn.Conv2d(inputs, self.channels, size, padding=size // 2)
