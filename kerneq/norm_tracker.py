"""An estimate of ‖W‖ that follows the weight through training, and its two derivatives.

The estimate is ‖Wu‖ at a unit vector u near the top singular vector, found by Lanczos from the u before.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from .conjugate_gradient import conjugate_gradient
from .linear_maps import AbstractLinearMap, as_linear_map
from .tensors import is_transformed, magnitude, needs_graph, version, widened

SETTLE_STEPS = 40  # Lanczos steps for a weight not seen before
TRACK_STEPS = 3  # in a training step, from the u of the step before; one power iteration let ‖W‖ run ahead by half
SETTLED = 6e-3  # ‖WᵀWu − σ²u‖ / σ² of a saved u that is believed: bfloat16 makes it 3e-3, a crowd of values 1e-3
CURVATURE_STEPS = 500  # of conjugate gradient, at most, for a second derivative of the norm


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Settled:
    """Which vector was found for which weight.

    The weight is known by its numbers: an address and a version stay the same where `functional_call`, `.data` or a
    freed parameter put other numbers there. Only inside a CUDA graph, where no number can be read, address and version
    have to do.
    """

    vector: Tensor
    numbers: Tensor  # a copy of the weight
    place: tuple[int, int]  # its address and version

    @classmethod
    def at(cls, vector: Tensor, weight: Tensor) -> "Settled":
        """Note that the vector belongs to the weight as it is now."""
        return cls(vector, weight.detach().clone(), find_place(weight))

    def fits(self, vector: Tensor | None, weight: Tensor) -> bool:
        """Whether both are still what they were; on a GPU this waits for the device, except inside a CUDA graph."""
        if vector is not self.vector:
            return False
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return self.place == find_place(weight)
        alike = (weight.dtype, weight.device) == (self.numbers.dtype, self.numbers.device)
        return alike and torch.equal(self.numbers, weight)


def find_place(t: Tensor) -> tuple[int, int]:
    """Return the address of a tensor and how often it has been written to."""
    return t.data_ptr(), version(t)


@final
class NormTracker:
    """A unit vector u of the state with ‖Wu‖ near ‖W‖, updated as W changes.

    In training each update takes a few Lanczos steps from the last u. In evaluation u is settled by many steps once
    after the weight has changed, and then stays. Threads may share a tracker in evaluation: each works with a vector
    of its own and publishes it in one assignment.

    u is no buffer, because its shape comes with the first pictures: what copies buffers, such as an `AveragedModel`
    that was made before them, expects that shapes do not change. So the module that owns the tracker
    (`AbstractOperator`) moves, saves and loads u itself.
    """

    def __init__(self) -> None:
        self.vector = torch.zeros(0)  # u, shaped as one state; empty until the first update
        self.settled: Settled | None = None  # None: not settled, or trained since

    @torch.inference_mode(False)  # `vector` outlives the call: made in inference mode, it could not be updated later
    @torch.no_grad()
    def update(self, weight: Tensor, shape: tuple[int, ...], training: bool) -> Tensor:
        """Return u for states of this shape and the weight as it is now."""
        vector, settled = self.vector, self.settled  # read once: another thread may publish others meanwhile
        known = vector if tuple(vector.shape) == shape and vector.device == weight.device else None
        if torch.compiler.is_compiling():
            return _require(known, shape)
        track = training and known is not None
        if not track and settled is not None and settled.fits(known, weight):
            return settled.vector
        found = _search(weight, shape, known, track)
        # On a GPU a captured step knows the vector by its address, and the stream keeps readers and writers apart.
        if known is not None and (track or known.is_cuda) and not known.is_inference():
            found = known.copy_(found)
        else:
            self.vector = found
        self.settled = None if track else Settled.at(found, weight)
        return found

    def settle(self, weight: Tensor) -> None:
        """In evaluation, find u for the weight as it is now, in place, if states have been seen before."""
        if self.vector.numel() > 0:
            self.update(weight, tuple(self.vector.shape), training=False)
        if self.settled is not None:  # the numbers fit, but a copy of them, or others swapped back, may lie elsewhere
            self.settled = dataclasses.replace(self.settled, place=find_place(weight))

    def is_settled(self, weight: Tensor) -> bool:
        """Whether u was found in evaluation for this very weight."""
        return self.settled is not None and self.settled.fits(self.vector, weight)

    @torch.no_grad()
    def load(self, vector: Tensor, weight: Tensor, settled: bool) -> None:
        """Take over a saved u; if it was `settled` for this weight there is nothing to search for in evaluation."""
        mine = self.vector
        if (mine.shape, mine.dtype, mine.device) != (vector.shape, weight.dtype, weight.device):
            self.vector = torch.empty_like(vector, dtype=weight.dtype, device=weight.device)
        self.vector.copy_(vector)  # in place where possible: see `update`
        self.settled = Settled.at(self.vector, weight) if settled and _is_singular(self.vector, weight) else None


def _unit_map(weight: Tensor) -> AbstractLinearMap:
    """Return W divided by a power of two: it has the same singular vectors, and WᵀW can be computed."""
    weight = widened(weight.detach())
    return as_linear_map(weight / magnitude(weight.unsqueeze(0))[0])


def _require(known: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """Raise if there is no vector yet: there are no numbers to find one for, and a program would hold a wrong norm."""
    if known is None:
        raise RuntimeError(
            f"The norm of W on states of shape {shape} is not known yet: call the model once, in `eval()` and on "
            "an input of this size, before it is exported."
        )
    return known


def _search(weight: Tensor, shape: tuple[int, ...], known: Tensor | None, track: bool) -> Tensor:
    """Return u, near the top singular vector of W: a few steps from the known one, to `track` it, or many to settle it.

    Many start at a fixed random vector, so that neither the global seed nor the device changes where they end. A
    little of it is added to a known vector, which may be another singular vector of a changed weight.
    """
    w = _unit_map(weight)
    if track and known is not None:
        start, steps = known.to(w.weight), TRACK_STEPS
    else:
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        noise = _unit(noise).to(w.weight)
        start = noise if known is None else _unit(known.to(w.weight)) + 1e-4 * noise
        steps = SETTLE_STEPS
    with torch.autocast(weight.device.type, enabled=False):
        return top_singular_vector(w, w.adjoint, start, steps).to(weight.dtype)


def _is_singular(vector: Tensor, weight: Tensor) -> bool:
    """Whether WᵀWu = σ²u, up to what saving loses: a mean of two models has the mark of both, and the u of neither."""
    if weight.is_meta or vector.numel() == 0:
        return False
    w, u = _unit_map(weight), _unit(widened(vector)).unsqueeze(0)
    with torch.autocast(u.device.type, enabled=False):
        v = w(u)
        square = v.square().sum()
        return bool(torch.linalg.vector_norm(w.adjoint(v) - square * u) <= SETTLED * square)


def norm_at(weight: Tensor, vector: Tensor) -> Tensor:
    """Return ‖Wu‖ / ‖u‖, a number that is differentiable twice with respect to W as ‖W‖ is."""
    u = widened(vector).clone()  # a later step may change the vector while this one waits for its backward pass
    with torch.autocast(u.device.type, enabled=False):
        image = as_linear_map(widened(weight))(u.unsqueeze(0))
        norm: Tensor = torch.linalg.vector_norm(image) / torch.linalg.vector_norm(u)
    if needs_graph(weight) and not is_transformed():
        norm = _Norm.apply(norm, weight, u)  # type: ignore[no-untyped-call]
    return norm


class _Norm(torch.autograd.Function):
    """‖Wu‖ as it was computed, with u held fixed: its gradient is that of ‖W‖, because ‖Wu‖ is largest at u.

    For a second derivative u has to depend on W: the gradient vuᵀ, v = Wu / ‖Wu‖, is then computed again with such a u.
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
            norm = torch.linalg.vector_norm(as_linear_map(view)(u))
            return None, torch.autograd.grad(norm, view, g, create_graph=True)[0], None


class _TopVector(torch.autograd.Function):
    """The unit vector u, (1, ...), as a function of W: (σ²I − WᵀW) du = (I − uuᵀ) d(WᵀW) u, and du ⟂ u.

    It can be differentiated once. Its gradient needs the x with Bx = (I − uuᵀ)g, B = σ²(I + uuᵀ) − WᵀW, which is
    definite where the top singular value σ = ‖Wu‖ is simple. Where it is not, as for an orthogonal W_h, the norm has no
    second derivative, and u counts as constant in the directions of the same singular value. Where u has not
    converged, B may be indefinite. Conjugate gradient stops in both cases.
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
            w = as_linear_map(weight)
            v = w(u)
            square = v.square().sum()
            off = g - (g * u).sum() * u
            x = conjugate_gradient(apply, off, eps**0.75, CURVATURE_STEPS, check_every=1).value
            return w.weight_gradient(x, v) + w.weight_gradient(u, w(x)), None


def top_singular_vector(
    apply: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor], start: Tensor, steps: int
) -> Tensor:
    """Return a unit vector u with ‖Au‖ close to ‖A‖, by Lanczos: `steps` products with AᵀA, the first with `start`.

    u is the best vector of the Krylov space. Lanczos is far ahead of power iteration where singular values are close
    to each other, as they are for convolutions, and where another singular value has overtaken that of `start`.
    Nothing waits for the device, as it would with `torch.lobpcg` or an eigensolver.
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
        # Where the Krylov space is exhausted, w is rounding. Made orthogonal to the basis it is as good a direction as
        # any, and finds what has overtaken an exact u. Where w is 0, a basis vector near 0 does no harm.
        for _ in range(2):
            w = _unit(torch.addmv(w, known.mT, known @ w, alpha=-1))
        basis[step + 1] = torch.addmv(w, known.mT, known @ w, alpha=-1)
    found = (_top_eigenvector((basis @ images.mT).double(), rounds).to(u) @ basis).view_as(u)
    length = torch.linalg.vector_norm(found)
    # A zero operator has no such direction; that an operator is not finite shows in ‖Au‖.
    return torch.where((length > 0) & (length < torch.inf), found / length, u)


def _top_eigenvector(square: Tensor, rounds: int) -> Tensor:
    """Return the top eigenvector of a small positive semidefinite matrix, with 1 as its largest entry.

    The matrix is squared 7 times a round, until its other eigenvalues vanish. The longest column is taken: the first
    has next to nothing of the eigenvector where another singular value has overtaken that of the start.
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
