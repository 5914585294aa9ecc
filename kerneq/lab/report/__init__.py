"""Runs → one page: results beside the published figures, curves, and every kind of evidence that was measured."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from ..evaluate.trained import DAMAGES
from ..glossary import read_glossary
from ..run import TrainingError
from ..run.config import ConfigError
from ..run.files import write_json
from .page import Section, Table
from .page import write_page as write_page
from .results import Reported as Reported
from .results import gather as gather
from .results import summarize as summarize
from .sections import compare_published, describe_damage
from .sections import compose as compose


def render(folders: Sequence[Path], output: Path, title: str = "kerneq report") -> None:
    """Write the report about the runs in `folders`, searched for runs, to `output`.

    Its suffix chooses the form: .html is one file that needs nothing else, .md is Markdown with its figures in a folder
    beside it, .json are the results alone, one entry for each run or group of seeds.
    """
    if output.suffix not in (".html", ".md", ".json"):
        raise TrainingError(f"A report is .html, .md or .json by the name of its file, got {output}.")
    runs = gather(folders)
    try:
        results = summarize(runs)
        page = compose(runs, results, compare_published(results), title)
    except ConfigError:
        raise  # of the settings of a run
    except DAMAGES as error:
        raise TrainingError(describe_damage(runs, error)) from None
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingError(f"{output} could not be written: {error.strerror}.") from None
    if output.suffix == ".json":
        write_json(output, {"results": [result.row() for result in results]})
    else:
        words = Table(("word", "meaning"), [*read_glossary().items()], ("meaning",))
        glossary = Section("Words", [words], chapter=True, folded=True)
        write_page(dataclasses.replace(page, sections=[*page.sections, glossary]), output)
