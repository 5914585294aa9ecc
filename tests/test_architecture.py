"""The shape of the package itself: imports point one way, classes are abstract or final, nothing is swallowed."""

import ast
import functools
import pathlib
import subprocess
import sys
from collections.abc import Sequence

import pytest

import kerneq

ROOT = pathlib.Path(kerneq.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py"))
# An import may name its own layer or one further up this list; so the library never imports the laboratory.
LAYERS = [
    "tensors",
    "solution",
    "prox",
    "fused",
    "conjugate_gradient",
    "linear_maps",
    "operators",
    "kernels",
    "maps",
    "structure",
    "randomness",
    "stability",
    "equation",
    "solvers",
    "gradients",
    "cells",
    "equilibrium",
    "resolvent",
    "cuda_graphs",
    "kglm",
    "sklearn",
    "settings",
    "models",
    "certificates",
    "loading",
    "lab.console",
    "lab.plot",
    "lab.data",
    "lab.run",
    "lab.glossary",
    "lab.training",
    "lab.evaluate",
    "lab.prediction",
    "lab.report",
    "lab.verify",
    "lab.sweep",
    "lab.demo",
    "lab.explore",
    "lab.tables",
    "lab.cli",
]
LIBRARY = [name for name in LAYERS if not name.startswith("lab.")]
HAND_ON = {"cells.py", "equilibrium.py", "randomness.py"}  # hand `**named` on to the function of a user
SHARED = {"Gaussian"}  # a kernel of equations and a family of kernel GLMs: both are the field's names
ENTRANCES = {"__init__", "__main__", "cli", "lab.__init__"}  # the public names, and the program


@functools.cache
def parsed(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def layer(path: pathlib.Path) -> str:
    return layer_of(path.relative_to(ROOT).with_suffix("").parts)


def layer_of(parts: Sequence[str]) -> str:
    """The layer of a module, given the parts of its name after `kerneq`."""
    return ".".join(parts[:2]) if parts[0] == "lab" else parts[0]


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
        found |= {layer_of(name[1:]) for name in names if name[0] == "kerneq" and len(name) > 1}
    return found - {"__version__", "lab"}


def test_every_part_of_the_package_has_its_place():
    assert {layer(path) for path in FILES} - ENTRANCES <= set(LAYERS)


def test_imports_point_one_way():
    for path in FILES:
        if layer(path) not in ENTRANCES:
            above = set(LAYERS[: LAYERS.index(layer(path)) + 1])
            assert imported(path) <= above, f"{path} imports from a layer above its own"


def test_the_check_of_imports_would_notice_a_wrong_one():
    assert "solvers" in imported(ROOT / "gradients" / "implicit.py")
    assert "cells" in imported(ROOT / "equilibrium.py")
    assert LAYERS.index("solvers") < LAYERS.index("gradients") < LAYERS.index("cells")


def test_every_module_says_in_its_first_line_what_it_is_for():
    assert [str(path) for path in FILES if not ast.get_docstring(parsed(path))] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_swallowed_starred_asked_for_by_hasattr_or_left_to_do(path):
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom):
            assert all(alias.name != "*" for alias in node.names), "a star import"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            known = path.name in HAND_ON and node.args.kwarg and node.args.kwarg.arg == "named"
            assert node.args.kwarg is None or known, f"**{node.args.kwarg.arg} takes whatever it is given"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "hasattr", "hasattr"
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, "a bare except"
    assert "TODO" not in path.read_text()


def test_every_class_is_abstract_or_final():
    """A class whose base is called Abstract… is final, unless it is called so itself; no base of ours is concrete."""
    names = {node.name for path in FILES for node in parsed(path).body if isinstance(node, ast.ClassDef)}
    for path in FILES:
        for node in parsed(path).body:
            if not isinstance(node, ast.ClassDef) or node.name.startswith(("Abstract", "_")):
                continue
            bases = {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}
            decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
            if any(base.startswith("Abstract") for base in bases):
                assert "final" in decorators, f"{path}: {node.name}"
            concrete = {
                base for base in bases & names if not base.startswith("Abstract") and not base.endswith("Error")
            }
            assert not concrete, f"{path}: {node.name} inherits from {concrete}, which is no abstract class"


def test_a_name_of_a_class_means_one_thing():
    seen: dict[str, pathlib.Path] = {}
    for path in FILES:
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                assert node.name not in seen or node.name in SHARED, f"{node.name}: {seen.get(node.name)} and {path}"
                seen[node.name] = path


def test_importing_the_package_or_asking_for_help_does_not_import_torch():
    code = "import sys, kerneq; kerneq.__version__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_public_names_are_there_and_a_wrong_one_is_an_attribute_error():
    for name in kerneq.__all__:
        assert getattr(kerneq, name) is not None and name in dir(kerneq)
    with pytest.raises(AttributeError, match="no attribute 'Equilibirum'"):
        _ = kerneq.Equilibirum


def test_the_product_knows_no_path_of_the_machine_it_was_made_on():
    for path in FILES:
        text = path.read_text()
        assert "/work/" not in text and "/root/" not in text, path


def test_the_library_imports_torch_numpy_and_safetensors_only():
    """Triton is optional, scikit-learn is imported by `kerneq.sklearn` alone, and pyarrow where tables are read."""
    optional = {"sklearn.py": {"sklearn"}, "rows.py": {"pyarrow"}}
    allowed = {"torch", "numpy", "safetensors", "triton", "kerneq"} | sys.stdlib_module_names
    for path in FILES:
        if layer(path) not in LIBRARY:
            continue
        for node in ast.walk(parsed(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            outside = {name.split(".")[0] for name in names} - allowed
            assert outside <= optional.get(path.name, set()), f"{path} imports {outside}"


LIBRARY_ALONE = """
import sys

for name in ("jinja2", "matplotlib", "PIL", "rich", "scipy", "sklearn", "tensorboard", "typer"):
    sys.modules[name] = None  # to import it is a ModuleNotFoundError

import kerneq as kq, torch

cell = kq.cells.ConvCell(kq.kernels.Gaussian(), inputs=2, state=4, features=8)
kq.Equilibrium(cell)(torch.randn(2, 2, 4, 4)).value.sum().backward()
X, Y = torch.linspace(0, 1, 5), torch.ones(5)
glm = kq.kglm.KernelGLM(kq.kglm.Matern(), kq.kglm.Gaussian(), lam=1.0).fit(X, Y)
assert glm.predict(X).shape == glm.as_equilibrium()(Y[None])[0].shape
kq.models.build("geq-tiny", classes=10)
for name in ("data", "evaluate", "predict", "sklearn"):
    try:
        getattr(kq, name)
    except ModuleNotFoundError as error:
        print(error)
"""


def test_the_library_works_without_the_laboratory_whose_names_say_what_to_install():
    """The packages of `kerneq[lab]` cannot be imported here."""
    done = subprocess.run([sys.executable, "-c", LIBRARY_ALONE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    sentences = done.stdout.splitlines()
    assert len(sentences) == 4
    assert all("which needs" in line and "`pip install 'kerneq[lab]'`" in line for line in sentences[:3])
    assert sentences[3] == "`kerneq.sklearn` needs scikit-learn: install it by `pip install scikit-learn`."


@pytest.mark.parametrize("module", ["kerneq.cli", "kerneq.__main__"])
def test_the_program_without_the_laboratory_says_what_to_install(module):
    code = f"import importlib.util; from {module} import main; importlib.util.find_spec = lambda name: None; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("The program kerneq needs ") and done.stderr.count("\n") == 1


def test_completion_offers_the_public_names_of_the_package_only():
    named = {name for name in vars(kerneq) if not name.startswith("_")}
    modules = {path.stem for path in FILES} | {path.name for path in ROOT.iterdir()}  # bound by whoever imports them
    assert named <= set(dir(kerneq)) | modules and not {"Any", "importlib", "TYPE_CHECKING"} & named
