"""Saliency maps: Grad-CAM through the equilibrium, integrated gradients, and the model's own patch weights.

A map is (batch, height, width), of the size of the pictures, and higher where a pixel matters more. Maps are compared
by the areas of deletion and insertion. Pictures are normalised; gradients are exact, in the model's dtype.

By hand, since they are short: captum, one more package to install, would also take a pass for each layer of Grad-CAM.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import final

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import interpolate

from ...equation import Equation
from ...equilibrium import hook_solves, layers_of, solving
from ...maps import AbstractMap
from ..data import Images
from .attack import freeze
from .sheet import SIDE, draw_sheet, enlarge
from .trained import TrainedRun

PATH = 32  # points on the line from the baseline to the picture
SHOWN = 8  # pictures on a sheet
IMAGES, STEPS = 256, 16  # measured pictures at most, and the parts in which their pixels are replaced


@contextlib.contextmanager
def _exact_gradients(model: nn.Module) -> Iterator[None]:
    """Inside, equilibria have a residual of 1e-5 and exact gradients, and parameters need none."""
    with solving(model, tol=1e-5, max_steps=100, exact=True), freeze(model), torch.enable_grad():
        yield


def grad_cam(model: nn.Module, x: Tensor, classes: Tensor, layers: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Grad-CAM (Selvaraju et al., 2017) at some modules, by one pass: relu(Σ_c α_c A_c), α_c the mean of ∂y/∂A_c.

    y is the logit of each picture's class, and A a module's output (batch, channels, h, w).
    """
    maps: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, inputs: object, output: Tensor) -> None:
        maps[name] = output

    with _exact_gradients(model), contextlib.ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.callback(layer.register_forward_hook(functools.partial(keep, name)).remove)
        scores = model(x.detach().requires_grad_()).gather(1, classes[:, None])
        slopes = torch.autograd.grad(scores.sum(), [maps[name] for name in layers])
    found = {}
    for name, slope in zip(layers, slopes, strict=True):
        alpha, A = slope.mean((2, 3), keepdim=True), maps[name].detach()
        found[name] = _resized(torch.relu((alpha * A).sum(1)), x)
    return found


def _resized(maps: Tensor, x: Tensor) -> Tensor:
    """Maps (batch, h, w) at the size of the pictures."""
    resized: Tensor = interpolate(maps[:, None], x.shape[2:], mode="bilinear", align_corners=False)[:, 0]
    return resized


def integrated_gradients(model: nn.Module, x: Tensor, classes: Tensor, steps: int = PATH) -> Tensor:
    """x ⊙ ∫₀¹ ∂y/∂x at t x dt, of the shape of x (Sundararajan et al., 2017), by the midpoint rule.

    The numbers of a picture sum to y(x) − y(0), y the logit of its class; 0 is the data set's mean colour.
    """
    x = x.detach()
    total = torch.zeros_like(x)
    with _exact_gradients(model):
        for step in range(steps):
            at = torch.lerp(torch.zeros_like(x), x, (step + 0.5) / steps).requires_grad_()
            total += torch.autograd.grad(model(at).gather(1, classes[:, None]).sum(), at)[0]
    return x * total / steps


@torch.no_grad()
def weight_map(model: nn.Module, x: Tensor) -> Tensor | None:
    """The weight ω(sᵢ) of every patch at the equilibrium, mean over groups of channels and over layers; None without.

    A radial kernel weighs each patch of its input by ω: near 1 where W fits the patch, towards 0 where it does not. A
    uniform background, which is easy to fit, ranks high: deletion and insertion tell whether ω shows what decides.
    """
    found: dict[nn.Module, Tensor] = {}

    def note(layer: nn.Module, f: AbstractMap, z: Tensor) -> None:
        weights = f.weights(z) if isinstance(f, Equation) and z.dim() == 4 else None
        if weights is not None:
            found[layer] = _resized(weights.mean(1).to(x.dtype), x)

    with hook_solves(model, note):
        model(x)
    layers = [found[layer] for layer in layers_of(model) if layer in found]  # solved in any order, summed in this one
    return torch.stack(layers).mean(0) if layers else None


@torch.no_grad()
def replace_pixels(model: nn.Module, x: Tensor, classes: Tensor, maps: Tensor, steps: int = 16) -> Tensor:
    """The areas of deletion and of insertion (Petsiuk et al., 2018), (2, batch): under the probability of the class.

    Pixels are replaced in the order of the map, in `steps` equal parts, all channels at once. Deletion replaces those
    of the picture by 0, the data set's mean colour (a small area is good), insertion the other way round (a large one).
    """
    rank = maps.flatten(1).argsort(dim=1, descending=True, stable=True).argsort(dim=1).view(len(x), 1, *x.shape[2:])
    curves = []
    for step in range(steps + 1):
        first = rank < step * rank[0].numel() / steps
        both = torch.where(first, 0, x), torch.where(first, x, 0)
        curves.append(torch.stack([model(some).softmax(1).gather(1, classes[:, None])[:, 0] for some in both]))
    return torch.trapezoid(torch.stack(curves, dim=2), dx=1 / steps)


def feature_layers(model: nn.Module, x: Tensor) -> dict[str, nn.Module]:
    """Where to take Grad-CAM: at the last feature map, and at the stem, whose gradient comes through all equilibria."""
    seen: list[nn.Module] = []  # modules whose output is a feature map, in the order of the computation

    def note(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor) and output.dim() == 4:
            seen.append(module)

    with contextlib.ExitStack() as hooks, torch.no_grad():
        for module in model.modules():
            hooks.callback(module.register_forward_hook(note).remove)
        model(x[:1])
    found = {"Grad-CAM": seen[-1]} if seen else {}
    if layers_of(model) and "stem" in dict(model.named_children()):
        found["Grad-CAM stem"] = model.get_submodule("stem")
    return found


def all_maps(model: nn.Module, x: Tensor, classes: Tensor) -> dict[str, Tensor]:
    """Every map of pictures x for these classes, by the name of its method."""
    layers = feature_layers(model, x)
    found = grad_cam(model, x, classes, layers) if layers else {}
    found["integrated gradients"] = integrated_gradients(model, x, classes).sum(1)
    weights = weight_map(model, x)
    return found if weights is None else found | {"patch weights": weights}


def draw_overlay(picture: Tensor, heat: Tensor) -> Image.Image:
    """A map (h, w) over its picture, uint8 (channels, h, w), from violet, its lowest number, to yellow, its highest.

    Negative numbers, which speak against the class, count as zero.
    """
    from matplotlib import colormaps  # slow to import, and `kerneq.load` need not wait for it

    heat = heat.detach().float().cpu().clamp_min(0)
    heat = (heat - heat.min()) / (heat.max() - heat.min()).clamp_min(torch.finfo(heat.dtype).tiny)
    coloured = Image.fromarray((colormaps["inferno"](heat.numpy())[..., :3] * 255).astype(np.uint8))
    return Image.blend(enlarge(picture), coloured.resize((SIDE, SIDE), Image.Resampling.BILINEAR), 0.6)


def contact_sheet(pictures: Tensor, names: Sequence[str], maps: Mapping[str, Tensor]) -> Image.Image:
    """A row for each picture, uint8 (count, channels, h, w), with its name: the picture, then each map over it."""
    rows = []
    for place, (picture, name) in enumerate(zip(pictures, names, strict=True)):
        tiles = [(draw_overlay(picture, heat[place]), title.replace(" ", "\n", 1)) for title, heat in maps.items()]
        rows.append([(enlarge(picture), name), *tiles])
    return draw_sheet("Where the model looks: yellow matters most", rows)


@final
@dataclasses.dataclass(frozen=True)
class MethodScore:
    """Areas under the two curves, mean over pictures."""

    deletion: float  # lower is better
    insertion: float  # higher is better


@final
@dataclasses.dataclass(frozen=True)
class SaliencyResult:
    """Deletion and insertion for each kind of map of a trained run; `random` is a map of noise."""

    images: int
    steps: int
    methods: dict[str, MethodScore]

    def summary(self) -> list[tuple[str, str]]:
        scores = self.methods.items()
        return [(name, f"deletion {found.deletion:.3f}, insertion {found.insertion:.3f}") for name, found in scores]


@torch.no_grad()
def measure_saliency(trained: TrainedRun, *, images: int = IMAGES, steps: int = STEPS) -> SaliencyResult:
    """Deletion and insertion of every map on a random choice of test pictures, for the class the model sees."""
    chosen = trained.test.sample(images)
    noise = torch.Generator().manual_seed(0)
    sums: dict[str, Tensor] = {}
    batches = trained.batches(chosen)
    for x, _ in trained.track(batches.epoch(0), "saliency", len(batches)):
        classes = trained.model(x).argmax(1)
        maps = all_maps(trained.model, x, classes)
        maps["random"] = torch.rand(len(x), *x.shape[2:], generator=noise).to(x)
        for name, some in trained.track(maps.items(), "maps", len(maps)):
            areas = replace_pixels(trained.model, x, classes, some, steps=steps)
            sums[name] = sums.get(name, 0) + areas.double().sum(1)
    methods = {name: MethodScore(*(total / len(chosen)).tolist()) for name, total in sums.items()}
    return SaliencyResult(len(chosen), steps, methods)


def map_each(trained: TrainedRun, images: Images) -> dict[str, Tensor]:
    """Every map of each of the images, for the class of its label; batch by batch, to limit the memory."""
    found = [all_maps(trained.model, x, classes) for x, classes in trained.batches(images).epoch(0)]
    return {name: torch.cat([maps[name] for maps in found]) for name in found[0]}


@torch.no_grad()
def draw_saliency(trained: TrainedRun, result: SaliencyResult) -> dict[str, Image.Image]:
    """A sheet of a few pictures and their maps."""
    chosen = trained.test.sample(min(SHOWN, result.images))
    classes = torch.cat([trained.model(x).argmax(1) for x, _ in trained.batches(chosen).epoch(0)]).cpu()
    maps = map_each(trained, dataclasses.replace(chosen, labels=classes))
    pairs = [(chosen.classes[label], chosen.classes[seen]) for label, seen in zip(chosen.labels, classes, strict=True)]
    names = [label if label == seen else f"{label}\nseen as {seen}" for label, seen in pairs]
    return {"saliency": contact_sheet(chosen.in_memory(), names, maps)}
