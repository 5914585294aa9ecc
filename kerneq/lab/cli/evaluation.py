"""The commands about trained runs: evaluate, report and export."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, final

from typer import Argument, Option

from ..console import about_run, complain, progress_bars, say, show_table
from .arguments import Checkpoint, Device, RunFolder, RunFolders
from .errors import explain

if TYPE_CHECKING:
    from ..run import Run


def evaluate(
    folders: RunFolders,
    part: Annotated[
        list[str] | None, Option(help="Only this part, and more with another --part; a wrong name lists them.")
    ] = None,
    everything: Annotated[bool, Option("--all", help="Every part that applies; some take long.")] = False,
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
) -> None:
    """Measure trained runs on the test images; also written to RUN/evaluation.json and RUN/evaluation/."""
    from ...settings import suggestion
    from ..evaluate import PARTS
    from ..run import find_runs
    from ..run.config import ConfigError

    unknown = next((name for name in part or () if name not in PARTS), None)
    if unknown is not None:
        known = "".join(f"\n{name}: {entry.sentence}" for name, entry in PARTS.items())
        raise ConfigError(f"There is no part `{unknown}`.{suggestion(unknown, PARTS)} There are:{known}")
    names = list(dict.fromkeys(part or [name for name, entry in PARTS.items() if everything or entry.usual]))
    runs = find_runs(folders)
    failures = Failures(runs)
    for run in runs:
        with failures.of(run):
            evaluate_run(run, names, checkpoint, device, failures, asked=bool(part), everything=everything)
    if len(runs) > 1:
        compare(runs, failures)
    if failures.codes:
        sys.exit(failures.codes[0])


@final
class Failures:
    """Errors about single runs, printed at once, after which the other runs are measured all the same."""

    def __init__(self, runs: Sequence["Run"]):
        self.several = len(runs) > 1
        self.codes: list[int] = []  # what the program would end with after each error

    @contextmanager
    def of(self, run: "Run") -> Iterator[None]:
        """Run a block in which an error whose sentence is enough is collected."""
        try:
            yield
        except Exception as error:
            explained = explain(error)
            if explained is None:
                raise
            code, sentence = explained
            complain(about_run(run.path, sentence) if self.several else sentence)
            self.codes.append(code)


def evaluate_run(
    run: "Run",
    names: Sequence[str],
    checkpoint: str,
    device: str,
    failures: Failures,
    *,
    asked: bool,
    everything: bool,
) -> None:
    """Measure, print and write some parts of one run.

    A part that does not apply to this run is an error if it was `asked` for by name, and a sentence among `everything`.
    """
    from ..evaluate import PARTS, NotApplicableError, TrainedRun, measure_part
    from ..run import SHIPPED
    from ..tables import summary_table

    progress = progress_bars()
    trained = TrainedRun.open(run.path, checkpoint, device, progress=progress)
    for name in names:
        try:
            with progress:
                measured = measure_part(trained, name, PARTS[name])
        except NotApplicableError as error:
            if asked:
                raise
            if everything:
                say(f"{run.path}, {name}: {error}")
            continue
        say(f"{run.path}: {PARTS[name].sentence}", "bold")
        show_table(summary_table(measured.evidence.summary()))
        if run.path.resolve().parent == SHIPPED.resolve():
            say("Not written: these weights are part of the installation.")
            continue
        with failures.of(run):  # the results were printed, even if they cannot be written
            say(f"Written to {', '.join(str(run.path / file) for file in measured.write())}")


def compare(runs: "Sequence[Run]", failures: Failures) -> None:
    """Print the metrics of the runs side by side, and below them the means over seeds."""
    from ..tables import comparison_table, describe_seeds

    whole = []
    for run in runs:
        with failures.of(run):  # where evaluation.json is damaged, the others are compared
            run.test()
            whole.append(run)
    if whole:
        show_table(comparison_table(whole))
        for sentence in describe_seeds(whole):
            say(sentence)


def report(
    folders: RunFolders,
    output: Annotated[
        Path, Option(help="One .html file, .md with its figures beside it, or .json: the results alone.")
    ] = Path("report.html"),
    title: Annotated[str, Option(help="The title of the page.")] = "kerneq report",
) -> None:
    """Write one self-contained page about some runs: results beside the papers', curves, and all that was measured."""
    from ..report import render

    render(folders, output, title)
    say(f"Written to {output}")


def export(
    run: RunFolder,
    folder: Annotated[Path, Argument(help="The folder to write.", metavar="FOLDER")],
    checkpoint: Checkpoint = "best",
) -> None:
    """Write a small copy of a trained run to hand on: weights in half precision, records, and a model card."""
    from ..evaluate import export as export_run

    written = export_run(run, folder, checkpoint)
    say(f"Written to {folder}; its card is {written.path / 'README.md'}")
