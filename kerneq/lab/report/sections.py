"""From runs to the sections of a report: a chapter for each data set, a section for each kind of evidence."""

import dataclasses
import itertools
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ..evaluate import PARTS
from ..evaluate.trained import DAMAGES
from ..training import metrics
from . import figures
from .findings import SECTIONS, Chapter, PartByRun, divide
from .page import DASH, Block, Drawing, Page, Paragraph, Section, Table, format_number
from .results import Reported, Result, list_changes, name_recipe, summarize

UNFOLDED = 2  # runs of a report whose details are not folded
LEAD = (
    "Test accuracies are of the test images; validation accuracies are of images held out of training, and as the "
    "best of all epochs they flatter a little. Device-seconds are the epochs that were trained times the median one, "
    "on all devices together. Runs are grouped by recipe and epochs, and not sorted by accuracy; a difference between "
    "two runs of one seed each may be that of their seeds."
)


def compose(runs: Sequence[Reported], results: Sequence[Result], opening: Sequence[Section], title: str) -> Page:
    """Return the page about some runs and their results: `opening`, then a chapter for each data set."""
    chapters = divide(runs, results)
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    sections = [section for chapter in chapters for section in compose_chapter(chapter, folded=len(runs) > UNFOLDED)]
    names = ", ".join(chapter.data for chapter in chapters)
    return Page(title, f"{count} on {names}. {LEAD}", [*opening, *sections])


def compare_published(results: Sequence[Result]) -> list[Section]:
    """Return the published figures of the models, each beside the result that counts; [] where there are none."""
    rows: dict[tuple[str, str], tuple[str, ...]] = {}
    for found in results:
        published = found.runs[0].published(found.split)
        if published and found.split != "validation":
            cells = (f"{published}", f"{100 * found.accuracy:.2f}", ", ".join(one.label for one in found.runs))
            rows.setdefault((found.model, found.runs[0].data), cells)
    heads = ("model", "on", "published, %", "ours, %", "runs")
    table = Table(heads, [(*key, *cells) for key, cells in rows.items()], ("on", "runs"))
    words = (
        "Ours are by the recipe of each run, the papers' own only where its name says so: a higher figure may be the "
    )
    words += "recipe's, and not the model's. One run is one seed."
    return [Section("The papers' figures", [Paragraph(words), table], chapter=True)] if rows else []


def compose_chapter(chapter: Chapter, folded: bool) -> list[Section]:
    """Return the sections on results, learning curves, each part that was measured, and the settings of the runs."""
    curves = draw_metrics(chapter)
    found = [Section(chapter.data, [], chapter=True), compose_results(chapter)]
    found += [Section("Learning curves", [curves])] if curves else []
    absent: list[tuple[str, str, str]] = []
    for part, (title, show) in SECTIONS.items():
        measured, missing = split_runs(chapter, part)
        if measured:
            blocks = show(chapter, measured)
            if missing:
                blocks = [*blocks, Paragraph(f"Not measured: {name_runs(missing)}.", format_command(part, missing))]
            found.append(Section(title, blocks, folded=folded))
        elif missing:
            absent.append((title, PARTS[part].sentence, format_command(part, missing)))
    found.append(dataclasses.replace(compose_settings(chapter), folded=folded))
    headings = ("not measured yet", "what it is", "the command that does it")
    return [*found, Section("Still to measure", [Table(headings, absent, headings)])] if absent else found


def compose_results(chapter: Chapter) -> Section:
    """Return what the runs reached, and the other metrics, as tables, and what it cost as figures."""
    reached = [found for found in chapter.results if found.split != "unknown"]
    costs = draw_costs(chapter, reached)
    return Section("Results", [*tabulate(chapter, reached), *([costs] if costs else [])])


def split_runs(chapter: Chapter, part: str) -> tuple[PartByRun, list[Reported]]:
    """Return what the runs have of a part of the evaluation, by label, and on which runs it can still be measured."""
    measured: dict[str, Mapping[str, Any]] = {}
    missing: list[Reported] = []
    for one in chapter.runs:
        table = one.run.part(part)
        if table and (part != "scores" or "calibration" in table):
            measured[one.label] = table
        elif one.weights and not PARTS[part].obstacle(one.config):  # records without weights cannot be measured
            missing.append(one)
    return measured, missing


def describe_damage(runs: Sequence[Reported], error: Exception) -> str:
    """Return which part of which runs a report failed on, and the command that measures it again."""
    damaged = {one: find_damage(one) for one in runs}
    part = next(filter(None, damaged.values()), "scores")
    some = [one for one in runs if damaged[one] == part] or runs
    return f"The part {part} of {name_runs(some)} is damaged ({error!r}): {format_command(part, some)}"


def find_damage(one: Reported) -> str:
    """Return the part of a run's evaluation that cannot be shown; empty where all can."""
    for part, (_, show) in SECTIONS.items():
        try:
            [chapter] = divide([one], summarize([one]) if part == "scores" else [])
            compose_results(chapter)
            if measured := split_runs(chapter, part)[0]:
                show(chapter, measured)
        except DAMAGES:
            return part
    return ""


def tabulate(chapter: Chapter, reached: Sequence[Result]) -> list[Block]:
    """Return the table of accuracies, a sentence on the runs that were not evaluated, the table of other metrics."""
    tested = [one for one in chapter.runs if one.accuracy() is not None]
    missing = [one for one in chapter.runs if one not in tested]
    blocks = tabulate_accuracy(chapter, reached)
    if missing:
        here = [one for one in missing if one.weights]
        gone = " (some are records only)" if here else " (without weights: records only)"
        words = f"Not evaluated on the test images: {name_runs(missing)}{gone if len(here) < len(missing) else ''}."
        blocks.append(Paragraph(words, format_command("scores", here) if here else ""))
    return [*blocks, tabulate_metrics(tested)] if tested else blocks


def tabulate_accuracy(chapter: Chapter, reached: Sequence[Result]) -> list[Block]:
    """Return a table for each recipe: a row for each run, and above several seeds of one their mean."""
    blocks: list[Block] = []
    means = {one: found for found in reached if found.std is not None for one in found.runs}
    for recipe, runs in itertools.groupby(chapter.runs, name_recipe):
        rows: list[tuple[str, ...]] = []
        told: set[Result] = set()
        for one in runs:
            if (found := means.get(one)) is not None and found not in told:
                told.add(found)
                share = f"{found.accuracy:.2%} ± {found.std:.2%}"
                size, seconds = format_number(found.parameters, ","), f"{found.seconds:.0f}"
                name = f"{found.name}, mean ± std" if found.name else "mean ± std"
                rows.append((name, found.model, f"{found.seeds} seeds", size, share, DASH, DASH, seconds))
            accuracy, interval = one.accuracy(), one.interval()
            rows.append(
                (
                    one.label,
                    one.config.model.name,
                    f"seed {one.config.seed}" if one in means else f"one seed ({one.config.seed})",
                    format_number(one.parameters, ","),
                    "not evaluated" if accuracy is None else format_number(accuracy),
                    f"{100 * interval[0]:.2f}–{interval[1]:.2%}" if interval else DASH,
                    format_number(one.validation),
                    f"{one.seconds:.0f}",
                )
            )
        heads = ("run", "model", "seeds", "parameters", "test accuracy", "95 % interval", "best validation")
        blocks += [Paragraph(f"{recipe}:"), Table((*heads, "device-seconds"), rows, ("model", "seeds"))]
    return blocks


def tabulate_metrics(runs: Sequence[Reported]) -> Table:
    """Return every metric on the test images, the accuracy on sub-classes that were not trained on, and calibration.

    Columns in which no run has a number are left out.
    """
    columns = [metric for metric in metrics.METRICS if metric.name != "accuracy"]
    extra = ("unseen sub-classes", "top-5", "Brier score", "ECE", "ECE, scaled", "temperature")
    rows = []
    for one in runs:
        found = one.evaluation
        scores = (metric.text(one.scores("test")) for metric in columns)
        top5 = found.get("classification", {}).get("test", {}).get("top5")
        before, after = found.get("calibration") or {}, found.get("scaled") or {}
        numbers = (before.get("brier"), before.get("ece"), after.get("ece"), after.get("temperature"))
        shares = format_number(one.accuracy("unknown")), format_number(top5)
        rows.append((one.label, *scores, *shares, *(format_number(value, ".4f") for value in numbers)))
    headings = ("run", *(metric.heading for metric in columns), *extra)
    kept = [i for i in range(len(headings)) if any(row[i] != DASH for row in rows)]
    return Table(tuple(headings[i] for i in kept), [tuple(row[i] for i in kept) for row in rows])


def draw_costs(chapter: Chapter, reached: Sequence[Result]) -> list[Drawing]:
    """Draw accuracy against parameters and against training time, where there are two points or more.

    One point a run or a group of seeds; on held-out images only where no two were tested, and without bars, as their
    number is not recorded.
    """
    tested = [found for found in reached if found.split == "test"]
    shown = tested if len(tested) > 1 else [found for found in reached if found.split != "test"]
    y = "test accuracy (bars: 95 %)" if shown is tested else "accuracy on held-out images"
    styles, hint = chapter.style_runs(len(shown))
    points: dict[str, list[figures.Point]] = {"parameters": [], "training time in device-seconds": []}
    for found in shown:
        style = styles[found.runs[0].label]
        if found.seeds > 1 and not hint:
            style = dataclasses.replace(style, label=f"{found.name}, mean of {found.seeds} seeds")
        for x, cost in zip(points, (found.parameters, found.seconds), strict=True):
            points[x] += [(style, cost, found.accuracy, found.interval)] if cost is not None else []
    drawings = []
    for (x, some), name in zip(points.items(), ("parameters", "seconds"), strict=True):
        if len(some) > 1:
            svg = figures.draw_points(sorted(some, key=lambda point: point[0].place), x, y)
            caption, wide = f"Accuracy against {x.partition(' in ')[0]}{hint}", len(some) > len(figures.COLOURS)
            drawings.append(Drawing(chapter.name_file(name), caption, svg, wide))
    return drawings


def draw_metrics(chapter: Chapter) -> list[Drawing]:
    """Draw each metric that has a caption epoch by epoch, a curve for each run that measured it."""
    drawings = []
    for metric in (metric for metric in metrics.METRICS if metric.caption):
        found = {one.label: [(row[metric.drawn] or {}).get(metric.name) for row in one.rows] for one in chapter.runs}
        measured = [one for one in chapter.runs if any(value is not None for value in found[one.label])]
        if measured:
            styles, hint = chapter.style_runs(len(measured))
            curves = [(styles[one.label], [row["epoch"] for row in one.rows], found[one.label]) for one in measured]
            percent = metric.format.endswith("%}")
            svg = figures.draw_curves(curves, x="epoch", y=metric.title, log=metric.log, percent=percent)
            drawings.append(Drawing(chapter.name_file(metric.name), f"{metric.caption}{hint}", svg))
    return drawings


def compose_settings(chapter: Chapter) -> Section:
    """Return the settings that repeat each run, and the machine and versions that it ran on, as a table.

    Where no experiment of the package is near, the settings are changes of the first run.
    """
    heads = ("run", "kerneq train …", "device", "processes", "PyTorch", "kerneq", "source revision", "started")
    rows, first = [], chapter.runs[0]
    for one in chapter.runs:
        settings = shlex.join(one.settings)
        settings = settings or " ".join((f"({first.label})", *map(shlex.quote, list_changes(first.config, one.config))))
        origin = one.run.environment()
        facts = [str(origin.get(key) or DASH) for key in ("device", "processes", "torch", "kerneq")]
        revision, changed, _ = str(origin.get("revision") or DASH).partition("+changes")
        rows.append((one.label, settings, *facts, revision[:10] + changed, str(origin.get("started") or DASH)))
    return Section("Settings and environment", [Table(heads, rows, heads)])


def format_command(part: str, runs: Sequence[Reported]) -> str:
    """Return the command that measures a part of some runs."""
    asked = [] if part == "scores" else ["--part", part]
    return shlex.join(["kerneq", "evaluate", *(str(one.run.path) for one in runs), *asked])


def name_runs(runs: Sequence[Reported]) -> str:
    """Return the names of some runs as a list in a sentence."""
    return ", ".join(one.label for one in runs)
