"""Docstrings for Sphinx, which reads reStructuredText: ours are plain text with indented blocks and formulas."""

import ast
import dataclasses
import inspect
import re
import textwrap
from typing import Any

from sphinx.application import Sphinx


def process(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Rewrite a docstring in place, and list the fields of a dataclass with their comments."""
    blocks = convert("\n".join(lines))
    if what == "class" and dataclasses.is_dataclass(obj):
        blocks.append("\n".join(f"- ``{field}``: {escape(said)}" for field, said in comments_of(obj).items()))
    lines[:] = "\n\n".join(blocks).split("\n") + [""]


def convert(text: str) -> list[str]:
    """Return the blocks of a plain text as those of reStructuredText."""
    return [block for part in split_blocks(text) for block in convert_block(part)]


def split_blocks(text: str) -> list[str]:
    """Return paragraphs and indented blocks; an indented block keeps the blank lines within it."""
    blocks: list[str] = []
    for paragraph in re.split(r"\n[ ]*\n", text.expandtabs().strip("\n")):
        if blocks and all(part.startswith("    ") for part in (blocks[-1], paragraph)):
            blocks[-1] += f"\n\n{paragraph}"
        elif paragraph.strip():
            blocks.append(paragraph)
    return blocks


def convert_block(block: str) -> list[str]:
    """Return an indented block as a listing, any other as text in which no character is special but the backtick."""
    if block.startswith(("    ", ">>> ")):
        code = textwrap.dedent(block)
        return [f".. code-block:: {language_of(code)}\n\n" + textwrap.indent(code, "    ")]
    lines = textwrap.dedent(block).split("\n")
    if lines[0] == "Parameters":  # as scikit-learn writes them; below is a line of dashes
        entries = re.split(r"\n(?!    )", "\n".join(lines[2:]))
        named = [re.sub(r"\s+", " ", entry).partition(" : ") for entry in entries]
        return ["**Parameters**", "\n".join(f"- ``{name}``: {escape(text)}" for name, _, text in named)]
    return [escape("\n".join(lines))]


def language_of(code: str) -> str:
    """Return the language of a listing: Python, Python with prompts, or text for formulas and commands."""
    if code.startswith(">>> "):
        return "pycon"
    try:
        ast.parse(code)
    except SyntaxError:
        return "text"
    return "python"


def escape(text: str) -> str:
    """Return text in which `code` is a literal and nothing else is markup."""
    parts = re.split(r"`([^`]+)`", text)
    plain = [re.sub(r"([*|\\`]|_(?!\w))", r"\\\1", part) for part in parts[::2]]
    literals = [f"``{' '.join(part.split())}``" for part in parts[1::2]]
    joined = plain[0]
    for literal, after in zip(literals, plain[1:], strict=True):
        joined += "\\ " * (joined[-1:] not in ("", " ", "\n")) + literal
        joined += "\\ " * (after[:1] not in ("", " ", "\n")) + after
    return joined


def comments_of(cls: type) -> dict[str, str]:
    """Return the fields of a dataclass that have a comment at the end of their line."""
    source = inspect.getsource(cls)
    found = re.findall(r"^    (\w+): [^#\n]*?  # (.*)$", source, re.MULTILINE)
    fields = {field.name for field in dataclasses.fields(cls)}
    return {name: comment for name, comment in found if name in fields}
