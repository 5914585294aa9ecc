"""Solver behaviour, attack and saliency of a run on the embedded digits: what JSON, terminal and pictures get."""

import dataclasses
import json

import pytest
from helpers import trained

from kerneq.lab.evaluate import TrainedRun, measure_part
from kerneq.lab.evaluate.attack import Threat, measure_attack
from kerneq.lab.evaluate.behaviour import measure_behaviour
from kerneq.lab.evaluate.saliency import draw_saliency, measure_saliency
from kerneq.lab.run import TrainingError


@pytest.fixture(scope="module")
def geq(tmp_path_factory):
    settings = ("model.name=geq-tiny", "model.width=8", "model.features=[8, 8]")
    return TrainedRun.open(trained(tmp_path_factory.mktemp("runs") / "geq", *settings), "last", "cpu")


@pytest.fixture(scope="module")
def resnet(tmp_path_factory):
    settings = ("model.name=resnet-tiny", "model.width=8")
    return TrainedRun.open(trained(tmp_path_factory.mktemp("runs") / "resnet", *settings), "last", "cpu")


def told(result) -> str:
    """What the terminal shows, after the numbers have been through JSON."""
    assert json.loads(json.dumps(dataclasses.asdict(result), allow_nan=False))
    return " | ".join(f"{name}: {words}" for name, words in result.summary())


def test_behaviour_of_a_run(geq, resnet):
    found = measure_behaviour(geq, images=100, traced=8, shown=2)
    assert [layer.name for layer in found.layers] == ["branch0", "branch1"]
    for layer in found.layers:
        assert layer.contraction <= layer.most_contraction <= layer.bound and 0 <= layer.unconverged <= 1
        assert 0.01 < layer.residuals[0] <= 1 and layer.residuals[-1] < 1e-5 and len(layer.sample_energies) == 2
        assert layer.energies[-1] <= layer.energies[0]
    assert [score.steps for score in found.stopped] == [1, 2, 4, 8, 16, 30]
    right = sum(int((logits.argmax(1) == labels).sum()) for _, labels, logits, _ in geq.outputs(geq.test.sample(100)))
    assert found.stopped[-1].accuracy == right / 100 and found.stopped[0].residual > found.stopped[-1].residual
    assert "stopped after 16: accuracy" in told(found)
    with pytest.raises(TrainingError, match="no equilibrium layer"):
        measure_part(resnet, "behaviour")


def test_attack_on_a_run(geq, resnet):
    threats = [Threat("linf", 0.2, steps=4, restarts=1), Threat("l2", 1.0, steps=4, restarts=1)]
    found = measure_attack(resnet, images=40, threats=threats)
    again = measure_attack(resnet, images=40, threats=threats)
    assert found == again and found.images == found.tested == 40
    for result in found.threats:
        assert result.accuracy < found.clean and result.unrolled is None
        assert result.tested == result.accuracy
    assert "linf 51/255, PGD-4 × 1" in told(found)
    found = measure_attack(geq, images=8, threats=[Threat("linf", 0.1, steps=2, restarts=1)])
    assert found.threats[0].unrolled is not None and "masked" in told(found)


def test_saliency_of_a_run(geq, resnet):
    found = measure_saliency(geq, images=4, steps=2)
    assert found.methods.keys() == {"Grad-CAM", "Grad-CAM stem", "integrated gradients", "patch weights", "random"}
    assert found.methods["integrated gradients"].insertion > found.methods["random"].insertion
    assert "patch weights: deletion" in told(found)
    sheets = draw_saliency(geq, found)
    assert list(sheets) == ["saliency"] and sheets["saliency"].height > 4 * 112
    few = dataclasses.replace(resnet.config.training, batch_size=3)  # fewer than a sheet has pictures
    few = dataclasses.replace(resnet, config=dataclasses.replace(resnet.config, training=few))
    assert {name: sheet.height for name, sheet in draw_saliency(few, found).items()} == {
        "saliency": sheets["saliency"].height
    }
