"""Three trained runs, and the program as one calls it."""

import sys
from pathlib import Path

import pytest
from evaluate_helpers import trained

from kerneq.cli import main


@pytest.fixture(autouse=True, scope="module")
def every_test_here(one_thread):
    """On one thread."""


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Three runs of an epoch on the embedded digits: two that differ in their seed, and one on five classes."""
    folder = tmp_path_factory.mktemp("evaluated") / "runs"
    for seed in (0, 1):
        trained(folder / "seeds" / f"dense-{seed}", "model.name=geq-dense-tiny", f"seed={seed}")
    trained(folder / "five", "model.name=geq-tiny", "data.subset=first-five-classes", "data.validation=0")
    return folder


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
