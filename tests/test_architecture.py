"""The shape of the package itself: imports point one way, files stay short, nothing is swallowed."""

import ast
import pathlib
import subprocess
import sys

import pytest

import kerneq

ROOT = pathlib.Path(kerneq.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py"))
# An import may name its own layer or one further up this list.
LAYERS = [
    "solution",
    "tensors",
    "fused",
    "prox",
    "equation",
    "spectrum",
    "operators",
    "kernels",
    "solvers",
    "gradients",
    "cells",
    "equilibrium",
    "kglm",
    "theory",
    "models",
    "data",
    "config",
    "kglm.experiments",
    "training",
    "evaluate",
    "predict",
    "report",
    "bench",
    "commands",
    "cli",
]
ENTRANCES = {"__init__", "__main__"}  # the names of the whole package, and `python -m kerneq`


def parsed(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def named(parts: list[str]) -> str:
    """The layer of a dotted name inside kerneq; the experiments and commands of kglm stand above its library."""
    special = {("kglm", "experiments"): "kglm.experiments", ("kglm", "cli"): "commands"}
    return special.get(tuple(parts[:2]), parts[0])


def layer(path: pathlib.Path) -> str:
    return named(list(path.relative_to(ROOT).with_suffix("").parts))


def imported(path: pathlib.Path) -> set[str]:
    """The layers of kerneq a file imports, wherever in the file it does."""
    package = path.relative_to(ROOT.parent).with_suffix("").parts
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [[*(node.module or "").split("."), alias.name] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: -node.level], *(node.module.split(".") if node.module else [])]
            names = [[*base, alias.name] for alias in node.names]
        else:
            continue
        found |= {named(name[1:]) for name in names if name[0] == "kerneq" and len(name) > 1}
    return found - {"__version__"}


def test_every_part_of_the_package_has_its_place():
    assert {layer(path) for path in FILES} - ENTRANCES <= set(LAYERS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    if layer(path) in ENTRANCES:
        return
    above = set(LAYERS[: LAYERS.index(layer(path)) + 1])
    assert imported(path) <= above, f"{path.name} imports from a layer above its own"


def test_the_check_of_imports_would_notice_a_wrong_one():
    assert "solvers" in imported(ROOT / "gradients" / "implicit.py")
    assert "cells" in imported(ROOT / "equilibrium.py")
    assert LAYERS.index("solvers") < LAYERS.index("gradients") < LAYERS.index("cells")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_answers_one_question_in_at_most_200_lines(path):
    assert len(path.read_text().splitlines()) <= 200
    docstring = ast.get_docstring(parsed(path))
    assert docstring, "a module says in its first line what it is for"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_swallowed_starred_asked_for_by_hasattr_or_left_to_do(path):
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom):
            assert all(alias.name != "*" for alias in node.names), "a star import"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            assert node.args.kwarg is None, f"**{node.args.kwarg.arg} takes whatever it is given"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "hasattr", "hasattr"
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, "a bare except"
    assert "TODO" not in path.read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_class_of_the_core_is_abstract_or_final(path):
    core = {"solution", "prox", "solvers", "gradients", "cells", "equilibrium", "operators"}
    if layer(path) not in core:
        return
    for node in parsed(path).body:
        if not isinstance(node, ast.ClassDef) or node.name.startswith(("Abstract", "_")):
            continue
        bases = {ast.unparse(base).split("[")[0] for base in node.bases}
        if any(base.startswith("Abstract") for base in bases):
            assert "final" in {ast.unparse(decorator) for decorator in node.decorator_list}, node.name


def test_importing_the_package_or_asking_for_help_does_not_import_torch():
    code = "import sys, kerneq; kerneq.__version__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_public_names_are_there_and_a_wrong_one_is_an_attribute_error():
    for name in (*kerneq.__all__, "cells", "gradients", "kernels", "prox", "solvers"):
        assert getattr(kerneq, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Equilibirum'"):
        _ = kerneq.Equilibirum


def test_the_product_knows_no_path_of_the_machine_it_was_made_on():
    for path in FILES:
        text = path.read_text()
        assert "/work/" not in text and "/root/" not in text, path
