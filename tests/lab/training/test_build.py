"""Which images a run sees; CIFAR-100 is stood in for by labels alone."""

import shutil

import pytest
import torch
from PIL import Image

from kerneq.lab.data import DataError, Images, load
from kerneq.lab.report.results import Reported
from kerneq.lab.run import Run, TrainingError
from kerneq.lab.run.config import ConfigError, parse, write
from kerneq.lab.training import build, train
from kerneq.lab.training.build import hold, make_training_batches, read_images
from kerneq.lab.training.process import Process
from kerneq.models import Published

ALONE = Process(torch.device("cpu"))


@pytest.fixture
def cifar100(monkeypatch):
    """Two images of each of 100 fine classes; super-class = fine class modulo 20."""
    fine = torch.arange(100).repeat(2)
    labels = {"cifar100": fine, "cifar100-coarse": fine % 20}

    def load(name, split, size=None):
        names = tuple(str(i) for i in range(int(labels[name].max()) + 1))
        return Images(torch.zeros(200, 3, 4, 4, dtype=torch.uint8), labels[name], names, (0.5,) * 3, (0.2,) * 3)

    monkeypatch.setattr(build, "load", load)
    return fine


def test_the_fifth_sub_class_of_every_super_class_is_kept_out_of_training(cifar100):
    config = parse("", ["data.name=cifar100-coarse", "data.subset=four-of-five-subclasses"])
    known, unknown = read_images(config, "train"), read_images(config, "train", known=False)
    assert len(known) == 160 and len(unknown) == 40
    # Fine classes 80 … 99 are the last of their super-classes here.
    assert torch.equal(known.labels, cifar100[cifar100 < 80] % 20)
    assert torch.equal(unknown.labels, cifar100[cifar100 >= 80] % 20)
    assert len(known.classes) == 20


def test_sub_classes_need_the_data_set_that_has_them(cifar100):
    with pytest.raises(TrainingError, match="needs `data.name` = cifar100-coarse"):
        read_images(parse("", ["data.name=cifar100", "data.subset=four-of-five-subclasses"]), "train")


def test_a_model_of_the_first_five_classes_has_five_outputs():
    config = parse("", ["data.subset=first-five-classes"])
    images = make_training_batches(config, ALONE)[0].images
    assert images.classes == ("0", "1", "2", "3", "4")
    assert images.labels.max() == 4
    assert read_images(config, "test", known=False).labels.min() == 5


def test_the_held_out_images_are_not_trained_on():
    batches, held_out = make_training_batches(parse("", ["data.validation=0.5"]), ALONE)
    images = batches.images
    assert held_out is not None
    everything = read_images(parse(""), "train")
    assert len(images) + len(held_out.images) == len(everything) == 1442
    rows = torch.cat([images.pixels, held_out.images.pixels]).flatten(1).double()
    assert rows.sum() == everything.pixels.double().sum()


def test_something_is_left_to_train_on(monkeypatch):
    monkeypatch.setattr(build, "load", lambda name, split, size=None: load("digits", split).select(torch.arange(3)))
    with pytest.raises(TrainingError, match=r"`data.validation` = 0.9 of 3 images leaves none to train on."):
        make_training_batches(parse("", ["data.validation=0.9", "training.batch_size=1"]), ALONE)


def test_a_size_that_would_change_fixed_pictures_is_refused():
    with pytest.raises(DataError, match="size"):
        read_images(parse("", ["data.size=12"]), "train")


def test_a_model_whose_scales_do_not_fit_the_pictures_is_refused_before_it_trains(tmp_path):
    with pytest.raises(ConfigError, match=r"\[model\] .* multiples of 16, got \(1298, 1, 8, 8\)\."):
        train(parse("", ["model.name=geq-5m"]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_picture_files_stay_in_memory_if_they_fit(tmp_path, monkeypatch):
    for split, number in (("train", 5), ("test", 2)):
        for kind in "ab":
            (tmp_path / split / kind).mkdir(parents=True)
            for i in range(number):
                Image.new("RGB", (9, 9), (40 * i, 0, 0)).save(tmp_path / split / kind / f"{i}.png")
    settings = [f"data.name=folder:{tmp_path}", "data.size=8", "data.validation=0.2", "training.batch_size=4"]
    config = parse("", [*settings, "data.memory=true", "augment.area=0.5"])
    test = read_images(config, "test")
    said: list[str] = []
    batches, held_out = make_training_batches(config, ALONE, said.append)
    assert said == ["decoding 10 pictures into memory, 0.00 GB"] and held_out is not None
    for images, count in ((batches.images, 8), (held_out.images, 2)):
        assert isinstance(images.pixels, torch.Tensor) and images.pixels.shape == (count, 3, 8, 8)
    shutil.rmtree(tmp_path / "train")  # no file is opened any more
    assert [len(x) for x, _ in batches.epoch(0)] == [4, 4]
    assert hold(test, config, ALONE).pixels.sum() == 2 * 40 * 64
    assert hold(test, parse("", settings), ALONE) is test
    monkeypatch.setattr(build, "free_memory", lambda device: 700)
    with pytest.raises(TrainingError, match=r"4 pictures of 8 × 8 take 0.0 GB .* set data.memory=false"):
        hold(test, config, ALONE)


def test_a_result_on_pictures_of_another_size_says_so_and_has_no_published_figure(tmp_path):
    names = [parse("", ["data.name=imagenette", f"data.size={size}"]).data.pictures for size in (0, 256, 128)]
    assert names == ["imagenette", "imagenette", "imagenette at 128 px"]
    for size, published in ((256, Published(92.9, 0.2)), (128, None)):
        config = parse("", ["data.name=imagenette", f"data.size={size}", "model.name=geq-6m-imagenet"])
        (tmp_path / "config.toml").write_text(write(config), encoding="utf-8")
        assert Reported(Run(tmp_path), "run").published() == published
