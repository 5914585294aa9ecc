"""Published files: what was written comes back; damaged, foreign and hostile ones give a sentence and nothing else."""

import gzip
import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from data_files import damaged, idx, python2_pickle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kerneq.lab.data import DataError
from kerneq.lab.data.readers import File, Release

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (6, 3072)).astype(np.uint8)
LABELS = [3, 0, 9, 1, 1, 4]
PICKLE = python2_pickle(PIXELS, LABELS)
IDX_PIXELS = PIXELS[:, :25].reshape(6, 5, 5)
IDX_FILES = {"images": idx(IDX_PIXELS), "labels": idx(np.array(LABELS))}

COLOUR, GREY = (3, 32, 32), (1, 5, 5)
Arrays = tuple[np.ndarray, np.ndarray]
IDX = (File("images", 166), File("labels", 14))

quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read(folder: Path) -> Arrays:
    return Release("idx", (), IDX).read(folder, "test", GREY, "labels", 10)


def read_cifar(folder: Path, format: str, content: bytes, labels: str = "labels", classes: int = 10) -> Arrays:
    (folder / "f").write_bytes(content)
    return Release(format, (File("f", len(content)),), ()).read(folder, "train", COLOUR, labels, classes)


def outcome(folder: Path, read: Callable[[], Arrays]) -> Arrays | None:
    """What was read, None for a DataError in one line; any other exception fails the test."""
    try:
        pixels, labels = read()
    except DataError as error:
        assert str(error).startswith(str(folder)) and "\n" not in str(error) and str(error).endswith(".")
        return None
    assert pixels.dtype == np.uint8 and labels.dtype == np.int64 and len(pixels) == len(labels)
    assert 0 <= labels.min(initial=0) <= labels.max(initial=0) < 10
    return pixels, labels


def write_idx(folder: Path, packed: bool) -> None:
    for name, content in IDX_FILES.items():
        (folder / f"{name}.gz" if packed else folder / name).write_bytes(gzip.compress(content) if packed else content)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
def test_idx_files_give_back_what_was_written(tmp_path, packed):
    write_idx(tmp_path, packed)
    Release("idx", (), IDX).check(tmp_path)
    pixels, labels = read(tmp_path)
    assert np.array_equal(pixels[:, 0], IDX_PIXELS) and labels.tolist() == LABELS


def test_the_md5_of_the_unpacked_content_is_checked_inside_a_gz(tmp_path):
    write_idx(tmp_path, packed=True)
    right = hashlib.md5(IDX_FILES["labels"]).hexdigest()
    assert File("labels", 14, md5=right).read(tmp_path) == (tmp_path / "labels.gz", IDX_FILES["labels"])
    with pytest.raises(DataError, match="not the published file"):
        File("labels", 14, md5="0" * 32).read(tmp_path)
    with pytest.raises(DataError, match="labels.gz is not the published file"):
        File("labels", 14, md5=right, gz_md5=right).read(tmp_path)


def test_an_idx_file_of_another_shape_is_refused(tmp_path):
    write_idx(tmp_path, packed=False)
    (tmp_path / "images").write_bytes(idx(PIXELS[:, :25].reshape(5, 6, 5)))
    with pytest.raises(DataError, match="images is not the idx file of 6 × 5 × 5 bytes: download it again"):
        read(tmp_path)


def test_cifar_pickles_give_back_what_was_written(tmp_path):
    for name in ("batch_0", "batch_1"):
        (tmp_path / name).write_bytes(PICKLE)
    files = tuple(File(name, len(PICKLE)) for name in ("batch_0", "batch_1"))
    pixels, labels = Release("cifar-python", files, ()).read(tmp_path, "train", COLOUR, "labels", 10)
    assert np.array_equal(pixels.reshape(12, 3072), np.concatenate([PIXELS, PIXELS]))
    assert pixels.shape[1:] == COLOUR and labels.tolist() == LABELS + LABELS


@pytest.mark.parametrize(("name", "want"), [("coarse_labels", [7] * 6), ("fine_labels", LABELS)])
def test_cifar_records_give_back_what_was_written(tmp_path, name, want):
    marks = np.stack([np.full(6, 7), LABELS], axis=1).astype(np.uint8)
    records = np.concatenate([marks, PIXELS], axis=1).tobytes()
    pixels, labels = read_cifar(tmp_path, "cifar-binary", records, name, classes=20)
    assert np.array_equal(pixels.reshape(6, 3072), PIXELS) and labels.tolist() == want


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (python2_pickle(PIXELS, [0, 1, 2, 3, 4, 10]), "f holds labels 0 … 10, not 0 … 9: download it again"),
        (python2_pickle(PIXELS, LABELS[:5]), "no label for each of its 6 pictures"),
        (python2_pickle(PIXELS[:, :100], LABELS), "not a CIFAR file in the python version"),
        (python2_pickle(PIXELS, LABELS, key=b"other"), "not a CIFAR file in the python version"),
        (pickle.dumps({b"data": 1, b"labels": []}, protocol=4), "not a CIFAR file in the python version"),
        (b"\x80\x02K\x05.", "not a CIFAR file in the python version"),
        (b"\x80\x02}(U\x04dataK\x01u.", "not a CIFAR file in the python version"),
        (b"<html>not found</html>", "not a CIFAR file in the python version"),
        (b"", "not a CIFAR file in the python version"),
    ],
)
def test_a_foreign_pickle_is_refused_in_a_sentence(tmp_path, content, message):
    with pytest.raises(DataError, match=message):
        read_cifar(tmp_path, "cifar-python", content)


def test_a_file_that_cannot_be_opened_is_a_data_error(tmp_path):
    (tmp_path / "t").mkdir()
    with pytest.raises(DataError, match="is not a file"):
        File("t", 1).read(tmp_path)


def test_a_gz_that_unpacks_to_too_much_is_stopped(tmp_path):
    write_idx(tmp_path, packed=False)
    (tmp_path / "images").unlink()
    (tmp_path / "images.gz").write_bytes(gzip.compress(IDX_FILES["images"] + bytes(10**7)))
    with pytest.raises(DataError, match="unpacks to more than the 166 bytes"):
        read(tmp_path)


@quick
@given(
    content=st.one_of(damaged(PICKLE), st.binary(max_size=400), st.binary(max_size=60).map(lambda b: b"\x80\x02" + b))
)
def test_a_damaged_cifar_pickle(tmp_path, content):
    outcome(tmp_path, lambda: read_cifar(tmp_path, "cifar-python", content))


@quick
@given(
    content=st.one_of(
        damaged(np.concatenate([np.array(LABELS, dtype=np.uint8)[:, None], PIXELS], axis=1).tobytes()),
        st.binary(max_size=400),
    )
)
def test_a_damaged_cifar_record_file(tmp_path, content):
    outcome(tmp_path, lambda: read_cifar(tmp_path, "cifar-binary", content))


@quick
@given(
    images=st.one_of(st.just(IDX_FILES["images"]), damaged(IDX_FILES["images"]), st.binary(max_size=60)),
    labels=st.one_of(st.just(IDX_FILES["labels"]), damaged(IDX_FILES["labels"]), st.binary(max_size=60)),
)
def test_damaged_idx_files(tmp_path, images, labels):
    (tmp_path / "images").write_bytes(images)
    (tmp_path / "labels").write_bytes(labels)
    files = File("images", len(images)), File("labels", len(labels))  # of the right size, whatever is in them
    outcome(tmp_path, lambda: Release("idx", (), files).read(tmp_path, "test", GREY, "labels", 10))


@quick
@given(images=st.one_of(damaged(gzip.compress(IDX_FILES["images"], mtime=0)), st.binary(max_size=60)))
def test_a_damaged_gz_file_gives_the_right_pictures_or_an_error(tmp_path, images):
    (tmp_path / "images.gz").write_bytes(images)
    (tmp_path / "labels").write_bytes(IDX_FILES["labels"])
    arrays = outcome(tmp_path, lambda: read(tmp_path))  # gzip's own checksum guards the content
    assert arrays is None or np.array_equal(arrays[0][:, 0], IDX_PIXELS)


@quick
@given(content=st.one_of(damaged(PICKLE), st.binary(max_size=200)))
def test_with_a_published_size_and_md5_damage_never_passes(tmp_path, content):
    (tmp_path / "f").write_bytes(content)
    file = File("f", len(PICKLE), hashlib.md5(PICKLE).hexdigest())
    release = Release("cifar-python", (file,), ())
    arrays = outcome(tmp_path, lambda: release.read(tmp_path, "train", COLOUR, "labels", 10))
    assert (arrays is None) == (content != PICKLE)
