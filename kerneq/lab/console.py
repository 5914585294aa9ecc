"""What commands print: sentences and tables, in which no text from outside can harm the terminal."""

import math
import re
import unicodedata

from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table
from rich.text import Text


def printable(text: str) -> str:
    """Replace what a file's name may do to a terminal: control characters, halves of characters."""
    whole = text.encode(errors="replace").decode()
    return "".join(c if c == "\n" or unicodedata.category(c) not in ("Cc", "Cf") else "\ufffd" for c in whole)


def escape_markdown(text: str) -> str:
    """Return the text as Markdown that shows it, on one line, and that holds no HTML."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", " ".join(printable(text).split()))


def plain(text: object, style: str = "") -> Text:
    """Make a cell or a title of any text: rich would read [words] in a string as styles."""
    return Text(printable(str(text)), style)


def say(sentence: str, style: str = "", stderr: bool = False) -> None:
    """Print a sentence as it is, on one line however long it is."""
    Console(stderr=stderr).print(plain(sentence, style), soft_wrap=True)


def complain(sentence: str) -> None:
    """Print a sentence to the standard error, with the name of the program before it."""
    Console(stderr=True).print(Text.assemble(("kerneq: ", "bold red"), printable(sentence)), soft_wrap=True)


def numbers(*headings: str) -> list[Column]:
    """The columns of a table that hold numbers."""
    return [Column(heading, justify="right", no_wrap=True) for heading in headings]


def show_table(table: Table) -> None:
    """Print a table; in a terminal of fewer than 80 columns its lines are broken, but no cell is cut."""
    console = Console()
    console.width = max(console.width, 80)
    console.print(table)


def about_run(folder: object, problem: str) -> str:
    """A sentence about a run, with its folder before it where it does not name it itself."""
    return problem if str(folder) in problem else f"{folder}: {problem}"


def describe_seconds(seconds: float) -> str:
    """An estimated duration in words, as precise as it can be: about 45 s, about 12 min, about 3 h 20 min."""
    if seconds < 90:
        return f"about {max(math.ceil(seconds), 1)} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours >= 48:
        return f"about {hours // 24} days"
    return f"about {hours} h {minutes} min" if hours else f"about {minutes} min"


def progress_bars() -> Progress:
    """Bars on the standard error that vanish when they are done, and are not shown where it is no terminal."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)
