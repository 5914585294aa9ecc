"""The certified error of a phantom gradient beside the true one, along a training on the digits that come with kerneq.

    python experiments/certified_gradients.py      # half a minute of one core

A dense equilibrium of each kernel learns by the papers' five steps of 0.8. After each epoch, at the equilibria of 100
held-out digits: the bound `kq.theory.phantom_error` for the layer's own L (docs/theory.md, fact 14); the error of the
phantom's w beside the exact w = (I − DHD)⁻¹D ∂ℓ/∂z, whose ratio it bounds, at most over the digits; that of the
gradient of W, which nothing is proved about; and for solves stopped at a residual of 10⁻², the share of the entries of
z whose activity is certain, with the number of those that were another at the equilibrium.
"""

import json
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import kerneq as kq

EPOCHS = 8
RULE = kq.gradients.Phantom(5, relaxation=0.8)
EXACT = kq.gradients.Implicit(tol=1e-10, max_steps=500)
KERNELS = {
    "gaussian": kq.kernels.Gaussian(0.5, split=16, hidden=64),
    "cauchy": kq.kernels.Cauchy(0.5, split=16, hidden=64),
    "multiquadric": kq.kernels.Multiquadric(0.5, split=16, hidden=64),
}
RECORD = Path(__file__).parents[1] / "docs/results/certified-gradients.json"


def differentiate(layer: kq.Equilibrium, head: nn.Module, x: Tensor, labels: Tensor, rule: Any) -> Tensor:
    """Return ∂ℓ/∂W by a rule, at exact equilibria."""
    weight = layer.cell.operator.weight
    with kq.solving(layer, tol=1e-10, max_steps=2000, gradient=rule):
        (g,) = torch.autograd.grad(cross_entropy(head(layer(x).value), labels), weight)
    return g


def measure(layer: kq.Equilibrium, head: nn.Module, x: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the certified and the true errors, and what an unfinished solve leaves certain."""
    cell = layer.cell
    f = cell.bind(x)
    z = kq.solve(f, None, kq.solvers.Proximal(), tol=1e-11, max_steps=5000).value.detach().requires_grad_()
    (g,) = torch.autograd.grad(cross_entropy(head(z), labels, reduction="sum"), z)
    image = f(z)
    rows = [torch.autograd.grad(image[:, i].sum(), z, retain_graph=True)[0] for i in range(z.shape[1])]
    D = (image > 0).to(z)
    J = (torch.stack(rows, 1) * D[:, None, :]).detach()  # DHD
    eye = torch.eye(z.shape[1]).to(z)
    exact = torch.linalg.solve(eye - J, D * g)
    G = (1 - RULE.relaxation) * eye + RULE.relaxation * J
    left = exact
    for _ in range(RULE.steps):
        left = (G @ left[:, :, None])[:, :, 0]  # what s steps lack
    found = kq.solve(f, None, kq.solvers.Proximal(), tol=1e-2, max_steps=100)
    certain = kq.theory.find_certain_entries(f, found.value, found.error_bound)
    wrong = certain & ((f.drive(found.value) > 0) != (f.drive(z.detach()) > 0))
    L = float(f.bound * f.scaling.excess**2)  # from above
    gradients = [differentiate(layer, head, x, labels, rule) for rule in (RULE, EXACT)]
    return {
        "L": L,
        "certified": kq.theory.phantom_error(RULE, L, cell.kernel.lowest),
        "true_largest": float((left.norm(dim=1) / exact.norm(dim=1)).max()),
        "true_mean": float((left.norm(dim=1) / exact.norm(dim=1)).mean()),
        "weight": float((gradients[0] - gradients[1]).norm() / gradients[1].norm()),
        "certain": float(certain.double().mean()),
        "certain_but_wrong": int(wrong.sum()),
    }


def run(name: str) -> list[dict[str, Any]]:
    """Train a layer with one kernel; return a row for each epoch, the first before training."""
    torch.manual_seed(0)
    digits = load_digits()
    x, labels = torch.tensor((digits.data - 5) / 6, dtype=torch.float64), torch.tensor(digits.target)
    inject = nn.Sequential(nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64))
    cell = kq.cells.DenseCell(KERNELS[name], inputs=64, state=64, features=64, norm=1.0, inject=inject)
    layer = kq.Equilibrium(cell, gradient=RULE, tol=1e-4, max_steps=50).double()
    head = nn.Linear(64, 10).double()
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=3e-3)
    rows = []
    for epoch in range(EPOCHS + 1):
        layer.eval()
        accuracy = float((head(layer(x[1500:]).value).argmax(1) == labels[1500:]).double().mean())
        rows.append({"epoch": epoch, "accuracy": accuracy} | measure(layer, head, x[1500:1600], labels[1500:1600]))
        print(name, rows[-1], flush=True)
        layer.train()
        for part in torch.randperm(1500).split(50):
            optimizer.zero_grad()
            cross_entropy(head(layer(x[part]).value), labels[part]).backward()
            optimizer.step()
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    RECORD.write_text(json.dumps({name: run(name) for name in KERNELS}, indent=1) + "\n")
