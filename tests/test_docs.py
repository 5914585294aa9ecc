"""What the pages say is there: their code runs, their links lead somewhere, their tests and records exist."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
WITH_CODE = ["README.md", "docs/theory.md", "docs/certificates.md", "docs/kglm/index.md"]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", WITH_CODE)
def test_the_code_of_a_page_runs_from_its_first_block_to_its_last(page):
    torch.manual_seed(0)
    space: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), space)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_to_files_and_headings(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
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
