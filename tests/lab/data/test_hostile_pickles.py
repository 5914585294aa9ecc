"""A hostile pickle runs nothing and takes no memory."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from data_files import python2_pickle

from kerneq.lab.data import DataError
from kerneq.lab.data.readers import parse_cifar_python


def parse(content):
    return list(parse_cifar_python([(Path("f"), content)], (3, 32, 32), "labels"))


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
        with pytest.raises(DataError, match="a CIFAR file"):
            parse(pickle.dumps(evil, protocol))
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
def test_hand_made_hostile_pickles_are_refused(content):
    with pytest.raises(DataError):
        parse(content)


def test_a_huge_memo_index_or_length_takes_no_memory():
    for content in (
        b"\x80\x02}r\xff\xff\xff\xff.",
        b"\x80\x02}(T\xff\xff\xff\x7fabc",
        python2_pickle(np.zeros((1, 3072)), [0]).replace(
            b"K\x01J\x00\x0c\x00\x00", b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f"
        ),
    ):
        try:
            [(_, pixels, labels)] = parse(content)
        except DataError:
            continue
        assert pixels.nbytes == 3072 and labels.tolist() == [0]
