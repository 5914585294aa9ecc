"""The table of docs/equations.md: every object in it exists, and its docstring names its equations."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "equations.md"
PAPERS = ("GEQ", "KerDEQ", "kGLM")
WORDS = {
    "Prop.": "Propositions?",
    "Thm.": "Theorem",
    "Cor.": "Corollary",
    "Alg.": "Algorithm",
    "Ass.": "Assumption",
    "App.": "Appendix",
    "Sec.": "Section",
}


def read_rows() -> list[tuple[str, str]]:
    """Return each equation with each object that implements it, as `module:name`."""
    rows = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and "`" in line:
            rows += [(cells[0], place) for place in re.findall(r"`([\w.]+:[\w.]+)`", cells[2])]
    return rows


ROWS = read_rows()


def find(place: str) -> object:
    """Import the object at `module:name`, where a name may be a method, `Class.method`."""
    module, _, name = place.partition(":")
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def split(equation: str) -> list[str]:
    """Split "GEQ Prop. 4, (14)" into "GEQ Prop. 4" and "GEQ (14)"; another source is left as it is."""
    paper, _, items = equation.partition(" ")
    return [f"{paper} {item}" for item in items.split(", ")] if paper in PAPERS else [equation]


def equation_numbers(text: str) -> set[str]:
    """Return the numbers in "(14)", "eq. 14" and "eqs. 14, 15"."""
    lists = re.findall(r"\beqs?\. (\d+(?:(?:, | and )\d+)*)", text)
    return {*re.findall(r"\((\d+)\)", text), *(number for part in lists for number in re.findall(r"\d+", part))}


def missing(equation: str, place: str) -> list[str]:
    """Return the parts of an equation that neither the docstring at `place` nor that of its module names.

    In `kerneq.kglm` a number without the name of a paper is kGLM's, elsewhere GEQ's.
    """
    found = find(place)
    module = inspect.getmodule(found.fget if isinstance(found, property) else found)
    text = " ".join(f"{found.__doc__} {module.__doc__}".split())
    usual = "kGLM" if module.__name__.startswith("kerneq.kglm") else "GEQ"
    absent = []
    for name in split(equation):
        paper, _, item = name.partition(" ")
        if paper not in PAPERS:
            named = re.search(rf"\b{re.escape(name)}\b", text)
        elif item.startswith("("):
            named = item[1:-1] in equation_numbers(text)
        else:
            word, _, number = item.rpartition(" ")
            named = re.search(rf"\b(?:{re.escape(word)}|{WORDS.get(word, word)}) {re.escape(number)}(?![\w.]*\d)", text)
        if not named or (paper in PAPERS and paper != usual and paper not in text):
            absent.append(name)
    return absent


@pytest.mark.parametrize(("equation", "place"), ROWS, ids=lambda part: part.replace(" ", "-"))
def test_the_code_of_an_equation_names_it(equation, place):
    assert missing(equation, place) == []


def test_the_table_has_the_equations_people_look_for():
    equations = {name for equation, _ in ROWS for name in split(equation)}
    assert len(ROWS) > 80
    for name in ("GEQ (6)", "GEQ Prop. 4", "GEQ Sec. 4.1", "GEQ Alg. 1", "KerDEQ Thm. 3", "kGLM Thm. 3"):
        assert name in equations


def test_numbers_are_read_in_every_form():
    assert equation_numbers("eq. 6, (7) and eqs. 8, 9 and 10; (b, 11)") == {"6", "7", "8", "9", "10"}
    assert missing("GEQ (999)", "kerneq.kernels:Gaussian") == ["GEQ (999)"]
