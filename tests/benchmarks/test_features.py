"""The table of what libraries can do: kerneq's column, and torchdeq's where it is installed, hold in a run."""

import importlib.util
import json
import subprocess

import pytest

from benchmarks.__main__ import FEATURES, OWN, RECORDS
from benchmarks.features.judge import Cell
from benchmarks.features.table import LIBRARIES, ROWS, SIGNS, fill_table, find_clone, look_up, make_page, try_cell
from benchmarks.gradients import make_table

RECORD = json.loads((RECORDS / "features-cpu.json").read_text(encoding="utf-8"))
ANSWERS = {(cell["row"], cell["library"]): cell["answer"] for cell in RECORD["results"][0]["rows"]}
ELSEWHERE = (
    "captured",
    "tests",
    "last_commit",
    "ddp",
    "compiled",
)  # tried by no check, or by slower tests of their own


def test_the_record_has_every_cell_and_the_page_is_made_from_it():
    assert set(ANSWERS) == {(row, library) for row in ROWS for library in LIBRARIES}
    assert set(ANSWERS.values()) <= set(SIGNS)
    assert FEATURES.read_text(encoding="utf-8") == make_page(RECORD)


def test_the_table_of_gradients_is_made_from_its_record():
    assert make_table(RECORDS / "gradients-cpu.json") in OWN.read_text(encoding="utf-8")


@pytest.mark.parametrize("library", ["kerneq", "torchdeq"])
@pytest.mark.parametrize("row", [row for row in ROWS if row not in ELSEWHERE])
def test_a_cell_is_what_a_run_finds(library, row):
    package, _, module, _ = LIBRARIES[library]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{library} is not installed")
    cell = try_cell(module, row)
    assert cell.answer == ANSWERS[row, library], cell.found


def test_what_is_not_installed_or_not_given_is_not_run(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = fill_table(tmp_path, lambda doing: None)
    said = {(cell["row"], cell["library"]): cell["answer"] for cell in result.rows}
    assert {said[row, "deepinv"] for row in ROWS} == {"not run"}
    assert result.asked == {"versions": {}}


def test_a_repository_is_counted(tmp_path):
    clone = tmp_path / "peer"
    clone.mkdir()
    (clone / "test_a.py").write_text("def test_one(): ...\n\n\nclass Test:\n    def test_two(self): ...\n")
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "a"]):
        subprocess.run(["git", *command], cwd=clone, check=True)
    assert find_clone(tmp_path, "someone/peer") == clone and find_clone(tmp_path, "someone/else") is None
    assert look_up(clone, "tests") == Cell("yes", "2 functions `test_…`")
    assert look_up(clone, "last_commit").answer == "yes"
