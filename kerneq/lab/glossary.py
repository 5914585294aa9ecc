"""What the words mean that commands and reports print: one table, glossary.toml, for `kerneq explain` and the docs."""

import importlib.resources
import tomllib

from ..settings import suggestion
from .run.config import ConfigError


def read_glossary() -> dict[str, str]:
    """The terms, each with what it means; a term may be several names, with commas between them."""
    text = importlib.resources.files(__package__).joinpath("glossary.toml").read_text(encoding="utf-8")
    return {names: str(meaning) for names, meaning in tomllib.loads(text).items()}


def find_term(word: str) -> tuple[str, str]:
    """The names and the meaning of the term of this name, however its letters and spaces are written."""
    glossary = read_glossary()
    found = {_as_key(name): names for names in glossary for name in names.split(",")}
    if _as_key(word) not in found:
        raise ConfigError(
            f"No word `{word}` is explained.{suggestion(_as_key(word), found)} kerneq explain lists them."
        )
    names = found[_as_key(word)]
    return names, glossary[names]


def _as_key(name: str) -> str:
    """A name without the differences that users need not know."""
    return name.strip().lower().replace("_", " ").replace("-", " ")


def write_markdown() -> str:
    """The glossary as a page of the docs."""
    bar = r"\|"  # as it is written in a table
    rows = (f"| {names} | {meaning.replace('|', bar)} |\n" for names, meaning in read_glossary().items())
    head = "Written by `kerneq explain --markdown`; one of them by `kerneq explain NAME`."
    return f"# Glossary\n\n{head}\n\n| word | meaning |\n|---|---|\n{''.join(rows)}"
