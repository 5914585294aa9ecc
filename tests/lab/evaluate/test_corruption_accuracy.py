"""Accuracy under corruptions, by hand on one of them, and the mean corruption error in a case worked out on paper."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from helpers import trained

from kerneq.lab.data import Images
from kerneq.lab.data.corruptions import corrupt
from kerneq.lab.evaluate import TrainedRun
from kerneq.lab.evaluate.corruptions import mean_corruption_error, measure_corruptions
from kerneq.lab.run.config import parse

NAMES = ("gaussian_noise", "contrast", "frost", "saturate")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return TrainedRun.open(trained(tmp_path_factory.mktemp("corruptions") / "run", "model.name=geq-dense-tiny"))


def test_accuracy_is_that_of_the_model_on_the_corrupted_pictures(run, tmp_path, monkeypatch):
    monkeypatch.setenv("KERNEQ_DATA", str(tmp_path))
    result = measure_corruptions(run, names=NAMES, seed=3)
    assert tuple(result.accuracy) == NAMES and result.images == 355
    assert result.source == "made here, seed 3, frost without its pictures"
    test = run.test
    dark = dataclasses.replace(test, pixels=corrupt(test.pixels, "contrast", 5, seed=3))
    for images, accuracy in ((test, result.clean), (dark, result.accuracy["contrast"][4])):
        hits = [logits.argmax(1) == labels for _, labels, logits, _ in run.outputs(images)]
        assert accuracy == pytest.approx(torch.cat(hits).double().mean().item(), abs=1e-9)
    assert result.mean_accuracy == pytest.approx(np.mean(list(result.accuracy.values())))
    assert result.mean_error == pytest.approx(1 - np.mean([result.accuracy[name] for name in NAMES[:3]]))
    assert json.loads(json.dumps(dataclasses.asdict(result))) == dataclasses.asdict(result)
    lines = dict(result.summary())
    assert lines["accuracy, clean"] == f"{result.clean:.2%}" and "gaussian noise" in lines
    assert (
        measure_corruptions(run, names=NAMES[:1], seed=3).accuracy["gaussian_noise"]
        == result.accuracy["gaussian_noise"]
    )


def test_published_files_are_used_where_they_are(run, tmp_path, monkeypatch):
    """Pictures that are dark up to severity 3 and bright from 4 on, and a model that sees nothing else."""
    monkeypatch.setenv("KERNEQ_DATA", str(tmp_path))
    rng = np.random.default_rng(0)
    labels = torch.from_numpy(rng.integers(0, 10, 30))
    config = parse("", ["data.name=cifar10", "model.name=resnet-tiny", "device=cpu"])
    images = Images(
        torch.zeros((30, 3, 32, 32), dtype=torch.uint8), labels, tuple("0123456789"), (0.5,) * 3, (0.2,) * 3
    )

    class Light(torch.nn.Module):
        def forward(self, x, solutions):
            logits = torch.zeros((len(x), 10))
            logits[:, 0] = x.mean((1, 2, 3))
            logits[:, 1] = -x.mean((1, 2, 3))
            return logits, {}

    light = dataclasses.replace(run, config=config, model=Light())
    vars(light)["test"] = images
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    np.save(folder / "labels.npy", np.tile(labels.numpy(), 5))
    pixels = np.zeros((5, 30, 32, 32, 3), dtype=np.uint8)
    pixels[3:] = 255
    np.save(folder / "fog.npy", pixels.reshape(150, 32, 32, 3))
    result = measure_corruptions(light, names=["fog"])
    dark, bright = ((labels == label).double().mean().item() for label in (1, 0))
    assert result.source == "published, CIFAR-10-C"
    assert result.accuracy["fog"] == pytest.approx([dark] * 3 + [bright] * 2) and result.clean == pytest.approx(dark)


def test_the_mean_corruption_error_is_over_the_standard_ones():
    accuracy = {"gaussian_noise": [0.9, 0.7], "fog": [0.8, 0.8], "saturate": [0.0, 0.0]}
    assert mean_corruption_error(accuracy) == pytest.approx(0.2)  # saturate is none of the fifteen
    assert mean_corruption_error({"saturate": [0.4, 0.6]}) == pytest.approx(0.5)
