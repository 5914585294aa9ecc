"""What a step changes besides the weights: learning rate, momentum, average."""

import copy
import math
import subprocess
import sys

import pytest
import torch
from toys import Toy

from kerneq.run.config import Optimizer, Schedule
from kerneq.training.state import rate_multiple, sgd, update_average


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
    optimizer = sgd(model, Optimizer(decay_all=decay_all, weight_decay=0.1))
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decays) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        spared = not decay_all and (name.startswith("norm") or name.endswith("bias"))
        assert decays[id(parameter)] == (0.0 if spared else 0.1), name


def test_a_step_does_not_import_the_compiler_of_pytorch():
    code = (
        "import sys, torch\n"
        "from kerneq.run.config import Optimizer\n"
        "from kerneq.training.state import sgd\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = sgd(model, Optimizer())\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "before = model.weight.detach().clone()\n"
        "optimizer.step()\n"
        "optimizer.zero_grad()\n"
        "assert not model.weight.equal(before) and model.weight.grad is None\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


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
