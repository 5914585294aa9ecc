"""A cell is the trainable equation z = σ(d(z; x)); `bind(x)` is that equation at one batch of inputs."""

import abc

import torch
from torch import Tensor, nn

from ..equation import AbstractMap
from ..kernels.base import AbstractKernel
from ..operators import AbstractOperator, limited
from ..prox import AbstractProx
from ..solution import check_positive, check_whole
from .equation import Equation

OBSERVED = 32  # samples of a batch that `observe` looks at: enough for a statistic, next to nothing in cost


class AbstractCell(nn.Module, abc.ABC):
    """A module that turns an input into a map whose fixed point is wanted."""

    @abc.abstractmethod
    def bind(self, x: Tensor) -> AbstractMap:
        """The map at x. What does not depend on z (input drive, weight normalisation) is computed here, once."""

    @abc.abstractmethod
    def initial(self, f: AbstractMap) -> Tensor:
        """Where a solve of f starts."""

    def observe(self, f: AbstractMap, z: Tensor) -> None:  # noqa: B027
        """Look at an equilibrium found in training; for cells that adapt to it."""

    @abc.abstractmethod
    def compile_map(self) -> None:
        """Use torch.compile for the map inside a solve."""

    @abc.abstractmethod
    def diagnostics(self) -> dict[str, float]:
        """Numbers worth following over a training run."""


class AbstractKernelCell(AbstractCell):
    """Kernel + operator + prox. a = Ux + b is made by `inject`; norm bounds ‖W‖‖W_h‖, so that L ≤ norm²."""

    inject: nn.Module
    shape: tuple[int | None, ...]  # of the input; None where any number will do

    def __init__(
        self,
        kernel: AbstractKernel,
        operator: AbstractOperator,
        features: int,
        norm: float,
        prox: AbstractProx,
    ):
        super().__init__()
        if not isinstance(kernel, AbstractKernel):
            raise TypeError(f"`kernel` must be a kernel such as `Gaussian()`, got {kernel!r}.")
        check_positive("norm", norm)
        self.operator = operator
        self.similarity = kernel.similarity(features, conv=operator.size > 0)
        self.norm, self.prox = float(norm), prox
        self.compiled = False
        self.seen: tuple[Tensor, Tensor] | None = None  # a and z of some samples of the last batch in training

    def bind(self, x: Tensor) -> Equation:
        self.check(x)
        a = self.inject(x)
        return self._equation(a, self.operator.norm(a))

    def _equation(self, a: Tensor, raw: Tensor) -> Equation:
        """The equation for a = Ux + b, where the norm of W as it is now is `raw`."""
        gain = self.similarity.gain()
        scale = limited(raw * gain, self.similarity.allowance(self.norm))
        similarity = self.similarity.bind(a, self.norm)
        bound = similarity.lipschitz((raw * scale * gain).detach())
        return Equation(
            self.operator.bind(scale),
            similarity,
            self.prox,
            bound,
            similarity.convexity(bound),
            self.compiled,
        )

    def compile_map(self) -> None:
        self.compiled = True

    @torch.no_grad()
    def diagnostics(self) -> dict[str, float]:
        """‖W‖‖W_h‖ before and under its bound and mean E, as last seen, and what the kernel has to tell."""
        if self.operator.vector.numel() == 0:
            return self.similarity.diagnostics()
        raw = float(self.operator.last_norm() * self.similarity.gain())
        held = min(raw, self.similarity.allowance(self.norm))
        return {"norm_raw": raw, "norm": held, "energy": self._energy()} | self.similarity.diagnostics()

    def _energy(self) -> float:
        """Mean of E at the equilibria seen last."""
        if self.seen is None:
            return torch.nan
        a, z = (part.to(self.operator.weight) for part in self.seen)
        return float(self._equation(a, self.operator.last_norm()).energy(z).mean())

    def initial(self, f: AbstractMap) -> Tensor:
        """z = 0, stored as a is: channels-last or not."""
        assert isinstance(f, Equation)
        a = f.similarity.a
        last = a.dim() == 4 and a.is_contiguous(memory_format=torch.channels_last)
        layout = torch.channels_last if last else torch.contiguous_format
        shape = (len(a), *self.operator.state_shape(a))
        return torch.empty(shape, dtype=a.dtype, device=a.device, memory_format=layout).zero_()

    @torch.no_grad()
    def observe(self, f: AbstractMap, z: Tensor) -> None:
        """Keep a few samples for `diagnostics`; what follows the data follows it now."""
        assert isinstance(f, Equation)
        a, z = f.similarity.a[:OBSERVED], z[:OBSERVED]
        self.seen = a.clone(), z.clone()
        if self.similarity.adapts:
            self.similarity.observe(a, f.operator(z))

    def check(self, x: Tensor) -> None:
        """Refuse an input this cell cannot work with, in one sentence."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"The input must be a floating-point tensor, got {got}.")
        if x.dim() != len(self.shape) or any(
            w not in (g, None) for w, g in zip(self.shape[1:], x.shape[1:], strict=True)
        ):
            want = ", ".join(str(n or "any") for n in self.shape)
            raise ValueError(f"The input must have shape ({want}), got {tuple(x.shape)}.")
        if x.numel() == 0:
            raise ValueError(f"The input must hold at least one sample, got shape {tuple(x.shape)}.")
        dtype = self.operator.weight.dtype
        if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(
                f"The input is {x.dtype} but the weights are {dtype}: convert one with `.to({dtype})`, or use autocast."
            )
        # On a GPU a look at the numbers would wait for the device; there the solve ends with Status.NONFINITE.
        if not x.is_cuda and not _traced() and not bool(x.isfinite().all()):
            raise ValueError("The input has infinite or NaN entries; clean it before the equilibrium layer.")


def _traced() -> bool:
    return torch.compiler.is_compiling() or torch.compiler.is_exporting()


def check_sizes(*, inputs: int, state: int, features: int, size: int = 1) -> None:
    for name, value in (("inputs", inputs), ("state", state), ("features", features), ("size", size)):
        check_whole(name, value)
