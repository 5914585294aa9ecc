"""What a report is made of, and its two forms: one HTML file that needs nothing else, or Markdown and its figures."""

import base64
import collections
import dataclasses
import importlib.resources
from collections.abc import Sequence
from pathlib import Path
from typing import final
from urllib.parse import quote

from jinja2 import Environment

from ..console import escape_markdown, printable
from ..run import write_atomically

DASH = "–"  # in the cell of a table for which there is no number


@final
@dataclasses.dataclass(frozen=True)
class Paragraph:
    """A sentence, and the command it speaks of."""

    text: str
    command: str = ""


@final
@dataclasses.dataclass(frozen=True)
class Table:
    """Headings and rows of cells; the first column, and those named in `words`, stand to the left."""

    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    words: tuple[str, ...] = ()

    def left(self, heading: str) -> bool:
        """Return whether a column stands to the left."""
        return heading in (self.headings[0], *self.words)


@final
@dataclasses.dataclass(frozen=True)
class Drawing:
    """An SVG drawing, or a PNG picture."""

    name: str  # of its file, without the suffix; other drawings may have the same
    caption: str
    data: bytes
    wide: bool = False  # whether it wants a row for itself

    @property
    def suffix(self) -> str:
        return "png" if self.data.startswith(b"\x89PNG") else "svg"

    @property
    def address(self) -> str:
        """The picture itself as an address."""
        kind = "image/png" if self.suffix == "png" else "image/svg+xml"
        return f"data:{kind};base64,{base64.b64encode(self.data).decode()}"


Block = Paragraph | Table | list[Drawing]


@final
@dataclasses.dataclass(frozen=True)
class Section:
    """A heading and what stands below it; a chapter has sections."""

    title: str
    blocks: list[Block]
    chapter: bool = False
    folded: bool = False  # in HTML it is opened by a click


@final
@dataclasses.dataclass(frozen=True)
class Page:
    """A report."""

    title: str
    lead: str
    sections: list[Section]

    def files(self) -> dict[Drawing, str]:
        """Return all pictures, in their order, with the names of their files; a second one of a name has ~2 in it."""
        lists = [block for section in self.sections for block in section.blocks if isinstance(block, list)]
        found: dict[Drawing, str] = {}
        count: collections.Counter[str] = collections.Counter()
        for drawing in (drawing for drawings in lists for drawing in drawings):
            count[drawing.name] += 1
            again = f"~{count[drawing.name]}" if count[drawing.name] > 1 else ""
            found[drawing] = f"{drawing.name}{again}.{drawing.suffix}"
        return found


def format_number(value: float | None, form: str = ".2%") -> str:
    """Return a number, by default a share, in the cell of a table; a dash where there is none."""
    return f"{value:{form}}" if value is not None else DASH


def write_page(page: Page, output: Path) -> None:
    """Write a page as Markdown (.md; the figures into the folder STEM-figures beside it) or HTML (any other name).

    Whatever a run is called, its name stays text.
    """
    markdown, folder = output.suffix == ".md", output.with_name(f"{output.stem}-figures")
    files = {drawing: folder / name for drawing, name in page.files().items()} if markdown else {}
    for drawing, file in files.items():
        write_atomically(file, drawing.data)
    environment = Environment(autoescape=not markdown, trim_blocks=True, lstrip_blocks=True, finalize=_without_codes)
    # In Markdown a space or a bracket would end an address; and a folder's name may be no text.
    environment.filters["address"] = lambda file: quote(f"{folder.name}/{file.name}", errors="surrogateescape")
    environment.filters["text"] = lambda value: escape_markdown(str(value))  # a crafted record may hold anything
    source = importlib.resources.files(__package__).joinpath("page.md" if markdown else "page.html")
    text = environment.from_string(source.read_text(encoding="utf-8")).render(page=page, files=files)
    write_atomically(output, text.encode(errors="replace"))


def _without_codes(value: object) -> object:
    """Return what is written of a value: of a text, no character that acts on a terminal or turns the text around."""
    return printable(value) if type(value) is str else value
