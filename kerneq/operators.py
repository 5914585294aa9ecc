"""The linear operator W from state to features, dense or convolutional: apply, adjoint, operator norm."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, Self, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .fused.convolution import Convolution
from .fused.device import needs_graph
from .solution import Solution, Status, final_codes
from .tensors import autocasted, is_traced, is_transformed, magnitude, per_sample, per_sample_dot, version, widened

SETTLE_STEPS = 40  # Lanczos steps for a weight not seen before
SETTLED = 6e-3  # ‖WᵀWu − σ²u‖ / σ² of a saved u that is believed: bfloat16 makes it 3e-3, a crowd of values 1e-3
CURVATURE_STEPS = 500  # of conjugate gradient, at most, for a second derivative of the norm
TRACK_STEPS = 3  # a training step, from the vector of the step before; one power iteration let ‖W‖ run ahead by half


@final
@dataclasses.dataclass(frozen=True)
class Matrix:
    """v = Wz with W a matrix (features, state), fixed for one solve; `Convolution` is the same for feature maps."""

    weight: Tensor

    def __call__(self, z: Tensor) -> Tensor:
        return F.linear(z, self.weight)

    def added(self, v: Tensor, z: Tensor, sign: int) -> Tensor:
        """v ± Wz, without a graph."""
        return torch.add(v, self(z), alpha=sign)

    def adjoint(self, v: Tensor) -> Tensor:
        """Wᵀv."""
        return F.linear(v, self.weight.mT)

    def adjoint_relu(self, v: Tensor, shift: Tensor | None) -> Tensor:
        """max(Wᵀv + shift, 0)."""
        drive = self.adjoint(v)
        return torch.relu(drive if shift is None else drive + shift)

    def adjoint_masked(self, v: Tensor, z: Tensor, g: Tensor | None, sign: int) -> Tensor:
        """g ± Wᵀv where z > 0, else 0; without a graph."""
        drive = sign * self.adjoint(v)
        return torch.ops.aten.threshold_backward(drive if g is None else g + drive, z, 0)

    def weight_gradient(self, z: Tensor, v: Tensor) -> Tensor:
        """The gradient of ⟨Wz, v⟩ with respect to the weight."""
        return v.mT @ z


BoundOperator = Matrix | Convolution


def bound(weight: Tensor) -> BoundOperator:
    """A weight (features, state) as a matrix, (features, state, size, size) as a zero-padded convolution."""
    return Matrix(weight) if weight.dim() == 2 else Convolution(weight)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Settled:
    """Which vector was settled for which weight: the latter by its numbers, and by address and version."""

    vector: Tensor
    numbers: Tensor
    place: tuple[int, int]

    @classmethod
    def at(cls, vector: Tensor, weight: Tensor) -> "Settled":
        """The vector and the weight as they are now."""
        return cls(vector, weight.detach().clone(), _place(weight))

    def fits(self, vector: Tensor, weight: Tensor) -> bool:
        """Whether both are still what they were; on a GPU this waits for the device, except inside a CUDA graph."""
        if vector is not self.vector:
            return False
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return self.place == _place(weight)
        alike = (weight.dtype, weight.device) == (self.numbers.dtype, self.numbers.device)
        return alike and torch.equal(self.numbers, weight)


def _place(weight: Tensor) -> tuple[int, int]:
    return weight.data_ptr(), version(weight)


class AbstractOperator(nn.Module, abc.ABC):
    """A weight W and an estimate of its operator norm, followed from step to step.

    The estimate is ‖W u‖ at a unit vector u of the state, kept in the state dict. In training each `norm` call makes
    a few steps of Lanczos from the last u; in evaluation, u is settled by many once after the weight has changed and
    then stays. ‖W u‖ is differentiated with respect to W, which gives the gradient of the norm; where that gradient is
    differentiated again, u is a function of W too.

    u is no buffer: its shape comes with the first pictures, and a copy made before them, such as an `AveragedModel`,
    could not take it over. It has to find its own anyway.

    Whether the weight has changed, its numbers say: an address and a version stay where `functional_call`, `.data` or
    a freed parameter put others there. Only inside a CUDA graph, where no number can be looked at, they have to do.
    Threads may share a layer in evaluation: each works with a vector of its own and publishes it in one assignment.
    """

    weight: nn.Parameter
    vector: Tensor

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.vector = torch.zeros(0)
        self._settled: Settled | None = None

    @abc.abstractmethod
    def state_shape(self, example: Tensor) -> tuple[int, ...]:
        """The shape of one state, given one value of a = Ux + b."""

    def bind(self, scale: Tensor | float = 1.0) -> BoundOperator:
        """W times a scale, as it is used during one solve: under autocast, converted once and not at every step."""
        return bound(autocasted(self.weight * scale))

    def norm(self, example: Tensor) -> Tensor:
        """‖W‖ on states of the size that goes with `example`, as a differentiable number."""
        return self._norm_at(self._follow(self.state_shape(example)))

    @property
    def settled(self) -> bool:
        """Whether a vector has been found in evaluation, and nothing has been trained since."""
        return self._settled is not None

    def settle(self) -> None:
        """In evaluation, find the vector for the weight as it is now, in place, if states have been seen before."""
        if self.vector.numel() > 0:
            self._follow(tuple(self.vector.shape))
        if self._settled is not None:  # the numbers fit, but a copy of them, or others swapped back, may lie elsewhere
            self._settled = dataclasses.replace(self._settled, place=_place(self.weight))

    def last_norm(self) -> Tensor:
        """‖W u‖ at the vector followed so far."""
        return self._norm_at(self.vector)

    def _norm_at(self, vector: Tensor) -> Tensor:
        u = widened(vector).clone()  # a later step may move the buffer while this one waits for its backward pass
        with torch.autocast(u.device.type, enabled=False):
            image = bound(widened(self.weight))(u.unsqueeze(0))
            norm: Tensor = torch.linalg.vector_norm(image) / torch.linalg.vector_norm(u)
        if needs_graph(self.weight) and not is_transformed():
            norm = _Norm.apply(norm, self.weight, u)  # type: ignore[no-untyped-call]
        return norm

    @torch.inference_mode(False)  # `vector` outlives the call: made in inference mode, it could not be followed later
    @torch.no_grad()
    def _follow(self, shape: tuple[int, ...]) -> Tensor:
        """Move `vector` towards the top singular vector of the weight as it is now; returns where it is."""
        vector, settled = self.vector, self._settled  # read once: another thread may publish others meanwhile
        fresh = tuple(vector.shape) != shape or vector.device != self.weight.device
        traced = is_traced()
        if fresh and traced:  # no numbers to settle on: the program would hold a wrong norm for ever
            raise RuntimeError(
                f"The norm of W on states of shape {shape} is not known yet: call the model once, in `eval()` and on "
                "an input of this size, before it is exported."
            )
        track = self.training and not fresh
        if traced or not (track or fresh or settled is None or not settled.fits(vector, self.weight)):
            return vector
        weight = widened(self.weight.detach())
        weight = weight / magnitude(weight.unsqueeze(0))[0]  # it has the same vector, and WᵀW can be computed
        start = vector if fresh else vector.to(weight)
        if not track:
            # A fixed generator: neither the global seed nor the device changes where the search starts. A little of it
            # also goes to a vector known from before, which may be another singular vector of a changed weight.
            noise = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            noise = _unit(noise).to(weight)
            start = noise if fresh else _unit(start) + 1e-4 * noise
        w, steps = bound(weight), TRACK_STEPS if track else SETTLE_STEPS
        with torch.autocast(self.weight.device.type, enabled=False):
            found = top_singular_vector(w, w.adjoint, start, steps).to(self.weight.dtype)
        # On a GPU a captured step knows the buffer by its address, and the stream keeps readers and writers apart.
        if not fresh and (track or vector.is_cuda) and not vector.is_inference():
            found = vector.copy_(found)
        else:
            self.vector = found
        self._settled = None if track else Settled.at(found, self.weight)
        return found

    def train(self, mode: bool = True) -> Self:
        """Whatever is trained is settled anew: a CUDA graph changes weights without a trace in their version."""
        if mode:
            self._settled = None
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """`vector` goes where the weight goes."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.vector = fn(self.vector)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """With whether `vector` belongs to the weight: where it does, a model that is loaded has nothing to settle."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        settled = self._settled is not None and self._settled.fits(self.vector, self.weight)
        destination[prefix + "vector"] = self.vector
        destination[prefix + "settled"] = torch.tensor(settled)

    @torch.no_grad()
    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: list[str], *lists: Any
    ) -> None:
        saved, settled = state_dict.pop(prefix + "vector", None), state_dict.pop(prefix + "settled", False)
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *lists)
        self._settled = None
        if saved is None:
            missing.append(prefix + "vector")
            return
        vector, weight = self.vector, self.weight
        if (vector.shape, vector.dtype, vector.device) != (saved.shape, weight.dtype, weight.device):
            self.vector = torch.empty_like(saved, dtype=weight.dtype, device=weight.device)
        self.vector.copy_(saved)  # in place where it can be: see `_follow`
        if prefix + "weight" in state_dict and bool(settled) and self._is_singular(self.vector):
            self._settled = Settled.at(self.vector, self.weight)

    def _is_singular(self, vector: Tensor) -> bool:
        """Whether WᵀWu = σ²u, up to what saving loses: a mean of two models has the mark of both, and the u of none."""
        if self.weight.is_meta or vector.numel() == 0:
            return False
        weight = widened(self.weight)
        w, u = bound(weight / magnitude(weight.unsqueeze(0))[0]), _unit(widened(vector)).unsqueeze(0)
        with torch.autocast(u.device.type, enabled=False):
            v = w(u)
            square = v.square().sum()
            return bool(torch.linalg.vector_norm(w.adjoint(v) - square * u) <= SETTLED * square)


@final
class Dense(AbstractOperator):
    """v = W z, W a matrix (features × state)."""

    def __init__(self, state: int, features: int):
        super().__init__(torch.randn(features, state) / state**0.5)

    def state_shape(self, example: Tensor) -> tuple[int, ...]:
        return (self.weight.shape[1],)


@final
class Conv(AbstractOperator):
    """v = W ∗ z, a zero-padded convolution (features, state, size, size) that keeps the size of the picture."""

    def __init__(self, state: int, features: int, size: int):
        super().__init__(torch.randn(features, state, size, size) / (size * state**0.5))

    def state_shape(self, example: Tensor) -> tuple[int, ...]:
        return (self.weight.shape[1], *example.shape[-2:])


def limited(norm: Tensor, limit: float) -> Tensor:
    """The factor min(1, limit / norm) that holds an operator under its limit; NaN where the norm is no number."""
    # Where the factor is 1 its slope is 0 times that of limit / norm, which must not be infinite. For a norm of ∞ it
    # would be 0, a layer without W that says it has converged; 0 · ∞ is NaN, and makes it one too.
    factor = (limit / norm.clamp_min(limit / 2)).clamp_max(1.0)
    return torch.add(factor, norm.detach(), alpha=0)


class _Norm(torch.autograd.Function):
    """Forward: ‖Wu‖ as it was computed, whose graph holds u fixed. That gives the gradient, as ‖Wu‖ is largest at u.

    Differentiated twice it will not do: then the gradient vuᵀ, v = Wu / ‖Wu‖, is made afresh from a u that follows W.
    """

    @staticmethod
    def forward(ctx: Any, norm: Tensor, weight: Tensor, u: Tensor) -> Tensor:
        ctx.save_for_backward(weight, u)
        return norm.view_as(norm)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        if not torch.is_grad_enabled():
            return g, None, None
        weight, u = ctx.saved_tensors
        with torch.autocast(u.device.type, enabled=False):
            weight = widened(weight)
            u = _TopVector.apply(weight, _unit(u).unsqueeze(0))  # type: ignore[no-untyped-call]
            view = weight.view_as(weight)  # ∂‖Wu‖/∂W at fixed u: u depends on the weight, not on this view
            norm = torch.linalg.vector_norm(bound(view)(u))
            return None, torch.autograd.grad(norm, view, g, create_graph=True)[0], None


class _TopVector(torch.autograd.Function):
    """The unit vector u, (1, ...), as the function of W it is: (σ²I − WᵀW) du = d(WᵀW) u off u, and du ⟂ u.

    Its gradient is taken once: it needs the x with Bx = g off u, B = σ²(I + uuᵀ) − WᵀW, definite where the top singular
    value σ = ‖Wu‖ is simple. Where it is not, as for an orthogonal W_h, the norm has no second derivative, and u counts
    as a constant in the directions of its like; a u that is still on its way may make B indefinite. Conjugate gradient
    stops at either.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, u: Tensor) -> Tensor:
        u = u.clone()
        ctx.save_for_backward(weight, u)
        return u

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        weight, u = ctx.saved_tensors
        eps = torch.finfo(u.dtype).eps

        def apply(x: Tensor) -> Tensor:
            y = square * (x + (x * u).sum() * u) - w.adjoint(w(x))
            return torch.where((x * y).sum() > eps**0.5 * square * x.square().sum(), y, 0.0)

        with torch.autocast(u.device.type, enabled=False):
            w = bound(weight)
            v = w(u)
            square = v.square().sum()
            off = g - (g * u).sum() * u
            x = conjugate_gradient(apply, off, eps**0.75, CURVATURE_STEPS, check_every=1).value
            return w.weight_gradient(x, v) + w.weight_gradient(u, w(x)), None


def top_singular_vector(
    apply: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor], start: Tensor, steps: int
) -> Tensor:
    """A unit vector u with ‖A u‖ close to ‖A‖, from `start`, by `steps` products with AᵀA.

    Lanczos: the best vector of the whole Krylov space. It is far ahead of power iteration where singular values crowd,
    as they do for convolutions, and where `start` belongs to one that another has overtaken. Nothing waits for the
    device.
    """
    u = _unit(start)
    rounds = 1 if steps <= TRACK_STEPS else 4  # one leaves 0.1 % of the norm to be found
    steps = min(steps, u.numel())
    basis, images = u.new_zeros(2, steps, u.numel())
    basis[0] = u.flatten()
    for step in range(steps):
        images[step] = w = adjoint(apply(basis[step].view_as(u).unsqueeze(0))).flatten()
        if step + 1 == steps:
            break
        known = basis[: step + 1]
        # Where the space is exhausted rounding is left, a direction as good as any, once it is orthogonal: what has
        # overtaken an exact u is found by it. Where not even that is left, next to nothing in the basis does no harm.
        for _ in range(2):
            w = _unit(torch.addmv(w, known.mT, known @ w, alpha=-1))
        basis[step + 1] = torch.addmv(w, known.mT, known @ w, alpha=-1)
    found = (_top_eigenvector((basis @ images.mT).double(), rounds).to(u) @ basis).view_as(u)
    length = torch.linalg.vector_norm(found)
    # A zero operator has no direction to offer, and of one that is no number ‖A u‖ says so.
    return torch.where((length > 0) & (length < torch.inf), found / length, u)


def _top_eigenvector(square: Tensor, rounds: int) -> Tensor:
    """That of a small positive semidefinite matrix, by squaring it 7 times a round: its other eigenvalues vanish.

    An eigensolver would make a GPU wait for the host. The longest column has most of it: the first, from a u that
    another has overtaken, may have next to nothing. Its largest entry is 1, its length is not.
    """
    square = square + square.mT
    for _ in range(rounds):
        square = square / square.trace()  # of n eigenvalues the top one is 1/n at least: n⁻¹²⁸ can still be written
        for _ in range(7):
            square = square @ square
    column = square.index_select(1, square.diagonal().argmax(keepdim=True))[:, 0]
    return column / column.abs().amax()  # n⁻¹²⁸ cannot be squared


def _unit(u: Tensor) -> Tensor:
    return u / torch.linalg.vector_norm(u).clamp_min(torch.finfo(u.dtype).tiny)


def conjugate_gradient(
    matvec: Callable[[Tensor], Tensor], b: Tensor, tol: float, max_steps: int, check_every: int
) -> Solution:
    """Solve A x = b, A symmetric positive definite per sample, to ‖b − Ax‖ ≤ tol·‖b‖, each sample on its own.

    A sample that has converged, or that meets a direction of negative curvature, keeps its x from then on.
    """
    size = per_sample_dot(b, b)
    limit = tol**2 * size
    x, r, p, rr = torch.zeros_like(b), b, b, size
    active = rr > limit
    broken = torch.zeros_like(active)
    steps = torch.zeros(len(b), dtype=torch.long, device=b.device)
    for step in range(1, max_steps + 1):
        if check_every < max_steps and step % check_every == 0 and not bool(active.any()):
            break
        Ap = matvec(p)
        curvature = per_sample_dot(p, Ap)
        positive = curvature > 0
        broken |= active & ~positive
        active = active & positive
        alpha = torch.where(active, rr / torch.where(active, curvature, 1.0), 0.0)
        x = torch.addcmul(x, per_sample(alpha, x), p)
        r = torch.addcmul(r, per_sample(alpha, r), Ap, value=-1)
        new = per_sample_dot(r, r)
        beta = torch.where(active, new / torch.where(active, rr, 1.0), 0.0)
        p = torch.addcmul(r, per_sample(beta, p), p)
        rr = torch.where(active, new, rr)
        steps = torch.where(active, step, steps)
        active = active & (rr > limit)
    residual = (rr / size.clamp_min(torch.finfo(size.dtype).tiny)).sqrt()
    codes = torch.where(broken & residual.isfinite(), Status.BREAKDOWN.code, final_codes(residual, tol))
    return Solution(x, residual, steps, codes, tol)
