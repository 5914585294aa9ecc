"""Data sets by their names: small stand-ins, requests that make no sense, and the published sets where they are."""

import gzip

import numpy as np
import pytest
import torch
from data_files import idx
from sklearn.datasets import load_digits

from kerneq.lab.data import DATA_SETS, Augment, Batches, DataError, Images, data_root, describe, load

COUNTS = {
    "mnist": (60000, 10000, 10),
    "fashion-mnist": (60000, 10000, 10),
    "cifar10": (50000, 10000, 10),
    "cifar100": (50000, 10000, 100),
    "cifar100-coarse": (50000, 10000, 20),
}


def test_digits_are_split_by_class_and_scaled_to_bytes():
    train, test = load("digits", "train"), load("digits", "test")
    assert train.shape == test.shape == (1, 8, 8) and len(train) + len(test) == 1797
    assert train.pixels.max() == 255 and train.pixels.dtype == torch.uint8
    share = test.labels.bincount() / (train.labels.bincount() + test.labels.bincount())
    assert share.min() > 0.18 and share.max() < 0.21
    scaled = train.pixels.double() / 255
    assert train.mean[0] == pytest.approx(scaled.mean().item(), abs=1e-4)
    assert train.std[0] == pytest.approx(scaled.std(correction=0).item(), abs=1e-4)
    same = load_digits()
    chosen = np.sort(np.concatenate([np.flatnonzero(same.target == label)[4::5] for label in range(10)]))
    assert np.array_equal(test.labels, same.target[chosen])
    assert np.array_equal(np.rint(test.pixels[:, 0].numpy() * (16 / 255)), same.images[chosen])


def test_whole_fashion_mnist_is_read_by_its_name(tmp_path):
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    labels = np.arange(10000) % 10
    images = np.zeros((10000, 28, 28), dtype=np.uint8)
    images[:, 3, 4] = labels
    (folder / "t10k-images-idx3-ubyte").write_bytes(idx(images))
    (folder / "t10k-labels-idx1-ubyte").write_bytes(idx(labels))
    test = load("fashion-mnist", "test", root=tmp_path)  # the training files do not even exist
    assert test.shape == (1, 28, 28) and test.classes[9] == "Ankle boot"
    assert torch.equal(test.pixels[:, 0, 3, 4].long(), test.labels)
    with pytest.raises(DataError, match="train-images-idx3-ubyte is missing"):
        load("fashion-mnist", "train", root=tmp_path)


def test_a_packed_file_that_is_not_the_published_one_is_refused_by_its_md5(tmp_path):
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    (folder / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(np.zeros((10000, 28, 28)))))
    with pytest.raises(DataError, match=r"not the published file, its MD5 is .* download it again"):
        load("fashion-mnist", "test", root=tmp_path)


def test_whole_cifar10_in_the_binary_version_is_read_by_its_name(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    table = np.zeros((10000, 3073), dtype=np.uint8)
    table[:, 0] = np.arange(10000) % 10
    table[:, 1 + 1024] = table[:, 0]  # the first green pixel
    (folder / "test_batch.bin").write_bytes(table.tobytes())
    test = load("cifar10", "test", root=tmp_path)
    assert test.shape == (3, 32, 32) and torch.equal(test.pixels[:, 1, 0, 0].long(), test.labels)


@pytest.mark.parametrize("name", [name for name in DATA_SETS if name != "digits"])
def test_a_missing_data_set_says_where_it_was_sought_and_how_to_get_it(name, tmp_path):
    with pytest.raises(DataError, match=f"{name} is not in {tmp_path}, .* or set KERNEQ_DATA"):
        load(name, "train", root=tmp_path)


def test_the_root_comes_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("KERNEQ_DATA", str(tmp_path / "here"))
    with pytest.raises(DataError, match=str(tmp_path / "here")):
        load("mnist", "train")


@pytest.mark.parametrize(
    ("name", "split", "size", "message"),
    [
        ("cifar01", "train", None, "There is no data set 'cifar01'. Did you mean `cifar10`"),
        ("digits", "validation", None, "no split 'validation': ask for 'train' or 'test'"),
        ("digits", "test", 9, "are 8×8, not 9×9: leave `size` out"),
        ("digits", "test", 0, "`size` must be at least 1"),
    ],
)
def test_a_wrong_request_is_answered_in_a_sentence(name, split, size, message):
    with pytest.raises(DataError, match=message):
        load(name, split, size=size)


def test_describe_tells_whole_damaged_and_missing_sets_apart(tmp_path):
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train-images-idx3-ubyte").write_bytes(b"short")
    rows = {row.name: row for row in describe(tmp_path)}
    assert list(rows) == list(DATA_SETS)
    assert rows["digits"].found and rows["digits"].path is None and rows["digits"].problem is None
    assert not rows["mnist"].found and rows["mnist"].path == tmp_path / "mnist"
    assert "has 5 bytes, the published file has 47040016" in rows["mnist"].problem
    assert not rows["cifar10"].found and "not in" in rows["cifar10"].problem
    assert all(row.get and row.licence for row in rows.values())


def found(name: str, split: str) -> Images:
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
