"""What the documentation site makes of docstrings and examples; `make docs` builds it."""

import dataclasses

import pytest

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
