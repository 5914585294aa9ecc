"""Runs that begin from trained weights, pictures of one's own, and parts held out in turn."""

import re

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import binom
from sklearn.linear_model import LogisticRegression
from toys import Said

import kerneq as kq
from kerneq.lab.cli import main
from kerneq.lab.data import DataError, ImageFiles, load
from kerneq.lab.evaluate import evaluate
from kerneq.lab.run import Run
from kerneq.lab.run.config import ConfigError, parse
from kerneq.lab.run.config import load as load_config
from kerneq.lab.training import train
from kerneq.lab.training.build import read_images, split
from kerneq.lab.training.metrics import describe_chance
from kerneq.lab.training.start import fit_head, regress
from kerneq.loading import read_checkpoint


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model of pictures in three colours, to begin from."""
    path = tmp_path_factory.mktemp("start")
    settings = ["data.validation=0", "training.epochs=1", "training.batch_size=12", "model.features=[8,8]"]
    config = load_config(
        "geq-tiny-digits", [f"data.name=folder:{paint(path / 'colours', 3, 8)}", "data.size=8", *settings]
    )
    train(config, path / "run")
    return path / "run"


def paint(folder, classes, count):
    """Pictures of noise with more red, green or blue."""
    rng = np.random.default_rng(0)
    for split_name, number in (("train", count), ("test", 4)):
        for label in range(classes):
            place = folder / split_name / "rgb"[label]
            place.mkdir(parents=True)
            for n in range(number):
                pixels = rng.integers(0, 200, (8, 8, 3))
                pixels[..., label] += 55
                Image.fromarray(pixels.astype(np.uint8)).save(place / f"{n}.png")
    return folder


def weights(run, which="best"):
    return {
        k: v for k, v in read_checkpoint(run / "checkpoints" / f"{which}.safetensors")[0].items() if k[:6] == "model."
    }


def test_the_head_is_that_of_scikit_learn_and_its_accuracy_is_that_of_folds():
    rng = np.random.default_rng(0)
    labels = np.arange(90) % 3
    x = rng.normal(size=(90, 5)) + 0.8 * np.eye(3, 5)[labels]
    w, b = regress(torch.tensor(x), torch.tensor(labels), 3, strength=0.1)
    expected = LogisticRegression(C=1 / (0.1 * 90), tol=1e-10, max_iter=1000).fit(x, labels)
    np.testing.assert_allclose(w, expected.coef_, atol=1e-4)
    shifted = 5 + 3 * x  # the fit scales features itself
    w, b, accuracy = fit_head(torch.tensor(shifted), torch.tensor(labels), torch.arange(90) // 3, 3)
    right = (shifted @ w.numpy().T + b.numpy()).argmax(1) == labels
    assert 0.6 < accuracy < right.mean() + 0.05
    assert fit_head(torch.tensor(x[:4]), torch.tensor([0, 1, 2, 0]), torch.tensor([0, 0, 0, 1]), 3)[2] is None


def test_a_run_begins_from_the_weights_of_another_with_a_head_for_its_own_classes(trained, tmp_path):
    folder = paint(tmp_path / "two", 2, 10)
    said = ["data.size=8", "training.epochs=2", "training.batch_size=4", "device=cpu"]
    run = kq.train("own-pictures", tmp_path / "run", [f"data.name=folder:{folder}", *said], start=trained, quiet=True)
    before, after = weights(trained), weights(run.path)
    assert after["model.head.bias"].shape == (2,) and before["model.head.bias"].shape == (3,)
    moved = {
        name.split(".")[-1] for name, value in after.items() if "head" not in name if not before[name].equal(value)
    }
    assert moved <= {"vector", "settled"}  # frozen: weights and statistics; the norms of W are those of evaluation
    assert run.config().start.frozen and run.config().model == Run(trained).config().model
    assert evaluate(run.path).scores["test"]["accuracy"] == 1.0
    assert "energy" not in str(run.rows()[-1]["diagnostics"]) and run.rows()[-1]["validation"]["accuracy"] == 1.0
    thawed = load_config("digits", [*said, f"data.name=folder:{folder}"], start=trained)
    train(thawed, tmp_path / "thawed")
    assert any(not torch.equal(before[n], v) for n, v in weights(tmp_path / "thawed").items() if "stem" in n)
    trained.rename(trained.with_name("gone"))  # a run goes on without those that it began from
    try:
        with pytest.raises(Exception, match="already holds a run"):
            train(thawed, tmp_path / "thawed")
        assert len(train(thawed, tmp_path / "thawed", resume=True)) == 2
    finally:
        trained.with_name("gone").rename(trained)


def test_weights_of_another_model_are_refused(trained, tmp_path):
    folder = paint(tmp_path / "two", 2, 4)
    changes = [f"data.name=folder:{folder}", "data.size=8", "model.features=[16,8]", "training.batch_size=4"]
    with pytest.raises(Exception, match="belongs to another run"):
        train(load_config("digits", changes, start=trained), tmp_path / "run")
    with pytest.raises(ConfigError, match="`start.frozen` needs `start.run`"):
        parse("", ["start.frozen=true"])


def test_a_model_with_a_new_head_for_other_classes(trained):
    model = kq.load(trained, classes=5)
    assert model(torch.rand(2, 3, 8, 8)).shape == (2, 5)
    assert torch.equal(model.stem[0][0].weight, kq.load(trained).stem[0][0].weight)


def test_the_command_says_what_it_chose_trains_every_fold_and_doubts_chance(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    paint(tmp_path / "two", 2, 10)
    for path in (tmp_path / "two" / "train" / "g").iterdir():  # now both classes look alike
        path.write_bytes((tmp_path / "two" / "train" / "r" / path.name).read_bytes())
    command = ["kerneq", "train", "--from", str(trained), "data.name=folder:two", "data.size=8"]
    for more in ([], ["--folds", "2", "--name", "folds"]):
        monkeypatch.setattr("sys.argv", [*command, *more])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "20 pictures of 2 classes (10 to 10 each), 4 held out" in said and "On this CPU about" in said
    assert re.search(r"last epoch, \S+ of 4 images, is not distinguishable from chance, which is 50% for", said)
    assert re.search(
        r"runs/folds: 2-fold cross-validation, accuracy \S+ on 20 images, each held out once, not dist", said
    )
    assert [run.name for run in sorted((tmp_path / "runs" / "folds").iterdir())] == ["fold-1", "fold-2"]
    monkeypatch.setattr("sys.argv", [*command, "--folds", "2", "--name", "folds", "optimizer.lr=0.02"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1 and "another value of `optimizer.lr`" in " ".join(capsys.readouterr().err.split())


def test_the_parts_of_a_cross_validation_are_all_images_once_and_every_class_is_in_each(tmp_path):
    images = load("digits", "train")
    parts = [split(images, parse("", ["data.folds=5", f"data.fold={k}"])) for k in range(1, 6)]
    held = torch.cat([part[1].pixels.flatten(1) for part in parts])
    assert held.sum() == images.pixels.sum() and len(held) == len(images)
    assert all(len(a) + len(b) == len(images) and abs(len(b) - len(images) / 5) < 5 for a, b in parts)
    assert min(int(part[1].labels.bincount().min()) for part in parts) > 20
    held = {label: [int((part[1].labels == label).sum()) for part in parts] for label in range(10)}
    assert all(max(counts) - min(counts) <= 1 for counts in held.values())
    with pytest.raises(ConfigError, match="`data.folds` must be 0, or 2 and more and not below `data.fold`, got 2."):
        parse("", ["data.folds=2", "data.fold=3"])


def test_an_accuracy_that_may_be_chance_says_so():
    sentence = "not distinguishable from chance, which is 50% for the largest class (p = 0.21)"
    assert f"p = {binom.sf(8, 14, 0.5):.2f}" in sentence
    assert describe_chance(9, 14, (10, 10)) == sentence and describe_chance(13, 14, (10, 10)) == ""


def test_all_broken_pictures_are_named_before_a_training_and_can_be_left_out(tmp_path):
    folder = paint(tmp_path / "two", 2, 8)
    broken = [folder / "train" / "r" / "1.png", folder / "train" / "g" / "0.png", folder / "test" / "g" / "2.png"]
    for path in broken:
        path.write_bytes(path.read_bytes()[:100])
    settings = [f"data.name=folder:{folder}", "data.size=8", "training.batch_size=4", "training.epochs=1"]
    with pytest.raises(DataError) as refused:
        train(load_config("geq-tiny-digits", settings), tmp_path / "run")
    assert all(str(path) in str(refused.value) for path in broken) and "--skip-broken" in str(refused.value)
    assert not (tmp_path / "run").exists()
    config = load_config("geq-tiny-digits", [*settings, "data.skip_broken=true"])
    assert (len(read_images(config, "train")), len(read_images(config, "test"))) == (14, 7)
    said = Said()
    train(config, tmp_path / "run", loggers=[said])
    assert said.texts[0] == f"left out, 3 in all: {', '.join(map(str, (broken[1], broken[0], broken[2])))}"
    assert evaluate(tmp_path / "run").scores["test"]["images"] == 7
    paths = sorted((folder / "test" / "r").iterdir())
    assert list(ImageFiles((*paths, *broken), 8).find_broken()) == broken
    for path in paths:
        path.write_bytes(b"no picture")
    with pytest.raises(DataError, match="None of the 4 pictures of the class r can be read: replace them."):
        evaluate(tmp_path / "run")
