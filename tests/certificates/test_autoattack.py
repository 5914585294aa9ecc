"""AutoAttack inside certified radii, with few steps; experiments/certified_autoattack.py has it at its full length."""

import runpy
from pathlib import Path

import pytest
import torch

import kerneq as kq
from kerneq.lab.evaluate.trained import TrainedRun

pytest.importorskip("pyautoattack", reason="pyautoattack is not installed: `pip install '.[dev]'`")
SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "experiments/certified_autoattack.py"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A small chain of resolvents after four epochs on the digits."""
    folder = tmp_path_factory.mktemp("runs") / "chain"
    changes = ["model.width=8", "model.depths=[1,1]", "training.epochs=4", "training.validate_epochs=4"]
    return TrainedRun.open(kq.train("certified-tiny-digits", folder, changes, quiet=True).path, device="cpu")


@pytest.mark.parametrize("edited", [False, True])
def test_it_changes_no_prediction_inside_a_radius_and_some_beyond(trained, edited):
    torch.manual_seed(0)
    chosen = trained.test.sample(6)
    model, x = trained.model, next(iter(trained.batches(chosen).epoch(0)))[0]
    if edited:
        model = SCRIPT["edit"](model, x[:2], steps=3)
    radius = float(kq.certify(model, x, std=chosen.std).pixel_radius.median())
    assert radius > 0
    (row,) = SCRIPT["measure"](model, x, chosen.mean, chosen.std, (radius,), SCRIPT["SHORT"])
    assert row["certified"] >= 2 and row["changed"] == 0
    assert edited or row["changed_beyond"] > 0  # the attack is one
