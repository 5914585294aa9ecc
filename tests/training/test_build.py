"""Which images a run sees; CIFAR-100 is stood in for by labels alone."""

import pytest
import torch

from kerneq.data import DataError, Images
from kerneq.run import TrainingError
from kerneq.run.config import parse
from kerneq.training import build
from kerneq.training.build import read_images, training_batches
from kerneq.training.process import Process

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
    images = training_batches(config, ALONE)[0].images
    assert images.classes == ("0", "1", "2", "3", "4")
    assert images.labels.max() == 4
    assert read_images(config, "test", known=False).labels.min() == 5


def test_the_held_out_images_are_not_trained_on():
    batches, held_out = training_batches(parse("", ["data.validation=0.5"]), ALONE)
    images = batches.images
    assert held_out is not None
    everything = read_images(parse(""), "train")
    assert len(images) + len(held_out.images) == len(everything) == 1442
    rows = torch.cat([images.pixels, held_out.images.pixels]).flatten(1).double()
    assert rows.sum() == everything.pixels.double().sum()


def test_a_size_that_would_change_fixed_pictures_is_refused():
    with pytest.raises(DataError, match="size"):
        read_images(parse("", ["data.size=12"]), "train")
