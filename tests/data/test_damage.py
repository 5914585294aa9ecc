"""Damaged, foreign and hostile files: a DataError or the right data, and never anything else."""

import gzip
import hashlib
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from data_files import idx, picture, python2_pickle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kerneq.data import DataError
from kerneq.data.cifar import Cifar, Pickled, Records
from kerneq.data.decode import decode
from kerneq.data.files import File
from kerneq.data.idx import Idx
from kerneq.data.layout import AbstractLayout, Arrays
from kerneq.data.pickled import unpickle

PIXELS = np.random.default_rng(0).integers(0, 256, (2, 3072)).astype(np.uint8)
PICKLE = python2_pickle(PIXELS, [1, 2])
RECORDS = np.concatenate([np.array([[1], [2]], dtype=np.uint8), PIXELS], axis=1).tobytes()
IMAGES, LABELS = idx(PIXELS[:, :25].reshape(2, 5, 5)), idx(np.array([1, 2]))

PYTHON = Cifar(("x",), (File("f"),), (), Pickled(b"labels"), 10)
BINARY = Cifar(("x",), (File("f"),), (), Records(), 10)
IDX = Idx(("x",), train=2, test=2, md5={}, side=5)


def outcome(layout: AbstractLayout, folder: Path) -> Arrays | None:
    """What was read, None for a DataError in one line; any other exception fails the test."""
    try:
        return layout.read(folder, "train")
    except DataError as error:
        assert str(error).startswith(str(folder)) and "\n" not in str(error) and str(error).endswith(".")
        return None


def sound(arrays: Arrays, classes: int = 10) -> bool:
    """Of a form that training can use, whatever the bytes were."""
    return (
        arrays.pixels.dtype == np.uint8
        and arrays.labels.dtype == np.int64
        and len(arrays.pixels) == len(arrays.labels)
        and 0 <= arrays.labels.min(initial=0) <= arrays.labels.max(initial=0) < classes
    )


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """The content cut short, with flipped bits, with a stretch overwritten, or with something added.

    Positions near the ends are favoured: that is where the structure is, the middle is pixels."""
    near = st.one_of(st.integers(0, min(300, len(content) - 1)), st.integers(0, len(content) - 1))
    at = draw(near)
    match draw(st.sampled_from(["cut", "flip", "overwrite", "append"])):
        case "cut":
            return content[:at]
        case "flip":
            return content[:at] + bytes([content[at] ^ (1 << draw(st.integers(0, 7)))]) + content[at + 1 :]
        case "overwrite":
            patch = draw(st.binary(min_size=1, max_size=40))
            return content[:at] + patch + content[at + len(patch) :]
        case _:
            return content + draw(st.binary(min_size=1, max_size=40))


quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@quick
@given(
    content=st.one_of(damaged(PICKLE), st.binary(max_size=400), st.binary(max_size=60).map(lambda b: b"\x80\x02" + b))
)
def test_a_damaged_cifar_pickle(tmp_path, content):
    (tmp_path / "f").write_bytes(content)
    arrays = outcome(PYTHON, tmp_path)
    assert arrays is None or sound(arrays)


@quick
@given(content=st.one_of(damaged(RECORDS), st.binary(max_size=400)))
def test_a_damaged_cifar_record_file(tmp_path, content):
    (tmp_path / "f").write_bytes(content)
    arrays = outcome(BINARY, tmp_path)
    assert arrays is None or sound(arrays)


@quick
@given(
    images=st.one_of(st.just(IMAGES), damaged(IMAGES)),
    labels=st.one_of(damaged(LABELS), st.binary(max_size=40)),
)
def test_a_damaged_idx_file(tmp_path, images, labels):
    (tmp_path / "train-images-idx3-ubyte").write_bytes(images)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(labels)
    arrays = outcome(IDX, tmp_path)
    assert arrays is None or (sound(arrays) and arrays.pixels.shape == (2, 1, 5, 5))


@quick
@given(images=st.one_of(damaged(gzip.compress(IMAGES, mtime=0)), st.binary(max_size=60)))
def test_a_damaged_gz_file_gives_the_right_pictures_or_an_error(tmp_path, images):
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(images)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(LABELS)
    arrays = outcome(IDX, tmp_path)  # gzip's own checksum guards the content
    assert arrays is None or np.array_equal(arrays.pixels, PIXELS[:, :25].reshape(2, 1, 5, 5))


@quick
@given(content=st.one_of(damaged(PICKLE), st.binary(max_size=200)))
def test_with_a_published_size_and_md5_damage_never_passes(tmp_path, content):
    (tmp_path / "f").write_bytes(content)
    file = File("f", len(PICKLE), hashlib.md5(PICKLE).hexdigest())
    arrays = outcome(Cifar(("x",), (file,), (), Pickled(b"labels"), 10), tmp_path)
    assert (arrays is None) == (content != PICKLE)


class Evil:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_asks_for_a_command_runs_nothing(tmp_path, protocol):
    trace = tmp_path / "trace"
    for evil in (
        Evil(os.system, f"touch {trace}"),
        Evil(eval, f"open({str(trace)!r}, 'w')"),
        Evil(open, str(trace), "w"),
        {b"data": Evil(os.mkdir, str(trace)), b"labels": []},
    ):
        with pytest.raises(DataError, match="not a CIFAR file"):
            unpickle(tmp_path / "f", pickle.dumps(evil, protocol))
        assert not trace.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02cos\nsystem\n(U\x0btouch /tmp/xtR.",
        b"\x80\x02cnumpy\nload\n(U\x01xtR.",
        b"\x80\x02cnumpy.core.multiarray\nscalar\n)R.",
        b"\x80\x02cbuiltins\neval\nU\x011\x85R.",
        b"cposix\nsystem\n(S'ls'\ntR.",
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x02ls\x85R.",
        b"(S'ls'\niposix\nsystem\n.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02cnumpy\ndtype\n)\x81.",
    ],
)
def test_hand_made_hostile_pickles_are_refused(tmp_path, content):
    with pytest.raises(DataError):
        unpickle(tmp_path / "f", content)


def test_a_huge_memo_index_or_length_takes_no_memory(tmp_path):
    for content in (
        b"\x80\x02}r\xff\xff\xff\xff.",
        b"\x80\x02}(T\xff\xff\xff\x7fabc",
        python2_pickle(np.zeros((1, 3072)), [0]).replace(
            b"K\x01J\x00\x0c\x00\x00", b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f"
        ),
    ):
        try:
            table = unpickle(tmp_path / "f", content)
        except DataError:
            continue
        assert table == {}


def test_a_gz_that_unpacks_to_too_much_is_stopped(tmp_path):
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(IMAGES + bytes(10**7)))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(LABELS)
    with pytest.raises(DataError, match="unpacks to more than the 66 bytes"):
        IDX.read(tmp_path, "train")


@pytest.fixture(scope="module", params=["png", "jpg", "webp", "gif", "bmp", "tif", "ppm"])
def encoded(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures") / f"p.{request.param}"
    picture(path, (200, 30, 90))
    return path, path.read_bytes()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_picture_decodes_or_says_what_is_wrong(encoded, data):
    path, content = encoded
    broken = path.with_name(f"broken{path.suffix}")
    broken.write_bytes(data.draw(damaged(content)))
    found = decode(broken, 8)
    if isinstance(found, str):
        assert found.startswith(f"{broken} is not a readable picture (") and found.endswith("replace or remove it.")
    else:
        assert found.shape == (3, 8, 8)
