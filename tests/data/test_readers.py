"""Reading the published layouts: what comes back, and what a bad file says."""

import gzip
import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import idx, python2_pickle

from kerneq.data import DATA_SETS, DataError, describe, load
from kerneq.data.cifar import Cifar, Pickled, Records
from kerneq.data.files import File
from kerneq.data.idx import Idx
from kerneq.data.packed import Packed

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (6, 3072)).astype(np.uint8)
LABELS = [3, 0, 9, 1, 1, 4]
SMALL_IDX = Idx(folders=("small",), train=6, test=4, md5={}, side=5)


def write_idx(folder: Path, packed: bool) -> dict[str, np.ndarray]:
    arrays = {
        "train-images-idx3-ubyte": RNG.integers(0, 256, (6, 5, 5)),
        "train-labels-idx1-ubyte": RNG.integers(0, 10, 6),
        "t10k-images-idx3-ubyte": RNG.integers(0, 256, (4, 5, 5)),
        "t10k-labels-idx1-ubyte": RNG.integers(0, 10, 4),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            (folder / name).write_bytes(idx(array))
    return arrays


def test_digits_are_split_by_class_and_scaled_to_bytes():
    train, test = load("digits", "train"), load("digits", "test")
    assert train.shape == test.shape == (1, 8, 8) and len(train) + len(test) == 1797
    assert train.pixels.max() == 255 and train.pixels.dtype == torch.uint8
    share = test.labels.bincount() / (train.labels.bincount() + test.labels.bincount())
    assert share.min() > 0.18 and share.max() < 0.21
    scaled = train.pixels.double() / 255
    assert train.mean[0] == pytest.approx(scaled.mean().item(), abs=1e-4)
    assert train.std[0] == pytest.approx(scaled.std(correction=0).item(), abs=1e-4)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
def test_idx_files_give_back_what_was_written(tmp_path, packed):
    arrays = write_idx(tmp_path, packed)
    for split, prefix in (("train", "train"), ("test", "t10k")):
        got = SMALL_IDX.read(tmp_path, split)
        assert np.array_equal(got.pixels[:, 0], arrays[f"{prefix}-images-idx3-ubyte"])
        assert np.array_equal(got.labels, arrays[f"{prefix}-labels-idx1-ubyte"])


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


def test_the_md5_of_the_unpacked_content_is_checked_inside_a_gz(tmp_path):
    write_idx(tmp_path, packed=True)
    name = "t10k-labels-idx1-ubyte"
    content = gzip.decompress((tmp_path / f"{name}.gz").read_bytes())
    right = hashlib.md5(content).hexdigest()
    assert len(Idx(("x",), 6, 4, {name: right}, side=5).read(tmp_path, "test").labels) == 4
    with pytest.raises(DataError, match="not the published file"):
        Idx(("x",), 6, 4, {name: "0" * 32}, side=5).read(tmp_path, "test")


def test_cifar_pickles_give_back_what_was_written(tmp_path):
    for i in range(2):
        (tmp_path / f"batch_{i}").write_bytes(python2_pickle(PIXELS, LABELS))
    layout = Cifar(("x",), (File("batch_0"), File("batch_1")), (File("test"),), Pickled(b"labels"), 10)
    got = layout.read(tmp_path, "train")
    assert np.array_equal(got.pixels.reshape(12, 3072), np.concatenate([PIXELS, PIXELS]))
    assert got.labels.tolist() == LABELS + LABELS


@pytest.mark.parametrize(("mark", "want"), [(0, [7] * 6), (1, LABELS)], ids=["coarse", "fine"])
def test_cifar_records_give_back_what_was_written(tmp_path, mark, want):
    marks = np.stack([np.full(6, 7), LABELS], axis=1).astype(np.uint8)
    (tmp_path / "train.bin").write_bytes(np.concatenate([marks, PIXELS], axis=1).tobytes())
    layout = Cifar(("x",), (File("train.bin"),), (), Records(marks=2, mark=mark), 20)
    got = layout.read(tmp_path, "train")
    assert np.array_equal(got.pixels.reshape(6, 3072), PIXELS) and got.labels.tolist() == want


def test_whole_cifar10_in_the_binary_version_is_read_by_its_name(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    table = np.zeros((10000, 3073), dtype=np.uint8)
    table[:, 0] = np.arange(10000) % 10
    table[:, 1 + 1024] = table[:, 0]  # the first green pixel
    (folder / "test_batch.bin").write_bytes(table.tobytes())
    test = load("cifar10", "test", root=tmp_path)
    assert test.shape == (3, 32, 32) and torch.equal(test.pixels[:, 1, 0, 0].long(), test.labels)


def test_a_label_out_of_range_is_named(tmp_path):
    (tmp_path / "t").write_bytes(python2_pickle(PIXELS, [0, 1, 2, 3, 4, 10]))
    with pytest.raises(DataError, match=r"t holds labels 0 … 10, not 0 … 9: download it again"):
        Cifar(("x",), (File("t"),), (), Pickled(b"labels"), 10).read(tmp_path, "train")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (python2_pickle(PIXELS, LABELS[:5]), "no label for each of its 6 pictures"),
        (python2_pickle(PIXELS[:, :100], LABELS), "no table of 32×32 colour pictures"),
        (python2_pickle(PIXELS, LABELS, key=b"other"), "no label for each"),
        (pickle.dumps({b"data": 1, b"labels": []}, protocol=4), "not a CIFAR file in the python version"),
        (b"\x80\x02K\x05.", "does not hold the dictionary"),
        (b"<html>not found</html>", "not a CIFAR file in the python version"),
        (b"", "not a CIFAR file in the python version"),
    ],
)
def test_a_foreign_pickle_is_refused_in_a_sentence(tmp_path, content, message):
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(DataError, match=message):
        Cifar(("x",), (File("t"),), (), Pickled(b"labels"), 10).read(tmp_path, "train")


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
        ("cifar01", "train", None, "There is no data set 'cifar01'. Did you mean 'cifar10'"),
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


def test_a_file_that_cannot_be_opened_is_a_data_error(tmp_path):
    (tmp_path / "t").mkdir()
    with pytest.raises(DataError, match="is not a file"):
        File("t").read(tmp_path)


def test_every_packed_set_has_as_many_channels_in_its_statistics_as_its_pictures():
    sizes = {name: len(s.mean) for name, s in DATA_SETS.items() if isinstance(s, Packed)}
    assert sizes == {"digits": 1, "mnist": 1, "fashion-mnist": 1} | dict.fromkeys(
        ("cifar10", "cifar100", "cifar100-coarse"), 3
    )
