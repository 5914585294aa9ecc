import errno
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from kerneq.lab.run import CheckpointError, TrainingError, checkpoint, write_atomically
from kerneq.loading import read_checkpoint

TENSORS = {
    "model.w": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
    "model.half": torch.ones(2, dtype=torch.bfloat16),
    "count": torch.tensor(7),
    "none": torch.zeros(0, 3),
}
FACTS = {"epoch": 3, "best": None, "name": "ü"}


def test_what_is_loaded_is_what_was_saved_bit_for_bit(tmp_path):
    checkpoint.save(tmp_path / "c.safetensors", TENSORS, FACTS)
    tensors, facts = read_checkpoint(tmp_path / "c.safetensors")
    assert facts == FACTS
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)


def test_tied_and_channels_last_weights_are_saved(tmp_path):
    weight = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    checkpoint.save(tmp_path / "c.safetensors", checkpoint.copy_tensors({"a": weight, "b": weight}), {})
    tensors, _ = read_checkpoint(tmp_path / "c.safetensors")
    assert torch.equal(tensors["a"], weight) and torch.equal(tensors["b"], weight)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "c.safetensors"
    checkpoint.save(path, TENSORS, FACTS)
    return path.read_bytes()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_truncated_or_altered_file_is_refused_in_one_sentence(whole, tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    if data.draw(st.booleans(), label="truncate"):
        damaged = whole[: data.draw(st.integers(0, len(whole) - 1), label="length")]
    else:
        place = data.draw(st.integers(0, len(whole) - 1), label="place")
        flip = data.draw(st.integers(1, 255), label="flip")
        damaged = whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :]
    path.write_bytes(damaged)
    try:
        tensors, facts = read_checkpoint(path)
    except CheckpointError as error:
        assert str(path) in str(error) and "\n" not in str(error)
    else:  # only a change that leaves the content alone may pass
        assert facts == FACTS
        assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a pickle of torch.save", b"\x00" * 64, b"{}"])
def test_a_foreign_file_is_refused(tmp_path, content):
    (tmp_path / "c.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged or is no checkpoint"):
        read_checkpoint(tmp_path / "c.safetensors")


def test_no_file_and_a_safetensors_file_of_another_program_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="There is no checkpoint"):
        read_checkpoint(tmp_path / "c.safetensors")
    save_file({"weight": torch.zeros(2)}, tmp_path / "c.safetensors")
    with pytest.raises(CheckpointError, match="not a checkpoint that kerneq wrote"):
        read_checkpoint(tmp_path / "c.safetensors")


def test_a_write_that_fails_leaves_the_old_file_and_no_rubbish(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TrainingError, match="No space left on device.*before is intact"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_processes_that_write_the_same_file_do_not_disturb_each_other(tmp_path, monkeypatch):
    path, replace = tmp_path / "file", os.replace

    def meanwhile(*names):
        monkeypatch.setattr(os, "replace", replace)
        child = os.fork()
        if child == 0:
            write_atomically(path, b"theirs")
            os._exit(0)
        os.waitpid(child, 0)
        assert path.read_bytes() == b"theirs"
        replace(*names)

    monkeypatch.setattr(os, "replace", meanwhile)
    write_atomically(path, b"ours")
    assert path.read_bytes() == b"ours" and list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_after_the_last_step_is_not_lost():
    with pytest.raises(ZeroDivisionError), checkpoint.Writer() as writer:
        writer.submit([lambda: 1 / 0])
