"""From runs to the sections of a report: a chapter for each data set, a section for each kind of evidence."""

import dataclasses
import shlex
from collections.abc import Sequence

from ...gradients import Unrolled
from ...kernels import AbstractRadialKernel, Linear
from ...models import KernelConfig, ResNetConfig
from ..evaluate import PARTS
from ..run import TrainingError
from ..training import metrics
from . import figures
from .findings import SECTIONS, Chapter
from .page import DASH, Block, Drawing, Page, Paragraph, Section, Table, number
from .published import NOISE, compare
from .results import Reported, Result, changes, results

HINT = "; filled or thick: the runs of a model that count"
DAMAGES = (KeyError, TypeError, ValueError, IndexError, AttributeError)  # what a damaged record may end in


def compose(runs: Sequence[Reported], title: str) -> Page:
    """The page about some runs: first beside what is published, then a chapter for each data set."""
    chapters: dict[str, list[Reported]] = {}
    for one in sorted(runs, key=lambda one: one.data):
        chapters.setdefault(one.data, []).append(one)
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    lead = f"{count} on {', '.join(chapters)}. Test accuracies are of the test images; "
    lead += (
        "validation accuracies are of images held out of training, and as the best of all epochs they flatter a "
        "little. Device-seconds are the epochs that were trained times the median one, on all devices together."
    )
    reached = results(runs)
    sections = compare(reached)
    for data, some in chapters.items():
        own = (found for found in reached if found.runs[0].data == data)
        sections += sections_of(Chapter(tuple(some), tuple(own)))
    return Page(title, lead, sections)


def sections_of(chapter: Chapter) -> list[Section]:
    """Results and learning curves, a section for each part that was measured, and where the runs come from."""
    reached = [found for found in chapter.results if found.split != "unknown"]
    costs, curves = draw_costs(chapter, reached), draw_metrics(chapter)
    found = [
        Section(chapter.runs[0].data, [], chapter=True),
        Section("Results", [*tabulate(chapter, reached), *([costs] if costs else [])]),
        *([Section("Learning curves", [curves])] if curves else []),
    ]
    absent: list[tuple[str, str, str]] = []
    for part, (title, blocks) in SECTIONS.items():
        tables = [(one.label, one.run.part(part)) for one in chapter.runs]
        measured = {k: table for k, table in tables if table and (part != "scores" or "calibration" in table)}
        runs = [one for one in chapter.runs if one.label not in measured and applies(part, one)]
        missing = [one for one in runs if one.weights]  # of records without weights there is nothing to measure
        if measured:
            try:
                shown = blocks(chapter, measured)
            except DAMAGES as error:
                some = [one for one in chapter.runs if one.label in measured]
                guilty = [one for one in some if _fails(chapter, one, part)] or some
                names, again = ", ".join(one.label for one in guilty), command(part, guilty)
                raise TrainingError(f"The part {part} of {names} is damaged ({error!r}): {again}") from None
            if missing:
                words = f"Not measured: {', '.join(one.label for one in missing)}."
                shown.append(Paragraph(words, command(part, missing)))
            found.append(Section(title, shown))
        elif missing:
            absent.append((title, PARTS[part].sentence, command(part, missing)))
    found.append(Section("Settings and environment", [origins(chapter)]))
    if absent:
        headings = ("not measured yet", "what it is", "the command that does it")
        found.append(Section("Still to measure", [Table(headings, absent, headings)]))
    return found


def _fails(chapter: Chapter, one: Reported, part: str) -> bool:
    """Whether a part of a run, by itself, cannot be shown."""
    try:
        SECTIONS[part][1](chapter, {one.label: one.run.part(part)})
    except DAMAGES:
        return True
    return False


def tabulate(chapter: Chapter, reached: Sequence[Result]) -> list[Block]:
    """The accuracy of each run and over the seeds, what was not evaluated, and the other metrics on test images."""
    heads = ("run", "model", "seed", "parameters", "test accuracy", "95 % interval")
    groups = [found for found in reached if found.std is not None]
    alone = {one for found in reached if found.std is None for one in found.runs}
    rows: list[tuple[float, bool, tuple[str, ...]]] = []  # accuracy, whether a seed among others, cells
    for found in groups:
        name, size = f"{found.runs[0].label}, mean ± std", number(found.parameters, ",")
        text = (f"{found.accuracy:.2%} ± {found.std:.2%}", DASH, DASH, f"{found.epochs}", f"{found.seconds:.0f}")
        rows.append((found.accuracy, False, (name, found.model, f"{found.seeds} seeds", size, *text)))
    for one in chapter.runs:
        numbers = (
            number(one.parameters, ","),
            number(one.test) if one.test is not None else "not evaluated",
            f"{100 * interval[0]:.2f}–{interval[1]:.2%}" if (interval := one.interval()) else DASH,
            number(one.validation),
            one.epochs,
            f"{one.seconds:.0f}",
        )
        cells = (one.label, one.config.model.name, f"{one.config.seed}", *numbers)
        rows.append((-1.0 if one.test is None else one.test, one not in alone, cells))
    rows.sort(key=lambda row: row[0], reverse=True)
    best = next((place for place, (accuracy, seed, _) in enumerate(rows) if accuracy >= 0 and not seed), None)
    columns = (*heads, "best validation", "epochs", "device-seconds")
    blocks: list[Block] = [Table(columns, [cells for *_, cells in rows], ("model",), best)]
    missing = [one for one in chapter.runs if one.test is None]
    if missing:
        here = [one for one in missing if one.weights]
        gone = " (some are records only)" if here else " (without weights: records only)"
        words = ", ".join(one.label for one in missing) + (gone if len(here) < len(missing) else "")
        asked = command("scores", here) if here else ""
        blocks.append(Paragraph(f"Not evaluated on the test images: {words}.", asked))
    details = detail(chapter)
    return [*blocks, details] if details.rows else blocks


def detail(chapter: Chapter) -> Table:
    """Every metric on the test images, the accuracy on sub-classes that were not trained on, and calibration."""
    columns = [metric for metric in metrics.METRICS if metric.name != "accuracy"]
    extra = ("unseen sub-classes", "top-5", "Brier score", "ECE", "ECE, scaled", "temperature")
    rows = []
    for one in (one for one in chapter.runs if one.test is not None):
        found = one.evaluation
        top5 = found.get("classification", {}).get("test", {}).get("top5")
        before, after = found.get("calibration") or {}, found.get("scaled") or {}
        numbers = (before.get("brier"), before.get("ece"), after.get("ece"), after.get("temperature"))
        scores = (metric.text(one.scores("test")) for metric in columns)
        unseen = one.scores("unknown").get("accuracy")
        rows.append((one.label, *scores, number(unseen), number(top5), *(number(value, ".4f") for value in numbers)))
    return without_empty(Table(("run", *(metric.heading for metric in columns), *extra), rows))


def draw_costs(chapter: Chapter, reached: Sequence[Result]) -> list[Drawing]:
    """Accuracy against parameters and against training time, where there is something to compare.

    One point a run or a group of seeds; on held-out images only where no two were tested, and without bars, as their
    number is not recorded.
    """
    tested = [found for found in reached if found.split == "test"]
    shown = tested if len(tested) > 1 else [found for found in reached if found.split != "test"]
    drawings, y = [], "test accuracy (bars: 95 %)" if shown is tested else "accuracy on held-out images"
    styles = chapter.told_apart(len(shown))
    hint = HINT if styles is chapter.model_styles else ""
    for name, words in (("parameters", "parameters"), ("seconds", "training time in device-seconds")):
        points: list[figures.Point] = []
        for found in shown:
            style, across = styles[found.runs[0].label], found.parameters if name == "parameters" else found.seconds
            if found.seeds > 1 and not hint:
                style = dataclasses.replace(style, label=f"{style.label}, mean of {found.seeds} seeds")
            noise = NOISE * found.variance**0.5
            seeds = (found.accuracy - noise, found.accuracy + noise) if found.images else None
            bar = found.runs[0].interval(found.split) if found.std is None else seeds
            points += [(style, across, found.accuracy, bar)] if across is not None else []
        if len(points) > 1:
            title, wide = f"Accuracy against {words.partition(' in ')[0]}{hint}", len(points) > len(figures.COLOURS)
            svg = figures.draw_points(sorted(points, key=lambda point: point[0].place), words, y)
            drawings.append(Drawing(chapter.file(name), title, svg, wide))
    return drawings


def draw_metrics(chapter: Chapter) -> list[Drawing]:
    """Each metric that has a caption, epoch by epoch."""
    drawings = []
    every = {one.label: one.run.rows() for one in chapter.runs}
    for metric in (metric for metric in metrics.METRICS if metric.caption):
        values = {k: [(row[metric.drawn] or {}).get(metric.name) for row in rows] for k, rows in every.items()}
        shown = [k for k, some in values.items() if any(value is not None for value in some)]
        if shown:
            styles = chapter.told_apart(len(shown))
            hint = HINT if styles is chapter.model_styles else ""
            curves = [(styles[k], [row["epoch"] for row in every[k]], values[k]) for k in shown]
            percent = metric.format.endswith("%}")
            svg = figures.draw_curves(curves, x="epoch", y=metric.title, log=metric.log, percent=percent)
            drawings.append(Drawing(chapter.file(metric.name), f"{metric.caption}{hint}", svg))
    return drawings


def origins(chapter: Chapter) -> Table:
    """What repeats each run, or makes it of the first one where no experiment of the package is near; and where."""
    heads = ("run", "kerneq train …", "device", "processes", "PyTorch", "kerneq", "source revision", "started")
    rows, first = [], chapter.runs[0]
    for one in chapter.runs:
        told = shlex.join(one.settings)
        told = told or " ".join((f"({first.label})", *map(shlex.quote, changes(first.config, one.config))))
        origin = one.run.environment()
        facts = [str(origin.get(key) or DASH) for key in ("device", "processes", "torch", "kerneq")]
        revision = str(origin.get("revision") or DASH)
        revision = revision[:10] + ("+changes" if revision.endswith("+changes") else "")
        rows.append((one.label, told, *facts, revision, str(origin.get("started") or DASH)))
    return Table(heads, rows, heads)


def applies(part: str, one: Reported) -> bool:
    """Whether a part of the evaluation says something about a run."""
    if part == "ood":
        return one.config.data.subset == "first-five-classes"
    if part not in ("behaviour", "certificates"):
        return True
    settings = one.config.model.settings
    if isinstance(settings, ResNetConfig) or isinstance(settings.gradient, Unrolled):
        return False
    known = isinstance(settings, KernelConfig) and isinstance(settings.kernel, AbstractRadialKernel | Linear)
    return part == "behaviour" or known


def command(part: str, runs: Sequence[Reported]) -> str:
    """The command that measures a part of some runs."""
    asked = [] if part == "scores" else ["--part", part]
    return shlex.join(["kerneq", "evaluate", *(str(one.run.path) for one in runs), *asked])


def without_empty(table: Table) -> Table:
    """The table without the columns in which nobody has a number."""
    kept = [i for i in range(len(table.headings)) if any(row[i] != DASH for row in table.rows)]
    rows = [tuple(row[i] for i in kept) for row in table.rows]
    return dataclasses.replace(table, headings=tuple(table.headings[i] for i in kept), rows=rows)
