"""What is proved about a prediction: one equilibrium, a bound on the error of the computed one, a radius around x.

`certify(model, x)` bounds the Lipschitz constant of every difference of two logits, through stem, equilibria, fusion
and head. No perturbation shorter than a margin divided by it changes the prediction (docs/certificates.md).
"""

import copy
import dataclasses
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from ..gradients import AbstractSteps
from ..models import CertifiedClassifier
from ..solvers import Proximal
from ..tensors import check_positive, check_whole
from .bounds import AbstractBounds, LayerBound
from .branches import BranchBounds, Branched
from .chain import ChainBounds

MAX_STEPS = 1000  # of a solve; where they are not enough, the error is larger and the radius smaller


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
    deviation: Tensor  # at x the largest logit less any other is off by no more than this in the model as it stands

    @property
    def unique(self) -> bool:
        """Whether every layer has one equilibrium, for every input."""
        return all(layer.unique for layer in self.layers)

    def __str__(self) -> str:
        worst = min(self.layers, key=lambda layer: layer.convexity, default="nothing to solve")
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
    if not isinstance(model, CertifiedClassifier | Branched):
        wanted = "`CertifiedClassifier`, `LipschitzClassifier`, `Classifier` and `DenseClassifier`, whose layers have"
        raise TypeError(f"Certificates are made for {wanted} known bounds, got {type(model).__name__}.")
    if std is not None and len(std) != x.shape[1]:
        raise ValueError(f"`std` needs one number for each of the {x.shape[1]} channels, got {len(std)}.")
    if len(x) == 0:
        raise ValueError(f"The input must hold at least one sample, got shape {tuple(x.shape)}.")
    as_it_stands = copy.deepcopy(model).eval()
    exact = copy.deepcopy(model).double().eval()
    for layer in exact.layers():
        if isinstance(layer.gradient, AbstractSteps):
            raise TypeError(f"Certificates are about equilibria, got a layer that gives {layer.gradient.steps} steps.")
        layer.solver, layer.tol, layer.max_steps, layer.check_every = Proximal(), tol, MAX_STEPS, None
    bounds: AbstractBounds
    with torch.autocast(x.device.type, enabled=False):
        first = x[:1].double()
        if isinstance(exact, CertifiedClassifier):
            bounds = ChainBounds.of(exact, first)
        else:
            bounds = BranchBounds.of(exact, first)
        parts = [bounds.margins(part.double()) for part in torch.split(x.detach(), batch)]
        scale = None if std is None else bounds.pixel_scale(std)
    logits, slack, error = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    top, prediction = logits.max(1)
    own = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, prediction[:, None], True)
    margins = (top[:, None] - logits).masked_fill(own, torch.inf)
    radius = ((margins - slack) / bounds.lipschitz[prediction]).masked_fill(own, torch.inf).amin(1)
    unique = all(layer.unique for layer in bounds.layers)
    radius = torch.where(radius > 0, radius, 0.0) * unique  # where nothing is proved it is NaN or negative
    dtype = next(as_it_stands.parameters()).dtype
    standing = torch.cat([as_it_stands(part.to(dtype)) for part in torch.split(x.detach(), batch)]).double()
    off = (standing.gather(1, prediction[:, None]) - standing) - (top[:, None] - logits)
    return Certificate(
        prediction=prediction,
        margin=margins.amin(1),
        error=error,
        radius=radius,
        pixel_radius=None if scale is None else radius * scale,
        lipschitz=bounds.lipschitz,
        layers=bounds.layers,
        deviation=(off.abs() + slack).amax(1),
    )
