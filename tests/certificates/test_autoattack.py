"""AutoAttack inside certified radii, with few steps; experiments/certified_autoattack.py has it at its full length."""

import runpy
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy, one_hot

import kerneq as kq

pytest.importorskip("pyautoattack", reason="pyautoattack is not installed: `pip install '.[dev]'`")
SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "experiments/certified_autoattack.py"))


def trained():
    """A chain of two resolvents after one pass over some digits, and other digits."""
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    digits = load_digits()
    x, labels = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32), torch.tensor(digits.target)
    model = kq.models.build("certified-tiny", channels=1, settings={"width": 4, "depths": [1, 1]})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for part in torch.randperm(1000).split(50):
        optimizer.zero_grad()
        margin = 4.0 * one_hot(labels[part], 10)
        cross_entropy(model((x[part] - 0.3) / 0.5) - margin, labels[part]).backward()
        optimizer.step()
    return model.eval(), (x[1500:1508] - 0.3) / 0.5


@pytest.mark.parametrize("edited", [False, True])
def test_it_changes_no_prediction_inside_a_radius_and_many_beyond(edited):
    model, x = trained()
    if edited:
        model = SCRIPT["edit"](model, x[:4], steps=5)
    radius = float(kq.certify(model, x, std=(0.5,)).pixel_radius.median())
    assert radius > 0
    (row,) = SCRIPT["measure"](model, x, (0.3,), (0.5,), (radius,), SCRIPT["SHORT"])
    assert row["certified"] >= 3 and row["changed"] == 0
    assert row["changed_beyond"] > 0  # the attack is one
