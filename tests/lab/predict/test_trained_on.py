"""What a run was trained on, known without its data set."""

import json
import shutil
from pathlib import Path

import pytest
from helpers import trained
from PIL import Image

from kerneq.lab.data import DATA_SETS, DataError, fingerprint, load
from kerneq.lab.evaluate.trained import TrainedRun, describe_images
from kerneq.lab.prediction import Predictor, predict
from kerneq.lab.run.config import parse


def test_a_model_without_an_equilibrium_names_the_classes_of_its_folder(kerneq, colour_run, tmp_path):
    run, _ = colour_run
    red = tmp_path / "red.jpg"
    Image.new("RGB", (300, 200), (210, 30, 30)).save(red)
    [prediction] = predict(run, [red], device="cpu")
    assert prediction.classes == ("red wine", "blue sky") and prediction.converged
    assert prediction.status is prediction.steps is prediction.residual is None
    code, out, _ = kerneq("predict", run, red, "--json")
    [row] = json.loads(out)["predictions"]
    assert code == 0 and row["converged"] is row["status"] is row["steps"] is row["residual"] is None
    code, out, _ = kerneq("predict", run, red)
    assert code == 0 and "red wine" in out and "converged" not in out and "not known" not in out


def test_a_run_knows_its_classes_without_its_folder_of_pictures(kerneq, colour_run, tmp_path):
    run, pictures = colour_run
    red = tmp_path / "red.png"
    Image.new("RGB", (30, 20), (210, 30, 30)).save(red)
    told = json.loads((run / "classes.json").read_text())
    assert (told["classes"], told["size"], len(told["mean"])) == (["blue sky", "red wine"], 16, 3)
    hidden = pictures.rename(pictures.with_name("hidden"))
    try:
        code, out, _ = kerneq("predict", run, red, "--top", "1")
        assert code == 0 and "red wine" in out and "not known" not in out
        code, _, err = kerneq("evaluate", run)
        assert code == 1 and "There is no folder" in err
        old = copied_without_names(run, tmp_path / "old")
        code, out, _ = kerneq("predict", old, red, "--top", "1")
        assert code == 0 and "red wine" not in out and "names of the classes are not known" in out
        code, out, _ = kerneq("predict", old, red, "--json")
        result = json.loads(out)
        assert result["named"] is False and result["predictions"][0]["top"][0]["class"] == "1"
    finally:
        hidden.rename(pictures)


def test_a_folder_of_pictures_whose_classes_have_changed_is_noticed(kerneq, colour_run, tmp_path):
    run, pictures = colour_run
    old = copied_without_names(run, tmp_path / "old")
    assert Predictor(old, device="cpu").trained.classes == ("blue sky", "red wine")
    for split in ("train", "test"):
        (pictures / split / "blue sky").rename(pictures / split / "sky")  # which comes after red wine
    try:
        for command in (["evaluate", run], ["train", run, "--resume"]):
            code, _, err = kerneq(*command)
            assert code == 1 and "blue sky" in err and "bring" in err
        (pictures / "train" / "green grass").mkdir()  # a class that the model has never heard of
        assert not Predictor(old, device="cpu").trained.named
        (pictures / "train" / "green grass").rmdir()
    finally:
        for split in ("train", "test"):
            (pictures / split / "sky").rename(pictures / split / "blue sky")


def test_a_folder_of_pictures_that_has_lost_one_is_noticed(kerneq, colour_run, tmp_path):
    _, pictures = colour_run
    shutil.copytree(pictures, tmp_path / "pictures")
    settings = [f"data.name=folder:{tmp_path / 'pictures'}", "data.size=16", "data.validation=0.25"]
    run = trained(tmp_path / "run", *settings, "model.name=resnet-tiny", "training.batch_size=8")
    before = TrainedRun.open(run, device="cpu").held_out().pixels.paths
    (tmp_path / "pictures" / "train" / "blue sky" / "0.png").unlink()
    code, _, err = kerneq("train", run, "--resume")
    assert code == 1 and "was started on 16 training images of the class blue sky, and its data set now has 15" in err
    code, out, _ = kerneq("evaluate", run, "--device", "cpu")  # a test accuracy, but no temperature
    assert code == 0 and "accuracy" in out and "other training images" in " ".join(out.split())
    (run / "environment.json").unlink()  # as of a run that does not say
    assert set(TrainedRun.open(run, device="cpu").held_out().pixels.paths) != set(before)


def test_a_folder_without_a_test_split_that_has_got_more_pictures_is_not_evaluated_on(kerneq, colour_run, tmp_path):
    shutil.copytree(colour_run[1] / "train", tmp_path / "flat")
    settings = [f"data.name=folder:{tmp_path / 'flat'}", "data.size=16", "data.validation=0"]
    run = trained(tmp_path / "run", *settings, "model.name=resnet-tiny", "training.batch_size=8")
    assert kerneq("evaluate", run, "--device", "cpu")[0] == 0
    for number in range(16, 32):
        shutil.copy(tmp_path / "flat" / "red wine" / "0.png", tmp_path / "flat" / "red wine" / f"{number}.png")
    code, _, err = kerneq("evaluate", run, "--device", "cpu")
    assert code == 1 and "other training images" in err and "bring back the pictures as they were" in err


@pytest.mark.parametrize("memory", ["true", "false"])
def test_a_folder_whose_pictures_were_renamed_is_neither_evaluated_on_nor_trained_on_again(
    kerneq, colour_run, tmp_path, memory
):
    """Their names say which of them are tested on: most of those would have been trained on."""
    flat = tmp_path / "flat"
    shutil.copytree(colour_run[1] / "train", flat)
    settings = [f"data.name=folder:{flat}", "data.size=16", "data.validation=0.25", f"data.memory={memory}"]
    run = trained(tmp_path / "run", *settings, "model.name=resnet-tiny", "training.batch_size=8")
    assert TrainedRun.open(run, device="cpu").held_out() is not None
    moved = flat.rename(tmp_path / "elsewhere")  # another place is no other picture
    flat.symlink_to(moved)
    assert kerneq("evaluate", run, "--device", "cpu")[0] == 0
    tested = {path.read_bytes() for path in load(f"folder:{flat}", "test").pixels.paths}
    for path in sorted(moved.rglob("*.png")):
        path.rename(path.with_name(f"picture {path.name}"))
    assert {path.read_bytes() for path in load(f"folder:{flat}", "test").pixels.paths} != tested
    code, _, err = kerneq("evaluate", run, "--device", "cpu")
    assert code == 1 and "other training images" in err and "bring back the pictures as they were" in err
    code, _, err = kerneq("train", run, "--resume")
    assert code == 1 and "training pictures of other names" in err


def test_a_folder_of_pictures_inside_a_class_that_was_renamed_is_noticed(tmp_path):
    """Frames of several recordings share their names: which of them are tested on is a matter of their order."""
    for folder in ("a/p", "a/q", "b/p", "b/q"):
        (tmp_path / folder).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (8, 8), (number, len(folder), ord(folder[-1]))).save(tmp_path / folder / f"{number}.png")
    before = fingerprint(f"folder:{tmp_path}")
    assert before is not None and fingerprint(f"folder:{tmp_path}") == before
    (tmp_path / "a/p").rename(tmp_path / "a/z")
    assert fingerprint(f"folder:{tmp_path}") != before


def test_the_first_five_of_two_classes_are_all(kerneq, colour_run, tmp_path):
    settings = [f"data.name=folder:{colour_run[1]}", "data.size=16", "data.subset=first-five-classes"]
    run = trained(tmp_path / "run", *settings, "model.name=resnet-tiny", "training.batch_size=8")
    code, _, err = kerneq("evaluate", run, "--part", "ood", "--device", "cpu")
    assert code == 1 and "needs a run that was trained on some of the classes, data.subset = first-five" in err
    assert "this one has all" in err


def copied_without_names(run: Path, to: Path) -> Path:
    """The run as earlier versions wrote it."""
    shutil.copytree(run, to)
    (to / "classes.json").unlink()
    return to


@pytest.mark.parametrize("name", sorted(DATA_SETS.keys() - {"imagenette", "imagenet100"}))
def test_the_size_and_classes_of_a_packed_data_set_are_known_without_it(name, monkeypatch, tmp_path):
    try:
        images = load(name, "test")
    except DataError as error:
        images = None
        reason = str(error)
    monkeypatch.setenv("KERNEQ_DATA", str(tmp_path))
    config = parse("", [f"data.name={name}"])
    known, named = describe_images(config, outputs=len(DATA_SETS[name].class_names))
    assert named and len(known) == 0
    if images is None:
        pytest.skip(f"{reason} Its pictures' size could not be compared.")
    assert (known.shape, known.classes, known.mean, known.std) == (
        images.shape,
        images.classes,
        images.mean,
        images.std,
    )


def test_a_run_on_some_of_the_classes_names_those():
    some, _ = describe_images(parse("", ["data.name=cifar10", "data.subset=first-five-classes"]), outputs=5)
    assert some.classes == ("airplane", "automobile", "bird", "cat", "deer")
    photographs, named = describe_images(parse("", ["data.name=imagenette", "data.size=64"]), outputs=10)
    assert named and photographs.classes[0] == "tench" and photographs.shape == (3, 64, 64)
