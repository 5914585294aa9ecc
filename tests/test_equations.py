"""The table of docs/equations.md: every object in it exists, and its docstring names its equations."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "equations.md"
ITEM = r"(?:\(\d+\)|(?:Prop\.|Thm\.|Cor\.|Alg\.|Ass\.|App\.|Sec\.|Lemma|Remark|Table) [\dA-Z]+(?:\.\d+)?)"
PAPERS = ("GEQ", "KerDEQ", "kGLM")


def read_rows() -> list[tuple[str, str]]:
    """Each equation with each object that implements it, as `module:name`."""
    rows = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and "`" in line:
            rows += [(cells[0], place) for place in re.findall(r"`([\w.]+:[\w.]+)`", cells[2])]
    return rows


ROWS = read_rows()


def find(place: str) -> object:
    """The object at `module:name`, where a name may be a method, `Class.method`."""
    module, _, name = place.partition(":")
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def docstring(place: str) -> str:
    """The docstring of an object and that of its module, on one line."""
    found = find(place)
    home = inspect.getmodule(found.fget if isinstance(found, property) else found)
    return " ".join(f"{found.__doc__} {home.__doc__}".split())


def names_of(text: str) -> set[str]:
    """The equations a text names: "GEQ (5), (6)" is "GEQ (5)" and "GEQ (6)"; of no paper of ours, the text itself."""
    found = {
        f"{paper} {item}"
        for paper in PAPERS
        for group in re.findall(rf"\b{paper} ({ITEM}(?:, {ITEM})*)", text)
        for item in re.findall(ITEM, group)
    }
    return found or {text}


@pytest.mark.parametrize(("equation", "place"), ROWS, ids=lambda part: part.replace(" ", "-"))
def test_the_code_of_an_equation_names_it(equation, place):
    text = docstring(place)
    named = names_of(text)
    for name in names_of(equation):
        assert name in named or re.search(rf"\b{re.escape(name)}\b", text), f"{place} does not name {name}"


def test_the_table_is_whole():
    equations = {name for equation, _ in ROWS for name in names_of(equation)}
    assert len(ROWS) > 80
    for name in ("GEQ (6)", "GEQ Prop. 4", "GEQ Sec. 4.1", "KerDEQ Thm. 3", "kGLM Thm. 3", "Geng et al., 2021"):
        assert name in equations
