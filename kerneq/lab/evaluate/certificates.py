"""Certified accuracy: the share of pictures classified rightly under every perturbation up to a given length.

Next to it stands the shortest perturbation that an attack finds: the exact radius lies between the two.
"""

import dataclasses
from typing import final

import torch
from torch import Tensor, nn

from ...certificates import LayerBound, certify
from ...equilibrium import solving
from ...tensors import per_sample, per_sample_norm
from .attack import InPixels, Threat, pgd
from .trained import NotApplicableError, TrainedRun

RADII = (0.0, 36 / 255, 72 / 255, 108 / 255, 0.5, 1.0)  # ℓ2, for pixels in [0, 1]: those of the literature
BALLS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)  # radii of the attack, one after the other until it succeeds
HALVINGS = 8  # bisection steps between a picture and the changed one


@final
@dataclasses.dataclass(frozen=True)
class CertificateResult:
    """Certified accuracy of a trained run; all radii are ℓ2, for pixels in [0, 1]."""

    images: int
    accuracy: float
    layers: list[LayerBound]  # why each equilibrium is unique
    unique: bool
    error: float | None  # largest distance of a computed equilibrium from the exact one, where that is unique
    lipschitz: float  # the largest constant of a difference of two logits, for normalised pictures
    radii: list[float]
    certified: list[float]  # share of the pictures that are right, and certified to stay right within the radius
    mean_radius: float  # over all pictures; 0 for those that are wrong
    attacked: int  # pictures attacked, of those that are right
    attacked_radius: float  # the mean certified radius of these
    found_radius: float | None  # the mean distance at which an attack changes their class, where it does
    unfound: int  # pictures for which the attack found nothing
    broken: int  # pictures changed within their certified radius; not 0 only if there is an error somewhere

    def summary(self) -> list[tuple[str, str]]:
        worst = min(self.layers, key=lambda layer: layer.convexity, default="nothing to solve")
        found = "–" if self.found_radius is None else f"{self.found_radius:.3g}"
        attack = f"certified {self.attacked_radius:.3g}, changed by PGD at {found}"
        pairs = zip(self.radii, self.certified, strict=True)
        return [
            ("equilibrium", f"unique ({worst})" if self.unique else f"not shown to be unique ({worst})"),
            ("computed to within", "–" if self.error is None else f"{self.error:.1e}"),
            ("accuracy", f"{self.accuracy:.2%} of {self.images} pictures"),
            *((f"certified at {radius:.3g}", f"{share:.2%}") for radius, share in pairs if radius > 0),
            ("mean radius", f"{self.mean_radius:.3g}"),
            (f"{self.attacked} attacked", f"{attack}, inside the certificate {self.broken}"),
        ]


def measure_certificates(
    trained: TrainedRun, *, images: int = 1000, attacked: int = 64, steps: int = 20
) -> CertificateResult:
    """Certify a random choice of test pictures, and attack `attacked` of the right ones by PGD of `steps` steps."""
    chosen = trained.test.sample(images)
    batches = list(trained.batches(chosen).epoch(0))
    x, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    try:
        found = certify(trained.model, x, std=chosen.std)
    except TypeError as error:  # the model or its kernel has no certificates
        raise NotApplicableError(str(error)) from None
    assert found.pixel_radius is not None
    right = found.prediction == labels
    radius = torch.where(right, found.pixel_radius, 0.0)
    model = InPixels(trained.model, chosen.mean, chosen.std).eval()
    some = right.nonzero().flatten()[:attacked]
    distance = nearest_change(model, model.pixels(x[some]), labels[some], steps=steps)
    changed = distance.isfinite()
    return CertificateResult(
        images=len(x),
        accuracy=float(right.double().mean()),
        layers=list(found.layers),
        unique=found.unique,
        error=float(found.error.max()) if found.unique else None,
        lipschitz=float(found.lipschitz.max()),
        radii=list(RADII),
        certified=[float((right & (radius > least)).double().mean()) for least in RADII],
        mean_radius=float(radius.mean()),
        attacked=len(some),
        attacked_radius=float(radius[some].mean()) if len(some) else 0.0,
        found_radius=float(distance[changed].mean()) if bool(changed.any()) else None,
        unfound=int((~changed).sum()),
        broken=int((distance < radius[some]).sum()),
    )


def nearest_change(model: nn.Module, x: Tensor, labels: Tensor, *, steps: int = 20) -> Tensor:
    """The ℓ2 distance of the nearest picture of another class that an attack finds, (batch,); ∞ where it finds none.

    PGD in growing balls until it succeeds, then bisection towards x. Pictures may leave [0, 1], as certificates do not
    use these limits.
    """
    nearest = torch.full((len(x),), torch.inf, dtype=torch.float64, device=x.device)
    with solving(model, tol=1e-5, max_steps=200, exact=True):
        for number, radius in enumerate(BALLS):
            left = nearest.isinf().nonzero().flatten()
            if len(left) == 0:
                break
            threat = Threat("l2", radius, steps, restarts=2, seed=number)
            found = pgd(model, x[left], labels[left], threat, box=None)
            hit = left[found.fooled]
            if len(hit) > 0:
                nearest[hit] = _shortened(model, x[hit], found.x[found.fooled], labels[hit])
    return nearest


@torch.no_grad()
def _shortened(model: nn.Module, x: Tensor, changed: Tensor, labels: Tensor) -> Tensor:
    """The distance from x, on the line to `changed`, at which the class changes, (batch,), by bisection."""
    same, other = torch.zeros(len(x), device=x.device), torch.ones(len(x), device=x.device)
    for _ in range(HALVINGS):
        middle = (same + other) / 2
        kept = model(torch.lerp(x, changed, per_sample(middle, x).to(x))).argmax(1) == labels
        same, other = torch.where(kept, middle, same), torch.where(kept, other, middle)
    return other.double() * per_sample_norm(changed.double() - x.double())
