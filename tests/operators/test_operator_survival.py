"""The norm bound survives what people do to modules: copy, save, load, pickle, inference mode, DDP, compile."""

import copy
import io
import pathlib
import pickle
import subprocess
import sys

import pytest
import torch
from helpers import CELLS, KERNELS, cell_of, input_of
from test_operator_norm import TRACKED, held
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import kerneq
from kerneq.solvers import Proximal

pytestmark = pytest.mark.usefixtures("float64")
HERE = pathlib.Path(__file__).parent


def layer_of(form: str, seed: int = 0) -> kerneq.Equilibrium:
    cell = cell_of(form, KERNELS["gaussian"], norm=0.9, seed=seed)
    return kerneq.Equilibrium(cell, solver=Proximal(), tol=1e-12, max_steps=200)


def trained(form: str) -> kerneq.Equilibrium:
    layer, x = layer_of(form), input_of(form)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    for _ in range(3):
        layer(x).value.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return layer


def value(layer: kerneq.Equilibrium, form: str) -> torch.Tensor:
    with torch.no_grad():
        return layer.eval()(input_of(form)).value


def through_pickle(layer):
    return pickle.loads(pickle.dumps(layer))


def through_a_file(layer):
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("form", CELLS)
@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_a_file])
def test_a_copy_gives_the_same_answer_and_trains_on_its_own(copied, form):
    layer = trained(form)
    other = copied(layer)
    assert torch.equal(other.cell.operator.tracker.vector, layer.cell.operator.tracker.vector)
    before = value(layer, form)
    assert torch.equal(value(other, form), before)
    with torch.no_grad():
        other.cell.operator.weight.mul_(-20).add_(torch.randn_like(other.cell.operator.weight))
    assert held(other.cell.eval(), input_of(form)) <= 0.9 * (1 + 1e-9)
    assert torch.equal(value(layer, form), before)


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("form", CELLS)
def test_a_state_dict_goes_into_a_cell_that_has_or_has_not_seen_data(form, seen):
    layer, other = trained(form), layer_of(form, seed=7)
    if seen:
        value(other, form)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.cell.operator.tracker.vector, layer.cell.operator.tracker.vector)
    torch.testing.assert_close(value(other, form), value(layer, form), rtol=1e-10, atol=1e-10)
    assert held(other.cell, input_of(form)) <= 0.9 * (1 + 1e-9)


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_of_other_weights_does_not_leave_a_stale_vector(assign):
    layer, other = trained("dense"), layer_of("dense", seed=7)
    value(layer, "dense")
    with torch.no_grad():
        other.cell.operator.weight.mul_(10)
    state = {name: t for name, t in other.state_dict().items() if "vector" not in name}
    layer.load_state_dict({**layer.state_dict(), **state}, assign=assign)
    assert held(layer.cell, input_of("dense")) <= 0.9 * (1 + 1e-9)


def test_a_float32_state_dict_goes_into_a_float64_cell():
    layer = trained("conv")
    narrow = copy.deepcopy(layer).float()
    other = layer_of("conv", seed=3)
    other.load_state_dict(narrow.state_dict())
    assert other.cell.operator.tracker.vector.dtype == torch.float64
    torch.testing.assert_close(value(other, "conv"), value(layer, "conv"), rtol=1e-4, atol=1e-5)


def test_a_cell_may_change_its_dtype_after_it_has_seen_data():
    layer, x = trained("conv"), input_of("conv")
    with torch.no_grad():
        wide = layer.eval()(x).value
        cell = copy.deepcopy(layer.cell).float()
        assert cell.operator.tracker.vector.dtype == torch.float32
        narrow = kerneq.Equilibrium(cell, tol=1e-6, max_steps=200).eval()(x.float()).value
    torch.testing.assert_close(narrow.double(), wide, rtol=1e-4, atol=1e-5)


def test_another_parameter_in_place_of_the_weight_is_noticed_in_evaluation():
    layer = trained("dense")
    value(layer, "dense")
    layer.cell.operator.weight = torch.nn.Parameter(3 * torch.randn(6, 5))
    assert held(layer.cell, input_of("dense")) <= 0.9 * (1 + 1e-9)


def test_a_layer_first_used_in_inference_mode_can_be_trained_afterwards():
    layer, x = layer_of("conv"), input_of("conv")
    with torch.inference_mode():
        assert layer.eval()(x).converged.all()
    layer.train()(x).value.sum().backward()
    assert layer.cell.operator.weight.grad.isfinite().all()
    assert held(layer.cell, x) <= 0.9 * TRACKED


def test_a_layer_built_and_loaded_in_inference_mode_works_there():
    with torch.inference_mode():
        layer = layer_of("conv", seed=5)
        layer.load_state_dict(trained_state())
        assert layer.eval()(input_of("conv")).converged.all()
    trainable = layer_of("conv", seed=5)
    with torch.inference_mode():
        trainable.load_state_dict(trained_state())
    trainable(input_of("conv")).value.sum().backward()


def trained_state() -> dict[str, torch.Tensor]:
    with torch.inference_mode(False), torch.enable_grad():
        return trained("conv").state_dict()


def test_two_picture_sizes_each_have_their_own_norm():
    cell = cell_of("conv", KERNELS["gaussian"], norm=0.9)
    for size in (4, 8, 4, 2):
        x = torch.randn(2, 2, size, size)
        assert held(cell, x) <= 0.9 * (1 + 1e-4)


def test_evaluation_does_not_move_the_vector_and_is_repeatable():
    layer = trained("conv")
    first, vector = value(layer, "conv"), layer.cell.operator.tracker.vector.clone()
    assert torch.equal(value(layer, "conv"), first)
    assert torch.equal(layer.cell.operator.tracker.vector, vector)


def test_a_backward_pass_may_wait_while_another_forward_pass_moves_the_vector():
    layer, x = layer_of("conv"), input_of("conv")
    first = layer(x).value.sum()
    second = layer(2 * x).value.sum()
    (first + second).backward()
    assert layer.cell.operator.weight.grad.isfinite().all()


def test_two_ddp_processes_stay_together(tmp_path):
    command = [sys.executable, str(HERE / "ddp_step.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, second = ([float(n) for n in (tmp_path / f"rank{rank}").read_text().split()] for rank in range(2))
    parameters = len(first) - 1
    assert first[:parameters] == second[:parameters]
    assert first == pytest.approx(second, rel=1e-3)  # each follows the norm; rank 0's vector is sent with the next step


@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("form", CELLS)
def test_an_average_of_the_weights_may_be_made_before_the_first_pictures_are_seen(form, use_buffers):
    layer, x = layer_of(form), input_of(form)
    average = AveragedModel(layer, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=use_buffers)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    for _ in range(3):
        layer(x).value.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(layer)
    other = layer_of(form, seed=7)
    other.load_state_dict(average.module.state_dict())
    torch.testing.assert_close(value(average.module, form), value(other, form), rtol=1e-10, atol=1e-10)
    assert held(average.module.cell, x) <= 0.9 * (1 + 1e-9)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_compiled_module_with_the_layer_inside_gives_the_same_value_and_gradient_and_holds_the_bound():
    torch.manual_seed(0)
    layer = layer_of("conv").eval()
    linear = torch.nn.Flatten(), torch.nn.Linear(48, 2)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1), layer, kerneq.Value(), *linear)
    x = torch.randn(2, 1, 4, 4)
    model(x).sum().backward()
    expected, grads = model(x), [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    compiled = torch.compile(model)
    got = compiled(x)
    got.sum().backward()
    torch.testing.assert_close(got, expected)
    for p, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, grad)
    with torch.no_grad():
        layer.cell.operator.weight.mul_(-30).add_(torch.randn_like(layer.cell.operator.weight))
        compiled(x)
    assert held(layer.cell, input_of("conv")) <= 0.9 * (1 + 1e-9)
