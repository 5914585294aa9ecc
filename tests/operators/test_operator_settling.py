"""When the norm of an operator is measured anew, and when not."""

import pytest
import torch
from helpers import input_of
from test_operator_norm import held
from test_operator_survival import layer_of, value

from kerneq import operators
from kerneq.operators import top_singular_vector

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
    monkeypatch.setattr(
        operators, "top_singular_vector", lambda *a, **k: calls.append(1) or top_singular_vector(*a, **k)
    )
    for state, expected in ((settled, False), (unsettled, True), (old, True)):
        other = layer_of("conv", seed=7).eval()
        other.load_state_dict(state)
        calls.clear()
        value(other, "conv")
        assert bool(calls) == expected
        assert held(other.cell, input_of("conv")) <= 0.9 * (1 + 1e-9)


def test_training_unsettles_the_norm_even_where_the_weight_does_not_tell():
    layer = layer_of("conv").eval()
    value(layer, "conv")
    layer.train()
    layer.cell.operator.weight.data.mul_(-20).add_(torch.randn_like(layer.cell.operator.weight))  # as a CUDA graph does
    layer.eval()
    assert held(layer.cell, input_of("conv")) <= 0.9 * (1 + 1e-9)
