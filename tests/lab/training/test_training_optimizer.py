"""What a step changes besides the weights: learning rate, momentum, average."""

import copy
import dataclasses
import math
import subprocess
import sys

import pytest
import torch
from torch import nn
from toys import Toy

from kerneq.lab.run.config import ConfigError, Optimizer, Schedule
from kerneq.lab.training.optimizer import make_optimizer, orthogonalise, rate_multiple, set_rate, update_average


def rates(steps: int = 100, **settings) -> list[float]:
    schedule = Schedule(**settings)
    return [rate_multiple(schedule, step, steps, 10) for step in range(steps)]


def test_a_step_schedule_drops_by_its_factor_at_its_milestones():
    got = rates(kind="step", milestones=(0.5, 0.75), factor=0.1)
    assert got[:50] == [1] * 50
    assert got[50:75] == pytest.approx([0.1] * 25)
    assert got[75:] == pytest.approx([0.01] * 25)


def test_a_cosine_falls_from_one_to_its_final_share_by_the_formula():
    got = rates(kind="cosine", final=0.2)
    assert got == pytest.approx([0.2 + 0.8 * (1 + math.cos(math.pi * i / 100)) / 2 for i in range(100)])


def test_warm_up_rises_linearly_for_its_epochs_and_then_the_schedule_begins():
    got = rates(kind="cosine", warmup=2.0)
    assert got[:20] == pytest.approx([(i + 1) / 20 for i in range(20)])
    assert got[20] == 1.0
    assert got == sorted(got[:20]) + sorted(got[20:], reverse=True)


def test_one_cycle_rises_for_its_share_and_ends_at_its_final_share():
    got = rates(kind="one-cycle", rise=0.25, final=0.1)
    assert max(range(100), key=got.__getitem__) == 24
    assert got[24] == 1.0
    assert got[-1] == pytest.approx(0.1)
    assert all(later < earlier for earlier, later in zip(got[24:], got[25:], strict=False))


@pytest.mark.parametrize("kind", ["step", "cosine", "one-cycle"])
def test_every_rate_of_a_run_of_one_step_is_positive(kind):
    assert 0 < rate_multiple(Schedule(kind=kind), 0, 1, 1) <= 1


@pytest.mark.parametrize("decay_all", [False, True])
def test_weight_decay_spares_norms_and_biases_unless_asked(decay_all):
    model = Toy(1, 10)
    optimizer = make_optimizer(model, Optimizer(decay_all=decay_all, weight_decay=0.1))
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decays) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        spared = not decay_all and (name.startswith("norm") or name.endswith("bias"))
        assert decays[id(parameter)] == (0.0 if spared else 0.1), name


def test_a_step_does_not_import_the_compiler_of_pytorch():
    code = (
        "import sys, torch\n"
        "from kerneq.lab.run.config import Optimizer\n"
        "from kerneq.lab.training.optimizer import make_optimizer\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = make_optimizer(model, Optimizer())\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "before = model.weight.detach().clone()\n"
        "optimizer.step()\n"
        "optimizer.zero_grad()\n"
        "assert not model.weight.equal(before) and model.weight.grad is None\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def reference_direction(m: torch.Tensor) -> torch.Tensor:
    """UVᵀ with the singular values that five steps of the polynomial make of Σ / ‖Σ‖, and Muon's scale."""
    u, values, v = torch.linalg.svd(m, full_matrices=False)
    x = values / values.norm()
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
    return max(1, len(m) / m.shape[1]) ** 0.5 * (u * x) @ v


def test_orthogonalise_moves_the_singular_values_alone_and_near_one():
    torch.manual_seed(0)
    m = torch.randn(3, 12, 40, dtype=torch.float64) * torch.tensor([1e-20, 1.0, 1e6])[:, None, None]
    got = orthogonalise(m)
    torch.testing.assert_close(got, torch.stack([reference_direction(one) for one in m]))
    values = torch.linalg.svdvals(got)
    assert values.min() > 0.6 and values.max() < 1.3
    assert not orthogonalise(torch.zeros(1, 2, 3)).any()


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_steps_by_its_formula_and_all_but_convolutions_by_sgd(nesterov):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.Conv2d(6, 4, 1), nn.Conv2d(4, 6, 1), nn.Flatten(), nn.Linear(6, 3))
    model = model.double().to(memory_format=torch.channels_last)
    settings = Optimizer(lr=0.3, momentum=0.8, nesterov=nesterov, weight_decay=0.01, muon=0.05, muon_decay=0.2)
    muon, sgd = make_optimizer(model, settings), copy.deepcopy(model)
    plain = make_optimizer(sgd, dataclasses.replace(settings, muon=0.0))
    weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.dim() == 4}
    momenta = {name: torch.zeros_like(p) for name, p in weights.items()}
    for multiple in (1.0, 0.5):
        gradients = {name: torch.randn_like(p) for name, p in model.named_parameters()}
        for one in (model, sgd):
            for name, p in one.named_parameters():
                p.grad = gradients[name].clone()
        for optimizer in (muon, plain):
            set_rate(optimizer, multiple)
            optimizer.step()
        for name, b in momenta.items():
            b.mul_(0.8).add_(gradients[name])
            m = gradients[name] + 0.8 * b if nesterov else b
            direction = reference_direction(m.reshape(len(m), -1)).reshape(m.shape)
            weights[name] = (1 - multiple * 0.05 * 0.2) * weights[name] - multiple * 0.05 * direction
    for (name, got), other in zip(model.named_parameters(), sgd.parameters(), strict=True):
        torch.testing.assert_close(got.detach(), weights.get(name, other.detach()), rtol=1e-9, atol=1e-9)


def test_a_convolution_that_gets_no_gradient_any_more_stays_finite_while_its_momentum_fades_away():
    torch.manual_seed(0)
    model = nn.Conv2d(2, 4, 3, bias=False)
    optimizer = make_optimizer(model, Optimizer(momentum=0.5, muon=0.01))
    model.weight.grad = torch.randn_like(model.weight)
    for _ in range(160):  # 2⁻¹⁶⁰ is no number of float32 any more
        optimizer.step()
        assert model.weight.isfinite().all()
        model.weight.grad.zero_()
    assert not optimizer.state[model.weight]["momentum_buffer"].any()


def test_with_a_closure_muon_takes_the_step_of_the_gradients_it_makes_and_without_gradients_none():
    torch.manual_seed(0)
    model, x = nn.Conv2d(2, 4, 3), torch.randn(3, 2, 5, 5)
    twin = copy.deepcopy(model)
    optimizer, other = (make_optimizer(one, Optimizer(muon=0.05)) for one in (model, twin))
    optimizer.step()
    for got, want in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(got, want)

    def loss():
        value = model(x).square().mean()
        value.backward()
        return value

    want = twin(x).square().mean()
    want.backward()
    other.step()
    assert torch.equal(optimizer.step(loss), want)
    for got, want in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(got, want)


def test_muon_is_refused_where_there_is_no_convolution():
    with pytest.raises(ConfigError, match="is for convolutions, and this model has none"):
        make_optimizer(nn.Linear(2, 2), Optimizer(muon=0.1))


def test_the_average_follows_its_formula_and_copies_whole_numbers():
    model = Toy(1, 10).double()
    average, want = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    for step in range(4):
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.add_(1)
        update_average(average, model, 0.5, step)
        delta = min(0.5, (1 + step) / (10 + step))
        for name, value in model.state_dict().items():
            mean = delta * want[name] + (1 - delta) * value
            want[name] = mean if value.is_floating_point() else value.clone()
    for name, value in average.state_dict().items():
        torch.testing.assert_close(value, want[name], rtol=1e-12, atol=1e-12)
