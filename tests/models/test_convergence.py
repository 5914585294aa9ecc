"""Every equilibrium layer reaches its tolerance, at initialisation, all through 50 training steps, and after them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo_helpers import digits, pictures, train

import kerneq
from kerneq.models import build


def watch(model: nn.Module) -> list[tuple[kerneq.Equilibrium, torch.Tensor, kerneq.Solution]]:
    """What every equilibrium layer is given and finds, from now on."""
    seen: list[tuple[kerneq.Equilibrium, torch.Tensor, kerneq.Solution]] = []
    for module in model.modules():
        if isinstance(module, kerneq.Equilibrium):
            module.register_forward_hook(lambda layer, inputs, found: seen.append((layer, inputs[0], found)))
    return seen


def true_residuals(layer: kerneq.Equilibrium, x: torch.Tensor, solution: kerneq.Solution) -> torch.Tensor:
    """‖f(z) − z‖ / ‖f(z)‖ of the returned value, computed here from the layer's own equation."""
    z, f = solution.value, layer.cell.bind(x)
    if layer.cell.gives == "features":  # the state that v = Wz was made of
        twin = copy.deepcopy(layer)
        twin.cell.gives = "state"
        z = twin(x).value
        torch.testing.assert_close(f.operator(z), solution.value)
    fz = f(z)
    return (fz - z).flatten(1).norm(dim=1) / fz.flatten(1).norm(dim=1)


NARROW = {"geq-certified-tiny": {"width": 32, "features": [32]}}  # its bounds on norms make a step of it dear


@pytest.mark.parametrize("name", ["geq-dense-tiny", "geq-tiny", "mopteq-sigmoid-tiny", "geq-certified-tiny"])
def test_layers_converge_at_initialisation_during_50_training_steps_and_after_them(name):
    model = build(name, channels=1, settings=NARROW.get(name))
    x, _ = digits()
    seen = watch(model)
    with torch.no_grad():
        model(x[:64])
    losses = train(model, steps=50, batch=16)
    assert len(seen) % 51 == 0 and len(seen) >= 51
    assert all(bool(solution.converged.all()) for _, _, solution in seen)
    # It was a training, not a stroll; a 1-Lipschitz model starts with logits near zero and takes longer.
    assert sum(losses[-5:]) / 5 < (0.9 if name == "geq-certified-tiny" else 0.7) * losses[0]

    seen.clear()
    model.eval()
    with torch.no_grad():
        logits = model(x[-100:])
        assert bool(logits.isfinite().all())
        for layer, inputs, solution in list(seen):
            assert bool(solution.converged.all())
            assert float(true_residuals(layer, inputs, solution).max()) <= 1.02 * layer.tol
            assert float(solution.value.abs().max()) > 0


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_full_width_geq_converges_at_initialisation(mode):
    model = build("geq-5m").train(mode == "train")
    seen = watch(model)
    with torch.no_grad():
        model(pictures("geq-5m", batch=4))
    assert len(seen) == 6
    for _, _, solution in seen:
        assert bool(solution.converged.all())
        assert int(solution.steps.max()) <= 10


@pytest.mark.parametrize("norm", [2.0, 4.0])
def test_past_contraction_the_default_solver_still_converges(norm):
    """L ≤ norm² is 4 and 16 here, where plain iteration need not converge."""
    model = build("geq-tiny", channels=1, settings={"norm": norm, "max_steps": 200})
    with torch.no_grad():  # long enough for the bound to bite
        for branch in model.branches:
            branch.equilibrium.cell.operator.weight.mul_(10)
    x, y = digits()
    logits, solutions = model(x[:64], solutions=True)
    F.cross_entropy(logits, y[:64]).backward()
    assert all(bool(solution.converged.all()) for solution in solutions.values())
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
