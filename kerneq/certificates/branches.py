"""The Lipschitz constants of classifiers with branches: stem, equilibria, fusion and head, each with its norm."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from ..cells import AbstractKernelCell
from ..equilibrium import Equilibrium
from ..kernels.base import KernelConstants
from ..kernels.radial import PatchParameters
from ..models import Classifier, DenseClassifier, LipschitzClassifier
from ..models.classifier import Branch
from ..models.lipschitz import AlmostOrthogonal, LipschitzBranch, UnitRows
from ..solution import Solution
from ..tensors import per_sample_norm
from .bounds import ROUNDING, AbstractBounds, LayerBound, pairwise_distances
from .norms import conv_norm, matrix_norm

Branched = Classifier | LipschitzClassifier | DenseClassifier


Seen = dict[nn.Module, tuple[Tensor, Any]]  # the input and the output of a module
Stem = list[tuple[nn.Sequential, float]]  # the layers before the branches, each with its norm


def _run(model: Branched, x: Tensor) -> tuple[Tensor, Seen]:
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
class BranchBounds(AbstractBounds):
    """The constants of a classifier with branches, or with one dense equilibrium, for pictures of one size."""

    layers: tuple[LayerBound, ...]
    model: Branched
    shape: tuple[int, ...]  # of a picture
    stem: Stem
    paths: "tuple[_Path, ...]"
    branches: Tensor  # (classes, classes): how far the output of the stem moves logit i − logit j, at most

    @classmethod
    def of(cls, model: Branched, x: Tensor) -> Self:
        """Find them, for pictures like x (1, channels, height, width)."""
        seen = _run(model, x)[1]
        stem = [(layer, _layer_norm(layer, seen[layer][0])) for layer in _stem(model)]
        paths = tuple(_paths(model, seen))
        branches = torch.stack([path.before * path.bound.sensitivity * path.pairs for path in paths]).sum(0)
        branches.fill_diagonal_(0.0)  # a logit less itself never moves; ∞ · 0 is NaN
        return cls(tuple(path.bound for path in paths), model, tuple(x.shape[1:]), stem, paths, branches)

    @property
    def lipschitz(self) -> Tensor:
        return math.prod(norm for _, norm in self.stem) * self.branches

    def margins(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Every computed quantity has a rounding error, and an equilibrium its distance from the exact one. Each error
        is multiplied by the constants of the layers between it and the logits."""
        logits, seen = _run(self.model, x)
        predicted = logits.argmax(1)
        slack, error = torch.zeros_like(logits), logits.new_zeros(len(x))
        for path in self.paths:
            given, solution = seen[path.layer]
            distance = path.distance(given, solution)
            error = torch.maximum(error, distance)
            distance = distance + ROUNDING * path.bound.sensitivity * per_sample_norm(given)
            length = torch.linalg.vector_norm(path.rows, dim=1)
            slack += distance[:, None] * path.pairs[predicted]
            slack += ROUNDING * per_sample_norm(solution.value)[:, None] * (length[predicted][:, None] + length)
        after = self.branches[predicted]
        for layer, norm in reversed(self.stem):
            given, output = seen[layer]
            slack += ROUNDING * (norm * per_sample_norm(given) + per_sample_norm(output))[:, None] * after
            after = norm * after
        return logits, slack + ROUNDING * logits.abs().amax(1, keepdim=True), error

    def pixel_scale(self, std: Sequence[float]) -> float:
        """By how much the norm of the first linear map shrinks if channels are not divided by `std` before it."""
        scale = 1 / torch.tensor(std, dtype=torch.float64, device=self.branches.device)
        if isinstance(self.model, DenseClassifier):
            layer, scale = self.model.equilibrium, scale.repeat_interleave(math.prod(self.shape[1:]))
            return 1 / _input_norm(layer, None, scale) * _input_norm(layer, None)
        first, pictures = self.stem[0][0], scale.new_zeros(1, *self.shape)
        return 1 / _layer_norm(first, pictures, scale) * _layer_norm(first, pictures)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class _Path:
    """One equilibrium layer between the stem and the logits, with its constants."""

    layer: Equilibrium
    bound: LayerBound
    before: float  # the norm of stem ↦ input of the layer
    constants: KernelConstants  # of the kernel
    norm: float  # ‖W‖
    rows: Tensor  # (classes, channels): the logits as a function of the layer's output

    @property
    def pairs(self) -> Tensor:
        """How far a unit change of the layer's output moves logit i − logit j, at most, (classes, classes)."""
        return pairwise_distances(self.rows)

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
        return per_sample_norm(value - f.operator(z)) + self.norm * error if features else error


def _layer_norm(layer: nn.Sequential, given: Tensor, scale: Tensor | float = 1.0) -> float:
    """Return the norm of the linear part of a layer of the stem, for pictures like `given` with scaled channels."""
    fold, conv, norm = layer if len(layer) == 3 else (nn.PixelUnshuffle(1), *layer)
    assert isinstance(fold, nn.PixelUnshuffle) and isinstance(conv, nn.Conv2d)
    factor = fold.downscale_factor
    size = given.shape[2] // factor, given.shape[3] // factor
    if isinstance(scale, Tensor):
        scale = scale.repeat_interleave(factor**2)[:, None, None]
    return conv_norm(_weight(conv, norm) * scale, size, conv.stride[0])


def _stem(model: Branched) -> list[nn.Sequential]:
    """Return the layers before the branches: a convolution, its batch norm and a 1-Lipschitz activation each."""
    if isinstance(model, DenseClassifier):
        return []
    return [layer for layer in model.stem if isinstance(layer, nn.Sequential)]


def _paths(model: Branched, seen: Seen) -> Iterator[_Path]:
    """Yield every equilibrium layer with its constants.

    A change of its output moves logit i by at most ⟨|rowᵢ|, lengths of the changes of its channels⟩: batch norms are
    diagonal, ReLU and MaxMin are 1-Lipschitz, and pooling to 1/s, up-sampling by s and the mean of n pixels have the
    norms 1/s, s and 1/√n: together 1/√(pixels of the branch), which a `LipschitzBranch` undoes.
    """
    rows = _scaled(_weight(model.head).mT, model.norm).mT
    if isinstance(model, DenseClassifier):
        yield _path("dense", model.equilibrium, seen[model.equilibrium][0], 1.0, rows)
        return
    count = len(model.branches)
    heads = rows.chunk(count, 1) if model.config.join == "concatenate" else [rows / count] * count
    for index, (branch, own) in enumerate(zip(model.branches, heads, strict=True)):
        assert isinstance(branch, Branch | LipschitzBranch)
        given = seen[branch.equilibrium][0]
        if isinstance(branch, LipschitzBranch):
            before, after = 1.0, 1 / (branch.sensitivity * float(branch.projection_norm()))
        else:
            before, after, own = (
                1 / branch.scale,
                (given.shape[2] * given.shape[3]) ** -0.5,
                _scaled(own.mT, branch.norm).mT,
            )
        before = math.inf if model.config.refinements else before  # residual blocks in between have no known bound
        yield _path(f"branch{index}", branch.equilibrium, given, before, after * own)


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
    return _Path(layer, bound, before, constants, norm, rows)


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
