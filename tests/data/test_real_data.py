"""The published data sets themselves, where KERNEQ_DATA has them."""

import pytest
import torch

from kerneq.data import Augment, Batches, DataError, Folder, Images, data_root, load

COUNTS = {
    "mnist": (60000, 10000, 10),
    "fashion-mnist": (60000, 10000, 10),
    "cifar10": (50000, 10000, 10),
    "cifar100": (50000, 10000, 100),
    "cifar100-coarse": (50000, 10000, 20),
}


def found(name: str, split: str) -> Images | Folder:
    try:
        return load(name, split)
    except DataError as error:
        if f"is not in {data_root()}" not in str(error):
            raise
        pytest.skip(f"{name} is not in {data_root()}: set KERNEQ_DATA to where it is")


@pytest.mark.parametrize("name", COUNTS)
def test_a_published_set_has_its_counts_and_statistics(name):
    train, test = found(name, "train"), found(name, "test")
    assert (len(train), len(test), len(train.classes)) == COUNTS[name]
    classes = train.labels.bincount()
    assert len(classes) == len(train.classes) and (test.labels.bincount() > 0).all()
    levels = torch.stack([channel.bincount(minlength=256) for channel in train.pixels.transpose(0, 1).flatten(1)])
    share, value = levels.double() / levels.sum(1, keepdim=True), torch.arange(256).double() / 255
    mean = share @ value
    std = (share @ value.square() - mean.square()).sqrt()
    torch.testing.assert_close(mean, torch.tensor(train.mean).double(), atol=6e-5, rtol=0)
    torch.testing.assert_close(std, torch.tensor(train.std).double(), atol=6e-5, rtol=0)


def test_known_first_labels_of_cifar():
    assert found("cifar10", "train").labels[:5].tolist() == [6, 9, 9, 4, 1]
    assert found("cifar10", "test").labels[:5].tolist() == [3, 8, 8, 0, 6]


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_imagenette_streams_with_augmentation():
    train = found("imagenette", "train")
    assert len(train) == 9469 and train.classes[0] == "tench" and train.shape == (3, 256, 256)
    few = load("imagenette", "train", size=64).select(torch.arange(0, 9469, 200))
    x, labels = next(Batches(few, 24, Augment(area=0.35, flip=True, randaugment=2), workers=1).epoch(0))
    assert x.shape == (24, 3, 64, 64) and x.isfinite().all() and labels.unique().numel() > 4
