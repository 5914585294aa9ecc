"""When the norm of an operator is measured anew, and when not."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import CELLS, input_of
from test_operator_norm import held
from test_operator_survival import layer_of, value

from kerneq import linear_maps, operators
from kerneq.linear_maps import run_lanczos
from kerneq.operators import Operator
from kerneq.solution import Status

pytestmark = pytest.mark.usefixtures("float64")


def test_a_loaded_cell_settles_its_norm_only_if_the_saved_one_had_not(monkeypatch):
    layer = layer_of("conv").eval()
    value(layer, "conv")
    settled = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with torch.no_grad():
        layer.cell.operator.weight.mul_(3)
    unsettled = layer.state_dict()
    old = {name: tensor for name, tensor in settled.items() if not name.endswith("settled")}  # before there was a mark
    calls = []
    monkeypatch.setattr(linear_maps, "run_lanczos", lambda *a, **k: calls.append(1) or run_lanczos(*a, **k))
    for state, expected in ((settled, False), (unsettled, True), (old, True)):
        other = layer_of("conv", seed=7).eval()
        other.load_state_dict(state)
        calls.clear()
        value(other, "conv")
        assert bool(calls) == expected
        assert held(other.cell, input_of("conv")) <= 0.9 * (1 + 1e-9)


@pytest.mark.parametrize("form", CELLS)
def test_the_mean_of_two_state_dicts_is_settled_anew_though_both_were(form):
    """As a soup of models is made: it has the mark of the first, a vector of neither."""
    states = []
    for seed in (0, 7):
        layer = layer_of(form, seed=seed).eval()
        value(layer, form)
        states.append(layer.state_dict())
    one, two = states
    layer = layer_of(form, seed=3).eval()
    layer.load_state_dict({name: (t + two[name]) / 2 if t.is_floating_point() else t for name, t in one.items()})
    assert not layer.cell.operator.settled
    assert held(layer.cell, input_of(form)) <= 0.9 * (1 + 1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", CELLS)
def test_a_settled_vector_is_believed_after_it_was_stored_in_fewer_digits(form, dtype):
    layer = layer_of(form).eval()
    value(layer, form)
    other = layer_of(form, seed=7).eval()
    other.load_state_dict(
        {name: t.to(dtype).to(t.dtype) if t.is_floating_point() else t for name, t in layer.state_dict().items()}
    )
    assert other.cell.operator.settled and other.cell.similarity.project.settled


def known_by_place(operator: Operator) -> bool:
    """What `fits` looks at inside a CUDA graph."""
    return operator.tracker.settled.place == operators.find_place(operator.weight)


def test_settling_knows_the_weight_by_its_place_after_it_was_copied_or_swapped_out_and_back():
    """Inside a CUDA graph the place is all there is to see, and a search there would be a part of the graph."""
    layer = layer_of("conv").eval()
    value(layer, "conv")
    other = copy.deepcopy(layer).cell.operator
    other.settle()
    assert known_by_place(other)
    operator = layer.cell.operator
    home = operator.weight.detach().clone()
    with torch.no_grad():
        operator.weight.add_(1.0)
        operator.weight.copy_(home)
    vector = operator.tracker.vector
    operator.settle()
    assert known_by_place(operator) and operator.tracker.vector is vector


def test_training_unsettles_the_norm_even_where_the_weight_does_not_tell():
    layer = layer_of("conv").eval()
    value(layer, "conv")
    assert layer.cell.operator.settled
    assert not layer.train().cell.operator.settled  # inside a CUDA graph that is all there is to see
    layer.cell.operator.weight.data.mul_(-20).add_(torch.randn_like(layer.cell.operator.weight))  # as a CUDA graph does
    layer.eval()
    assert held(layer.cell, input_of("conv")) <= 0.9 * (1 + 1e-9)


def test_a_vector_that_has_come_to_belong_to_a_smaller_singular_value_is_left():
    operator = Operator(5, 5).eval()
    operator.weight.data.copy_(torch.diag(torch.tensor([3.0, 12.0, 1.0, 0.5, 0.1])))
    operator.tracker.vector = torch.eye(5)[0]  # exactly, so that products with W alone would never leave it
    torch.testing.assert_close(operator.norm(operator.weight).detach(), torch.tensor(12.0))


def put(layer, weight):
    layer.cell.operator.weight.data.copy_(weight)
    return value(layer, "dense")


def replace(layer, weight):
    """As if the new parameter had come to lie where the old one was freed."""
    operator = layer.cell.operator
    home = operator.weight.data
    operator.weight = torch.nn.Parameter(home)
    home.copy_(weight)
    return value(layer, "dense")


def call(layer, weight):
    """The first call's weight is freed, and often the next one's lies at its address."""
    for some in (torch.eye(6, 5), weight):
        with torch.no_grad():
            mine = {"cell.operator.weight": some.clone()}
            found = torch.func.functional_call(layer.eval(), mine, input_of("dense")).value
            del mine
    return found


@pytest.mark.parametrize("change", [put, replace, call])
def test_a_weight_changed_behind_its_address_and_version_is_settled_anew_in_evaluation(change):
    weight = torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.5, 0.1]))
    first, second = (
        torch.cat([w, torch.zeros(1, 5)]) for w in (weight, weight + torch.diag(weight.new_tensor([0, 9, 0, 0, 0])))
    )
    layer, other = layer_of("dense"), layer_of("dense")
    put(layer, first)
    other.cell.operator.weight.data.copy_(second)
    torch.testing.assert_close(change(layer, second), value(other, "dense"))


def test_threads_that_share_a_fresh_layer_all_get_its_answer():
    inputs = [torch.randn(2, 2, side, side) for side in (4, 8, 4, 8)]
    reference = layer_of("conv").eval()
    with torch.no_grad():
        expected = [reference(x).value for x in inputs]
    for _ in range(10):
        layer, gate = layer_of("conv").eval(), threading.Barrier(len(inputs))

        def work(x, layer=layer, gate=gate):
            gate.wait()
            with torch.no_grad():
                return [layer(x).value for _ in range(3)]

        with ThreadPoolExecutor(len(inputs)) as pool:
            for found, want in zip(pool.map(work, inputs), expected, strict=True):
                for z in found:
                    torch.testing.assert_close(z, want, rtol=1e-4, atol=1e-5)


def test_a_weight_that_is_no_number_has_no_norm_and_is_no_crash():
    layer = layer_of("dense").eval()
    with torch.no_grad():
        layer.cell.operator.weight.fill_(torch.nan)
        assert layer(input_of("dense")).status is Status.NONFINITE
