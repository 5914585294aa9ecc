"""What the documentation site makes of docstrings and examples; `make docs` builds it."""

import ast
import dataclasses
import re
import textwrap
from collections.abc import Iterator

import matplotlib.pyplot as plt
import pytest
import torch

import kerneq as kq

pytest.importorskip("sphinx_gallery")

from docs import docstrings, examples  # noqa: E402  (they need Sphinx)


def test_a_docstring_keeps_its_stars_bars_and_literals():
    text = "z* is ‖z‖ for f(z, *inputs, **named), |x| and W_ of\n`a*b`s, (`c`)."
    (block,) = docstrings.convert(text)
    assert block == ("z\\* is ‖z‖ for f(z, \\*inputs, \\*\\*named), \\|x\\| and W\\_ of\n``a*b``\\ s, (\\ ``c``\\ ).")


def test_indented_blocks_are_listings_in_their_language():
    text = "Say:\n\n    s = layer(x)\n\n    s.value\n\nand\n\n    z ← f(z)\n\n>>> fit(X)"
    _, python, _, formula, prompt = docstrings.convert(text)
    assert python == ".. code-block:: python\n\n    s = layer(x)\n\n    s.value"
    assert formula.startswith(".. code-block:: text")
    assert prompt == ".. code-block:: pycon\n\n    >>> fit(X)"


def test_parameters_are_a_list():
    text = "Parameters\n----------\nlam : λ > 0, the\n    weight.\na, b : two."
    assert docstrings.convert(text) == ["**Parameters**", "- ``lam``: λ > 0, the weight.\n- ``a, b``: two."]


@dataclasses.dataclass
class Value:
    first: int = 1  # what it is
    second: dict[str, int] = dataclasses.field(default_factory=dict)
    third: float = 0.5  # λ*


def test_the_comments_of_fields_are_found():
    assert docstrings.comments_of(Value) == {"first": "what it is", "third": "λ*"}


def test_an_example_gets_a_title_and_says_how_it_was_run():
    source = '"""See it: a *state* that settles.\n\nMore of it.\n"""\n\nimport torch\n'
    assert examples.retitle(source, "other") == (
        'r"""\nSee it\n======\n\nSee it: a \\*state\\* that settles.\n\nMore of it.\n"""\n\n\nimport torch\n'
    )
    assert "``--steps 10``" in examples.retitle(source, "see_an_equilibrium")
    recorded = examples.retitle(source, "graph_chains")
    assert "image:: /showcases/graph_chains.png" in recorded and "thumbnail_path" in recorded
    assert "gallery_parallel = False" in examples.retitle(source, "two_processes")


def test_every_example_has_its_place_in_the_gallery():
    names = {file.stem for file in (examples.ROOT / "examples").glob("*.py")} - {"beside_torchdeq"}
    assert names == set(examples.ARGUMENTS) and names >= examples.RECORDED


def find_examples() -> Iterator[tuple[str, str]]:
    """The Python in the docstrings of the package: its place, and the code."""
    for file in sorted((examples.ROOT / "kerneq").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                continue
            for block in docstrings.split_blocks(ast.get_docstring(node) or ""):
                code = textwrap.dedent(block)
                language = docstrings.language_of(code) if block.startswith(("    ", ">>> ")) else "text"
                if language != "text":
                    place = f"{file.relative_to(examples.ROOT / 'kerneq')}::{getattr(node, 'name', 'module')}"
                    yield place, re.sub(r"^>>> ", "", code, flags=re.MULTILINE)


NEEDS_A_RUN = ("kglm/rows.py", "lab/data/", "lab/evaluate/", "lab/training/")  # or data that are not here


def test_the_code_of_docstrings_runs(tmp_path, monkeypatch):
    """With the names that a reader would have at hand."""
    from sklearn.model_selection import GridSearchCV

    from kerneq.kglm import Bernoulli, Custom, KernelGLM, Nystrom, Poisson, SquaredExponential
    from kerneq.sklearn import KernelGLMClassifier, KernelGLMRegressor

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = {"kq": kq, "kerneq": kq, "torch": torch, "nn": torch.nn, "plt": plt, "GridSearchCV": GridSearchCV}
    names |= {value.__name__: value for value in (Bernoulli, Custom, KernelGLM, Nystrom, Poisson, SquaredExponential)}
    names |= {value.__name__: value for value in (KernelGLMClassifier, KernelGLMRegressor)}
    linear = torch.nn.Linear(8, 8)
    cell = kq.cells.DenseCell(kq.kernels.Gaussian(), inputs=8, state=16, features=16)
    layer, x, X = kq.Equilibrium(cell).eval(), torch.randn(4, 8), torch.rand(40, 1)
    y = torch.arange(40) % 2
    known = {
        "__init__.py::module": {"x": torch.randn(2, 16, 4, 4)},
        "certificates/certificate.py::certify": {
            "model": kq.models.build("certified-tiny", channels=1).eval(),
            "x": torch.rand(2, 1, 8, 8),
        },
        "cuda_graphs.py::capture": {"model": torch.nn.Sequential(layer, kq.Value()), "x": x},
        "equilibrium.py::Equilibrium": {
            "block": lambda z, x: torch.tanh(linear(z) / 4 + x),
            "pair": lambda z, x: z,
            "before": layer(x),
            "x": x,
        },
        "equilibrium.py::fixed_point": {"linear": lambda z: linear(z) / 4, "x": x},
        "equilibrium.py::solving": {"model": layer, "x": x},
        "kglm/families.py::Custom": {},
        "kglm/glm.py::KernelGLM": {"X": X, "Y": y.float(), "X2": X[:3]},
        "kglm/lowrank.py::Nystrom": {"X": X, "counts": y.float()},
        "lab/plot.py::solve": {"layer": layer, "x": x},
        "randomness.py::FixedRandomness": {
            "block": lambda z, x: linear(z) / 4 + x,
            "f": lambda z, x: z / 2 + x,
            "z0": x,
            "x": x,
        },
        "resolvent.py::Resolvent": {"x": torch.randn(2, 8, 4, 4)},
        "sklearn.py::module": {
            "X": X.numpy(),
            "y": y.numpy(),
            "X2": X[:3].numpy(),
            "counts": y.numpy(),
            "years": 1.0 + y.numpy(),
        },
        "stability.py::jacobian_norm": {
            "f": lambda z, x: torch.tanh(linear(z) + x),
            "s": kq.fixed_point(lambda z, x: torch.tanh(linear(z) / 4 + x), torch.zeros(4, 8), x),
            "x": x,
            "loss": 0.0,
        },
    }
    run = set()
    for place, code in find_examples():
        if not place.startswith(NEEDS_A_RUN):
            code = code.replace("centres=2000", "centres=20")  # there are 40 samples here
            exec(compile(code, place, "exec"), names | known[place])
            run.add(place)
    assert run == set(known)
    plt.close("all")
