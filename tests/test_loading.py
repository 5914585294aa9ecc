"""Trained models, loaded by the library alone."""

import shutil
import subprocess
import sys

import pytest
import torch

import kerneq as kq
from kerneq import loading
from kerneq.lab.evaluate import TrainedRun
from kerneq.lab.run.config import load
from kerneq.lab.training import train
from kerneq.loading import CheckpointError, TrainingError
from kerneq.settings import ConfigError


@pytest.fixture(scope="module", params=["geq-tiny-digits", "geq-dense-tiny-digits"])
def run(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / request.param
    train(load(request.param, ["training.epochs=1", "training.batch_size=600"]), path)
    return path


def test_a_model_is_loaded_without_the_laboratory():
    code = (
        "import sys, torch, kerneq\n"
        "model = kerneq.load('geq-5m-cifar10')\n"
        "assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 10) and not model.training\n"
        "outside = {'PIL', 'jinja2', 'matplotlib', 'rich', 'sklearn', 'tensorboard', 'typer', 'kerneq.lab'}\n"
        "assert not outside & sys.modules.keys(), outside & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


@pytest.mark.parametrize("checkpoint", ["best", "last"])
def test_the_library_loads_the_model_that_the_laboratory_evaluates(run, checkpoint):
    got, expected = kq.load(run, checkpoint), TrainedRun.open(run, checkpoint, "cpu").model
    x = torch.rand(3, 1, 8, 8)
    assert torch.equal(got(x), expected(x)) and str(got) == str(expected)


def test_weights_of_other_settings_are_refused(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    config = copy / "config.toml"
    text = config.read_text()
    for then, now, message in [
        ("\nnorm = 1.0\n", "\nnorm = 0.5\n", "`model.norm` was 1.0 and is 0.5"),
        ("seed = 0\n", "seed = 3\n", "`seed` was 0 and is 3"),
        ("\nlr = 0.1\n", "\nlr = 0.3\n", "`optimizer.lr` was 0.1 and is 0.3"),
    ]:
        assert then in text
        config.write_text(text.replace(then, now))
        with pytest.raises(CheckpointError, match=message):
            kq.load(copy)
    config.write_text(text.replace('device = "auto"', 'device = "cpu"').replace("margin = 0.0\n", ""))
    kq.load(copy)  # a device is no setting of the weights, and an older version had no margin


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('base = "geq-tiny-digits"', "is not as kerneq train writes it"),
        ("a = = 1", "cannot be read as a configuration file"),
        ('[model]\nname = "geq-tyni"', "There is no model 'geq-tyni'. Did you mean `geq-tiny`?"),
    ],
)
def test_a_configuration_that_no_run_wrote_is_refused(tmp_path, text, message):
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        kq.load(tmp_path)


def test_what_is_no_run_folder_is_refused(tmp_path):
    with pytest.raises(TrainingError, match="is not a run folder: it has no config.toml"):
        kq.load(tmp_path)


def test_a_model_knows_the_pictures_that_it_was_trained_on_and_warns_of_others():
    model = kq.load("geq-6m-imagenette")
    assert model.classes[0] == "tench" and (model.size, model.mean[0], model.std[2]) == (128, 0.485, 0.225)
    with pytest.warns(UserWarning, match="trained on pictures of 128 × 128 and may be far worse at 64 × 64"):
        model(torch.zeros(1, 3, 64, 64))
    model(torch.zeros(1, 3, 128, 128))  # without a warning, which would be an error
    new = kq.load("geq-5m-cifar10", classes=3)
    assert new.classes == () and new.size == 32 and new(torch.zeros(1, 3, 32, 32)).shape == (1, 3)


def test_what_a_run_says_of_its_pictures_is_read_and_of_earlier_runs_the_classes(tmp_path):
    (tmp_path / "classes.json").write_text('{"classes": ["a"], "mean": [0.5], "std": [0.2], "size": 8}')
    assert loading._read_pictures(tmp_path) == {"classes": ("a",), "mean": (0.5,), "std": (0.2,), "size": 8}
    (tmp_path / "classes.json").write_text('{"classes": ["a", "b"]}')
    assert loading._read_pictures(tmp_path) == {"classes": ("a", "b")}
    for damaged in ('["a", "b"]', '{"classes": ["a"], "mean": [0.5]}', "{"):
        (tmp_path / "classes.json").write_text(damaged)
        assert loading._read_pictures(tmp_path) == {}
