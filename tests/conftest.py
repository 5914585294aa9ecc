"""What tests of several folders share: threads, dtypes, and the program as one calls it."""

import gc
import sys
from pathlib import Path

import pytest
import torch

from kerneq.cli import main


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Small models are fastest on one thread, and the tests share the machine."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def frozen_modules():
    """What the imports made stays: the garbage collector need not look at those million objects again and again."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    """In an empty folder, without the data of this machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERNEQ_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(scope="module")
def float64():
    """Mathematics is checked in float64; asked for by module, because other folders run in float32."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(dtype)


@pytest.fixture
def kerneq(monkeypatch, capsys):
    """Call the program; returns (exit code, standard output, standard error)."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kerneq", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
            raise SystemExit(0)
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return call
