"""What is proved about a prediction: one equilibrium, a bound on the error of the computed one, a radius around x.

`certify(model, x)` bounds the Lipschitz constant of every difference of two logits, through stem, equilibria, fusion
and head. No perturbation shorter than a margin divided by it changes the prediction (docs/certificates.md).
"""

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from ..cells import AbstractKernelCell
from ..equilibrium import Equilibrium
from ..gradients import AbstractSteps
from ..kernels.base import KernelConstants
from ..kernels.radial import PatchParameters
from ..models import Classifier, DenseClassifier, LipschitzClassifier
from ..models.classifier import AbstractBranch
from ..models.lipschitz import AlmostOrthogonal, UnitRows
from ..solution import Solution
from ..solvers import Proximal
from ..tensors import check_positive, check_whole, per_sample_norm
from .norms import conv_norm, matrix_norm

# A bound on what rounding in float64 adds to a layer's output, relative to the norm of the layer times the length of
# its input. An inner product of n terms is off by at most nε times that of the absolute values, which is at most √n
# times larger: 10⁻¹¹ for n = 2304.
ROUNDING = 1e-10
MAX_STEPS = 1000  # of a solve; where they are not enough, the error is larger and the radius smaller
Certified = Classifier | LipschitzClassifier | DenseClassifier


@final
@dataclasses.dataclass(frozen=True)
class LayerBound:
    """Why an equilibrium layer has one equilibrium: E is strongly convex, μ > 0, as long as L < `threshold`."""

    name: str
    lipschitz: float  # L, from above
    threshold: float | None  # None: for every L
    convexity: float  # μ, from below
    sensitivity: float  # the Lipschitz constant of input ↦ z*, the norm of the map x ↦ aW_h included

    @property
    def unique(self) -> bool:
        """Whether the equilibrium is unique, for every input."""
        return self.convexity > 0

    def __str__(self) -> str:
        limit = ", any L will do" if self.threshold is None else f" {'<' if self.unique else '≥'} {self.threshold:.3g}"
        return f"{self.name}: L = {self.lipschitz:.3g}{limit}"


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Certificate:
    """What holds for the model in exact arithmetic, with the weights it has; tensors are (batch,), in float64.

    For every x′ with ‖x′ − x‖₂ < radius the class of largest logit is `prediction`. Units are those of x, the
    normalised pictures; in `pixel_radius` those of pixels in [0, 1]. A radius of 0 certifies nothing.
    """

    prediction: Tensor
    margin: Tensor  # its logit less the next largest, as computed
    error: Tensor  # ‖z − z*‖ is at most this, for the worst layer
    radius: Tensor
    pixel_radius: Tensor | None  # where `std` was given
    lipschitz: Tensor  # (classes, classes): of logit i − logit j, in the units of x
    layers: tuple[LayerBound, ...]

    @property
    def unique(self) -> bool:
        """Whether every layer has one equilibrium, for every input."""
        return all(layer.unique for layer in self.layers)

    def __str__(self) -> str:
        worst = min(self.layers, key=lambda layer: layer.convexity)
        return (
            f"{'One equilibrium' if self.unique else 'Uniqueness not shown'} ({worst}), computed to "
            f"{float(self.error.max()):.1e}; mean radius {float(self.radius.mean()):.3g}, "
            f"{int((self.radius > 0).sum())} of {len(self.radius)} predictions certified."
        )

    __repr__ = __str__  # the numbers of a batch would fill the screen


@torch.no_grad()
def certify(
    model: nn.Module, x: Tensor, *, std: Sequence[float] | None = None, tol: float = 1e-7, batch: int = 100
) -> Certificate:
    """Return a `Certificate` for pictures x (count, channels, height, width), normalised as in training.

    The certified radius is the margin over the Lipschitz constant of the difference of two logits (Tsuzuku et al.,
    2018). The model is copied to float64 and solved, `batch` pictures at a time, to a relative residual of `tol`; a
    bound on the error of solve and rounding is subtracted from the margin. With `std`, by which pixels in [0, 1] were
    divided, the radius is stated for pixels too. For a classifier with `refinements` only the equilibria are certified.

        certificate = kq.certify(model, x)
        certificate.radius  # no perturbation of x shorter than this changes certificate.prediction
    """
    check_positive("tol", tol)
    check_whole("batch", batch)
    if not isinstance(model, Certified):
        wanted = "`LipschitzClassifier`, `Classifier` and `DenseClassifier`, whose layers have known bounds"
        raise TypeError(f"Certificates are made for {wanted}, got {type(model).__name__}.")
    if len(x) == 0:
        raise ValueError(f"The input must hold at least one sample, got shape {tuple(x.shape)}.")
    exact = copy.deepcopy(model).double().eval()
    for layer in exact.layers():
        if isinstance(layer.gradient, AbstractSteps):
            raise TypeError(f"Certificates are about equilibria, got a layer that gives {layer.gradient.steps} steps.")
        layer.solver, layer.tol, layer.max_steps, layer.check_every = Proximal(), tol, MAX_STEPS, None
    with torch.autocast(x.device.type, enabled=False):
        seen = _run(exact, x[:1].double())[1]
        stem = [(layer, _layer_norm(layer, seen[layer][0])) for layer in _stem(exact)]
        paths = _paths(exact, seen)
        # (classes, classes): how far the output of the stem, and the pictures, move logit i − logit j, at most
        branches = torch.stack([path.before * path.bound.sensitivity * path.pairs for path in paths]).sum(0)
        branches.fill_diagonal_(0.0)  # a logit less itself never moves; ∞ · 0 is NaN
        lipschitz = math.prod(norm for _, norm in stem) * branches
        unique = all(path.bound.unique for path in paths)
        parts = [_margins(exact, stem, paths, branches, part.double()) for part in torch.split(x.detach(), batch)]
        scale = None if std is None else _pixel_scale(exact, x, std)
    logits, slack, error = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    top, prediction = logits.max(1)
    own = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, prediction[:, None], True)
    margins = (top[:, None] - logits).masked_fill(own, torch.inf)
    radius = ((margins - slack) / lipschitz[prediction]).masked_fill(own, torch.inf).amin(1)
    radius = torch.where(radius > 0, radius, 0.0) * unique  # where nothing is proved it is NaN or negative
    return Certificate(
        prediction=prediction,
        margin=margins.amin(1),
        error=error,
        radius=radius,
        pixel_radius=None if scale is None else radius * scale,
        lipschitz=lipschitz,
        layers=tuple(path.bound for path in paths),
    )


Seen = dict[nn.Module, tuple[Tensor, Any]]  # the input and the output of a module
Stem = list[tuple[nn.Sequential, float]]  # the layers before the branches, each with its norm


def _run(model: Certified, x: Tensor) -> tuple[Tensor, Seen]:
    """Return the logits, and the input and output of every layer of the stem and every equilibrium layer."""
    seen: Seen = {}

    def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        seen[module] = inputs[0], output

    hooks = [module.register_forward_hook(note) for module in (*_stem(model), *model.layers())]
    logits = model(x)
    for hook in hooks:
        hook.remove()
    return logits, seen


@final
@dataclasses.dataclass(frozen=True, eq=False)
class _Path:
    """One equilibrium layer between the stem and the logits, with its constants."""

    layer: Equilibrium
    bound: LayerBound
    before: float  # the norm of stem ↦ input of the layer
    constants: KernelConstants  # of the kernel
    rows: Tensor  # (classes, channels): the logits as a function of the layer's output

    @property
    def pairs(self) -> Tensor:
        """How far a unit change of the layer's output moves logit i − logit j, at most, (classes, classes)."""
        return torch.cdist(self.rows, self.rows, compute_mode="donot_use_mm_for_euclid_dist")

    def distance(self, given: Tensor, solution: Solution) -> Tensor:
        """Return a bound on the distance of the computed output from the exact one, (batch,) (facts, 4)."""
        (cell, _), bound = _parts(self.layer), self.bound
        f, value = cell.bind(given), solution.value
        features = cell.gives == "features"
        z = f.state_at(value) if features else value
        gain = self.constants.gain
        lengths = self.constants.push * per_sample_norm(f.binding.a) + (1 + gain**2) * per_sample_norm(z)
        gap = per_sample_norm(f(z) - z) + ROUNDING * lengths
        error = (1 + bound.lipschitz / bound.convexity) * gap if bound.unique else torch.full_like(gap, torch.inf)
        return per_sample_norm(value - f.operator(z)) + gain * error if features else error


def _margins(
    model: Certified, stem: Stem, paths: Sequence[_Path], branches: Tensor, x: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, by how much each may be nearer to the largest than computed (batch, classes), and error (batch,).

    Every computed quantity has a rounding error, and an equilibrium its distance from the exact one. Each error is
    multiplied by the constants of the layers between it and the logits.
    """
    logits, seen = _run(model, x)
    predicted = logits.argmax(1)
    slack, error = torch.zeros_like(logits), logits.new_zeros(len(x))
    for path in paths:
        given, solution = seen[path.layer]
        distance = path.distance(given, solution)
        error = torch.maximum(error, distance)
        distance = distance + ROUNDING * path.bound.sensitivity * per_sample_norm(given)
        length = torch.linalg.vector_norm(path.rows, dim=1)
        slack += distance[:, None] * path.pairs[predicted]
        slack += ROUNDING * per_sample_norm(solution.value)[:, None] * (length[predicted][:, None] + length)
    after = branches[predicted]
    for layer, norm in reversed(stem):
        given, output = seen[layer]
        slack += ROUNDING * (norm * per_sample_norm(given) + per_sample_norm(output))[:, None] * after
        after = norm * after
    return logits, slack + ROUNDING * logits.abs().amax(1, keepdim=True), error


def _layer_norm(layer: nn.Sequential, given: Tensor, scale: Tensor | float = 1.0) -> float:
    """Return the norm of the linear part of a layer of the stem, for pictures like `given` with scaled channels."""
    fold, conv, norm = layer if len(layer) == 3 else (nn.PixelUnshuffle(1), *layer)
    assert isinstance(fold, nn.PixelUnshuffle) and isinstance(conv, nn.Conv2d)
    factor = fold.downscale_factor
    size = given.shape[2] // factor, given.shape[3] // factor
    if isinstance(scale, Tensor):
        scale = scale.repeat_interleave(factor**2)[:, None, None]
    return conv_norm(_weight(conv, norm) * scale, size, conv.stride[0])


def _stem(model: Certified) -> list[nn.Sequential]:
    """Return the layers before the branches: a convolution, its batch norm and a 1-Lipschitz activation each."""
    if isinstance(model, DenseClassifier):
        return []
    return [layer for layer in model.stem if isinstance(layer, nn.Sequential)]


def _paths(model: Certified, seen: Seen) -> list[_Path]:
    """Return every equilibrium layer with its constants.

    A change of its output moves logit i by at most ⟨|rowᵢ|, lengths of the changes of its channels⟩: batch norms are
    diagonal, ReLU and MaxMin are 1-Lipschitz, and pooling to 1/s, up-sampling by s and the mean of n pixels have the
    norms 1/s, s and 1/√n.
    """
    rows = _scaled(_weight(model.head).mT, model.norm).mT
    if isinstance(model, DenseClassifier):
        return [_path("dense", model.equilibrium, seen[model.equilibrium][0], 1.0, rows)]
    found, count = [], len(model.branches)
    heads = rows.chunk(count, 1) if model.config.join == "concatenate" else [rows / count] * count
    for index, (branch, own) in enumerate(zip(model.branches, heads, strict=True)):
        assert isinstance(branch, AbstractBranch)
        given = seen[branch.equilibrium][0]
        before, after = branch.stretches(math.prod(given.shape[2:]))
        before = math.inf if model.config.refinements else before  # residual blocks in between have no known bound
        rows = after * _scaled(own.mT, branch.norm).mT
        found.append(_path(f"branch{index}", branch.equilibrium, given, before, rows))
    return found


def _path(name: str, layer: Equilibrium, given: Tensor, before: float, rows: Tensor) -> _Path:
    """Return L, μ and the Lipschitz constant of x ↦ z* of one layer, for inputs of the size of `given`."""
    cell, patches = _parts(layer)
    size = (given.shape[2], given.shape[3]) if given.dim() == 4 else None
    norm = _norm(cell.bind(given[:1]).operator.weight, size)
    constants = cell.kernel.constants(norm, 1.0 if patches is None else matrix_norm(patches.project.weight))
    if constants is None:
        raise TypeError(f"Certificates are made for radial kernels and the linear one, got {cell.kernel!r}.")
    sensitivity = constants.sensitivity * (_input_norm(layer, size) * (norm if cell.gives == "features" else 1))
    bound = LayerBound(name, constants.lipschitz, constants.threshold, constants.convexity, sensitivity)
    return _Path(layer, bound, before, constants, rows)


def _parts(layer: Equilibrium) -> tuple[AbstractKernelCell, PatchParameters | None]:
    """Return the cell of a layer, and W_h with how patches are cut; None for a kernel without them."""
    cell = layer.cell
    assert isinstance(cell, AbstractKernelCell) and isinstance(cell.similarity, PatchParameters | None)
    return cell, cell.similarity


def _norm(weight: Tensor, size: tuple[int, int] | None, stride: int = 1, padding: int | None = None) -> float:
    """Return the norm of a convolution of pictures of `size`, or of a matrix, whose `size` is None."""
    return matrix_norm(weight.flatten(1)) if size is None else conv_norm(weight, size, stride, padding)


def _input_norm(layer: Equilibrium, size: tuple[int, int] | None, scale: Tensor | float = 1.0) -> float:
    """Return the norm of x ↦ aW_h (x ↦ a for the linear kernel), as one linear map, not as a product of two norms.

    `scale` multiplies the inputs, a number each (dense cells only).
    """
    cell, patches = _parts(layer)
    assert isinstance(cell.inject, nn.Sequential)
    weight = _weight(*cell.inject) * scale
    if patches is None:
        return _norm(weight, size)
    # ‖W_hᵀr‖ = ‖Rr‖, where W_hᵀ = QR has more rows than R.
    p, k = patches.patch, 1 if size is None else weight.shape[-1]  # a matrix is a convolution of pictures of one pixel
    R = torch.linalg.qr(patches.project.weight, mode="r").R.view(-1, patches.split, p, p)
    groups = weight.view(-1, patches.split, weight.shape[1], k, k)
    kernel = weight.new_zeros(len(groups), len(R), weight.shape[1], k + p - 1, k + p - 1)
    for y in range(p):
        for x in range(p):  # the pixel (y, x) of a patch sees the picture y and x further on
            kernel[..., y : y + k, x : x + k] += torch.einsum("jc,gcihw->gjihw", R[:, :, y, x], groups)
    return _norm(kernel.flatten(0, 1), size, stride=p, padding=k // 2)


def _pixel_scale(model: Certified, x: Tensor, std: Sequence[float]) -> float:
    """Return by how much the norm of the first linear map shrinks if channels are not divided by `std` before it."""
    if len(std) != x.shape[1]:
        raise ValueError(f"`std` needs one number for each of the {x.shape[1]} channels, got {len(std)}.")
    scale = 1 / torch.tensor(std, dtype=torch.float64, device=x.device)
    if isinstance(model, DenseClassifier):
        layer, scale = model.equilibrium, scale.repeat_interleave(x.shape[2] * x.shape[3])
        return 1 / _input_norm(layer, None, scale) * _input_norm(layer, None)
    first = _stem(model)[0]
    return 1 / _layer_norm(first, x, scale) * _layer_norm(first, x)


def _weight(linear: nn.Module, norm: nn.Module | None = None) -> Tensor:
    """Return the weight of a convolution or matrix as it is used, the batch norm after it included."""
    if isinstance(linear, AlmostOrthogonal | UnitRows):
        return _scaled(linear.rescale_weight(), norm)
    return _scaled(linear.get_parameter("weight"), norm)


def _scaled(rows: Tensor, norm: nn.Module | None) -> Tensor:
    """Return the rows times the gains of a batch norm in `eval()`; other modules are 1-Lipschitz and change nothing."""
    if not isinstance(norm, nn.modules.batchnorm._BatchNorm):
        return rows
    gains = norm.get_parameter("weight") * torch.rsqrt(norm.get_buffer("running_var") + norm.eps)
    return rows * gains.view(-1, *[1] * (rows.dim() - 1))
