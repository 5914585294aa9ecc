"""AutoAttack (Croce and Hein, 2020) inside certified radii: on a trained network, and with weights edited to break it.

    pip install pyautoattack
    kerneq train certified-tiny-digits --runs RUNS
    python experiments/certified_autoattack.py RUNS/certified-tiny-digits      # some 5 minutes of one core

For each radius all pictures that are certified beyond it are attacked at it by APGD on the cross-entropy and on the
targeted DLR loss, targeted FAB and Square, at their standard lengths. One that changes its class breaks a certificate.
Beside it the attack at three times the radius, which must find many, or it would say nothing. `tests/certificates/
test_autoattack.py` has the same with few steps.
"""

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import kerneq as kq
from kerneq.lab.evaluate.attack import freeze
from kerneq.lab.evaluate.trained import TrainedRun

RADII = (0.3,)  # ℓ2, for pixels in [0, 1]
BEYOND = 3.0  # times the radius
ATTACKS = ["apgd-ce", "apgd-t", "fab-t", "square"]
SHORT = {"apgd_steps": 10, "fab_steps": 3, "queries": 30, "targets": 1}
STANDARD = {"apgd_steps": 100, "fab_steps": 100, "queries": 5000, "targets": 9}
RECORD = Path(__file__).parents[1] / "docs/results/certified-autoattack.json"


class Stretched(nn.Module):
    """The model as one of u in [0, 1], pixels = 3u − 1: AutoAttack cuts u to [0, 1], so pixels only to [−1, 2]."""

    def __init__(self, model: nn.Module, mean: tuple[float, ...], std: tuple[float, ...]):
        super().__init__()
        self.model = model
        self.mean, self.std = (torch.tensor(numbers)[:, None, None] for numbers in (mean, std))

    def forward(self, u: Tensor) -> Tensor:
        logits: Tensor = self.model((3 * u - 1 - self.mean) / self.std)
        return logits


def attack(model: Stretched, x: Tensor, classes: Tensor, radius: float, lengths: dict[str, int]) -> int:
    """Return for how many pictures x, normalised, AutoAttack changes the class within a radius in pixels."""
    from pyautoattack import AutoAttack

    u = (x * model.std + model.mean + 1) / 3
    with kq.solving(model, tol=1e-4, max_steps=100, exact=True), freeze(model):
        tried = AutoAttack(model, norm="L2", eps=radius / 3, seed=0, version="custom", attacks=ATTACKS)
        tried.apgd.n_restarts = 1
        tried.apgd.n_iter = tried.apgd_targeted.n_iter = lengths["apgd_steps"]
        tried.fab.n_iter, tried.square.n_queries = lengths["fab_steps"], lengths["queries"]
        tried.apgd_targeted.n_target_classes = tried.fab.n_target_classes = lengths["targets"]
        changed, _ = tried.run_standard_evaluation(u, classes)
        moved = 3 * (changed - u).flatten(1).norm(dim=1)
        assert bool((moved <= radius * (1 + 1e-4)).all())
        return int((model(changed).argmax(1) != classes).sum())


def edit(model: kq.models.CertifiedClassifier, x: Tensor, steps: int = 30) -> kq.models.CertifiedClassifier:
    """Return the network with weights that climb how far a short change of x moves the logits; ‖W‖ has no bound."""
    model = copy.deepcopy(model)
    layers = model.layers()
    for layer in layers:
        layer.cell.cell.norm = 10.0
    with kq.solving(model, tol=1e-4, max_steps=100, exact=True):
        offset = 0.05 * torch.randn_like(x)
        optimizer = torch.optim.Adam(model.chain.parameters(), lr=0.03)
        for _ in range(steps):
            moved = (model(x + offset) - model(x)).norm(dim=1)
            optimizer.zero_grad()
            (-moved.log().sum()).backward()
            optimizer.step()
    return model.eval()


def measure(
    model: kq.models.CertifiedClassifier, x: Tensor, mean: tuple[float, ...], std: tuple[float, ...],
    radii: tuple[float, ...], lengths: dict[str, int],
) -> list[dict[str, Any]]:  # fmt: skip
    """Return a row for each radius: how many pictures are certified beyond it, and how many an attack changes."""
    certificate, rows = kq.certify(model, x, std=std), []
    assert certificate.pixel_radius is not None
    stretched = Stretched(model, mean, std).eval()
    for radius in radii:
        inside = (certificate.pixel_radius > radius).nonzero().flatten()
        row: dict[str, Any] = {"radius": radius, "certified": len(inside)}
        if len(inside):
            classes, began = certificate.prediction[inside], time.process_time()
            row["changed"] = attack(stretched, x[inside], classes, radius, lengths)
            row["changed_beyond"] = attack(stretched, x[inside], classes, BEYOND * radius, SHORT)
            row["cpu_seconds"] = round(time.process_time() - began, 1)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--images", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    trained = TrainedRun.open(options.run, device="cpu")
    chosen = trained.test.sample(options.images)
    x = torch.cat([pictures for pictures, _ in trained.batches(chosen).epoch(0)])
    found: dict[str, Any] = {"run": trained.run.name, "images": len(x), "attacks": ATTACKS, "lengths": STANDARD}
    found["trained"] = measure(trained.model, x, chosen.mean, chosen.std, RADII, STANDARD)
    edited = edit(trained.model, x[:20])
    radius = kq.certify(edited, x, std=chosen.std).pixel_radius
    assert radius is not None
    own = (round(float(radius.median()), 4),)
    found["edited"] = measure(edited, x, chosen.mean, chosen.std, own, STANDARD)
    RECORD.write_text(json.dumps(found, indent=1) + "\n")
    print(RECORD.read_text())


if __name__ == "__main__":
    main()
