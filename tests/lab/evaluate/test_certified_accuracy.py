"""Certified accuracy of a run, and the attack next to it."""

import dataclasses
import json

import pytest
import torch

import kerneq as kq
from kerneq.lab.evaluate import TrainedRun
from kerneq.lab.evaluate.certificates import measure_certificates, nearest_change
from kerneq.lab.run import TrainingError, config
from kerneq.lab.training import train

SETTINGS = [
    "model.width=16",
    "model.features=[8]",
    "model.kernel.hidden=8",
    "data.validation=0",
    "training.epochs=1",
    "training.batch_size=512",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("certified")
    train(config.load("geq-certified-tiny-digits", SETTINGS), path)
    return TrainedRun.open(path)


def test_a_run_is_certified_and_attacked(trained):
    result = measure_certificates(trained, images=40, attacked=2, steps=4)
    assert result.unique and result.images == 40 and result.broken == 0
    assert result.certified == sorted(result.certified, reverse=True) and result.certified[0] <= result.accuracy
    assert result.found_radius is None or result.attacked_radius < result.found_radius
    assert dict(result.summary())["accuracy"] == f"{result.accuracy:.2%} of 40 pictures"
    json.dumps(dataclasses.asdict(result))


def test_a_model_without_certificates_is_refused_in_a_sentence(trained):
    other = dataclasses.replace(trained, model=kq.models.build("resnet-tiny", channels=1).eval())
    with pytest.raises(TrainingError, match="Certificates are made for .* got ResNet"):
        measure_certificates(other)


def test_the_attack_finds_the_boundary_of_a_linear_model():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2)).eval()
    x = torch.rand(6, 1, 4, 4)
    logits = model(x).detach()
    slope = (model[1].weight[0] - model[1].weight[1]).detach().norm()
    exact = (logits[:, 0] - logits[:, 1]).abs().double() / slope
    found = nearest_change(model, x, logits.argmax(1))
    assert (found >= exact * (1 - 1e-5)).all() and (found <= 1.05 * exact + 1e-3).all()
