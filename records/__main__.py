"""Write docs/results.md, docs/results-pages, and the accuracies of `kerneq models`, from the runs' records."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kerneq.lab.report import compose, gather, summarize, write_page
from kerneq.lab.report.findings import divide
from kerneq.lab.report.results import Result
from kerneq.lab.run import TrainingError
from kerneq.lab.run.files import write_json
from kerneq.models import Measured, task

from .evidence import group_by_task
from .noise import pool_churn
from .pages import has_page, name_page, write_attribution, write_data_set, write_summary

FOLDERS = (Path("docs/results"), Path("kerneq/weights"))
PAGE = Path("docs/results.md")
ACCURACIES = Path("kerneq/models/results.json")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the tool; what goes wrong for a reason the user can act on ends in one sentence."""
    parser = argparse.ArgumentParser(prog="records", description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, default=FOLDERS, help="searched for runs and their records")
    parser.add_argument("--page", type=Path, default=PAGE, help=f"the page; the others go to STEM-pages ({PAGE})")
    parser.add_argument("--accuracies", type=Path, default=ACCURACIES, help=f"for `kerneq models` ({ACCURACIES})")
    options = parser.parse_args(arguments)
    try:
        write_results(options.folders, options.page, options.accuracies)
    except (TrainingError, OSError) as error:
        sys.exit(f"records: {error}")
    print(f"Written to {options.page} and {options.accuracies}.")


def write_results(folders: Sequence[Path], page: Path, accuracies: Path) -> None:
    """Write all pages and the accuracies about the runs in `folders`."""
    runs, folder = gather(folders), page.with_name(f"{page.stem}-pages")
    results = summarize(runs)
    tasks, churn = group_by_task(results), pool_churn(results)
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    page.write_text(write_summary(tasks, churn, runs, folder.name), encoding="utf-8")
    by_path = {one.run.path.as_posix(): one for one in runs}
    (folder / "attribution.md").write_text(write_attribution(tasks, results, churn, by_path), encoding="utf-8")
    for chapter in divide(runs, results):
        write_data_set(chapter, folder / f"{name_page(chapter.data)}.md")
    for one in filter(has_page, runs):
        write_page(compose([one], summarize([one]), [], one.label), folder / "runs" / f"{one.label}.md")
    write_json(accuracies, select_accuracies(results))


def select_accuracies(results: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """Return the fields of `Measured` by model and task: of several results the one that counts, which is the first."""
    found: dict[str, dict[str, Any]] = {}
    for result in results:
        if result.split != "validation":
            row = result.row()
            numbers = {field.name: row[field.name] for field in dataclasses.fields(Measured)}
            found.setdefault(result.model, {}).setdefault(task(result.data, result.subset, result.split), numbers)
    return found


if __name__ == "__main__":
    main()
