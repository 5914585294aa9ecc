"""What the pages say is there: their code runs, their links lead somewhere, their tests and records exist."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from types import ModuleType

import matplotlib.pyplot
import pytest
import torch
import typer

import kerneq
from kerneq.lab.cli.app import app
from kerneq.lab.run import Run

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
WITH_CODE = [page for page in PAGES if "```python\n" in page.read_text(encoding="utf-8")]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", WITH_CODE, ids=named)
def test_the_code_of_a_page_runs_from_its_first_block_to_its_last(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    space: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, named(page), "exec"), space)
    matplotlib.pyplot.close("all")


def test_the_commands_of_the_pages_exist_with_their_options():
    program, checked = typer.main.get_command(app), 0
    for page in PAGES:
        for line in re.findall(
            r"^(?:\$ |    )(?:torchrun .* -m )?kerneq (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE
        ):
            name, *arguments = shlex.split(line, comments=True)
            if name.startswith("-"):
                continue
            command = program.commands[name]
            known = {option for parameter in command.params for option in parameter.opts}
            wanted = {word for word in arguments if word.startswith("--")}
            assert wanted <= known, f"{named(page)}: kerneq {line}"
            checked += 1
    assert checked > 20


def test_words_are_spelt_as_a_list_of_common_mistakes_has_them():
    pytest.importorskip("codespell_lib")
    places = [*ROOT.glob("*.md"), *(ROOT / name for name in ("docs", "kerneq", "examples", "benchmarks", "records"))]
    found = subprocess.run([sys.executable, "-m", "codespell_lib", *places], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_every_public_name_is_in_the_reference():
    pages = [page.read_text(encoding="utf-8") for page in ROOT.glob("docs/reference/*.md")]
    text = "\n".join(pages)
    for name in kerneq.__all__:
        value = getattr(kerneq, name)
        if isinstance(value, ModuleType):
            assert f".. automodule:: {value.__name__}\n   :members:" in text, name
        else:
            assert re.search(rf"^\.\. auto\w+:: {name}$", text, re.MULTILINE), name


def test_every_public_name_is_in_an_example_of_the_reference():
    pages = [page.read_text(encoding="utf-8") for page in ROOT.glob("docs/reference/*.md")]
    code = "\n".join(block for page in pages for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    for name in kerneq.__all__:
        value = getattr(kerneq, name)
        module = isinstance(value, ModuleType)
        for part in getattr(value, "__all__", dir(value)) if module else [name]:
            if module and (part.startswith("_") or isinstance(getattr(value, part), ModuleType)):
                continue
            assert part == "Output" or re.search(rf"\b{part}\b", code), f"{name}.{part}"  # a type of two words


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_to_files_and_headings(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if target.parent.name == "gallery":  # made by `make docs` from the examples
            target = ROOT / "examples" / (target.with_suffix(".py").name if target.stem != "index" else "README.rst")
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_tests_that_are_named_exist():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    found = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len([name for _, name in found if name]) > 20
    for path, name in found:
        tests = (ROOT / path).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in tests, f"{path}::{name}"


def test_every_record_that_the_recipe_names_is_here_and_every_record_is_named():
    page = (ROOT / "docs/recipe.md").read_text(encoding="utf-8")
    records = {path.stem for path in ROOT.glob("docs/recipe/**/*.jsonl")}
    records |= {path.name for path in ROOT.glob("docs/results/*") if path.is_dir()}
    records |= {path.name for path in ROOT.glob("kerneq/weights/*")}
    last = [row.rstrip("| ").rsplit("|", 1)[-1] for row in page.splitlines() if row.startswith("|")]
    for name in (name for cell in last for name in re.findall(r"`([\w./-]+)`", cell)):
        assert Path(name).name in records, name
    unnamed = {name for name in records if f"{name}`" not in page}
    assert unnamed <= {"geq-certified-cifar10"}, "docs/certificates.md has that one"


def epochs_of(name: str) -> tuple[list[dict], float | None]:
    """The epochs of a record that the recipe names, and its accuracy on the test images."""
    if (ROOT / name).with_suffix(".jsonl").exists() or (ROOT / f"docs/recipe/{name}.jsonl").exists():
        file = next(ROOT.glob(f"docs/recipe/**/{Path(name).name}.jsonl"))
        return [json.loads(line) for line in file.read_text().splitlines()], None
    run = Run(next(path for path in (ROOT / name, ROOT / "docs/results" / name) if path.is_dir()))
    return run.rows(), run.test().get("accuracy")


def test_the_tables_of_the_recipe_have_the_numbers_of_their_records():
    def agree(cell: str, value: float) -> bool:
        """Whether the first number of a cell is this value, in the digits it has; what is in words is not compared."""
        found = re.match(r"[*~]*(\d+)(?:\.(\d+))?", cell)
        return not found or abs(float(found[0].strip("*~")) - value) <= 0.5001 * 10 ** -len(found[2] or "")

    compared, heads = 0, list[str]()
    for line in (ROOT / "docs/recipe.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        heads = heads if cells and heads else [cell.strip("*") for cell in cells]
        names = re.findall(r"`([\w./-]+)`", cells[-1]) if heads and heads[-1] == "record" else []
        if not names:
            continue
        records = [epochs_of(name) for name in names]
        first = records[0][0]
        held_out = [row["validation"]["accuracy"] for row in first if row["validation"]]
        seconds = fmean(median(row["seconds"] for row in rows) for rows, _ in records)
        values = {"epochs": len(first), "seconds": len(first) * seconds}
        values |= {head: seconds for head in heads if head.startswith("s/epoch")}
        values |= {"validation": 100 * held_out[-1]} if held_out else {}
        tested = [accuracy for _, accuracy in records if accuracy is not None]
        values |= {"test": 100 * fmean(tested)} if tested else {}
        for head, cell in zip(heads, cells, strict=True):
            if head in values:
                assert agree(cell, values[head]), f"{names}: {head} is {values[head]}, not {cell}"
                compared += 1
    assert compared > 80


def shares(record: object) -> Iterator[float]:
    """Every number from 0 to 1 in a record, in percent."""
    if isinstance(record, dict | list):
        for part in record.values() if isinstance(record, dict) else record:
            yield from shares(part)
    elif isinstance(record, float) and 0 <= record <= 1:
        yield 100 * record


def test_accuracies_over_seeds_in_the_recipe_are_those_of_their_sweeps():
    compared = 0
    for section in (ROOT / "docs/recipe.md").read_text(encoding="utf-8").split("\n### "):
        files = [ROOT / name for name in re.findall(r"`(docs/recipe/[\w-]+\.json)`", section)]
        known = {share for file in files for share in shares(json.loads(file.read_text()))}
        for cell in re.findall(r"\| *(\d\d\.\d(?:, \d\d\.\d)+) %", section):
            for share in map(float, cell.split(", ")):
                found = any(abs(share - value) <= 0.0501 for value in known)
                assert found, f"{share} of {cell} % is in none of {[file.name for file in files]}"
                compared += 1
    assert compared > 40


def test_every_figure_of_the_results_is_shown():
    for folder in (ROOT / "docs/results-pages").rglob("*-figures"):
        page = folder.with_name(f"{folder.name.removesuffix('-figures')}.md").read_text(encoding="utf-8")
        assert [file.name for file in folder.iterdir() if file.name not in page] == [], folder
