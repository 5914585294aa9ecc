"""From runs to the sections of a report: a chapter for each data set, a section for each kind of evidence."""

import dataclasses
import functools
import shlex
from collections.abc import Callable, Sequence
from typing import final

from ..evaluate import PARTS
from ..models import KernelConfig, ResNetConfig
from ..run import TrainingError
from ..training import metrics
from . import figures
from .findings import Findings, PartByRun
from .page import DASH, Block, Drawing, Page, Paragraph, Section, Table, cell
from .published import compare
from .results import Reported, Result, changes, results


def compose(runs: Sequence[Reported], title: str) -> Page:
    """The page about some runs: first beside what is published, then a chapter for each data set."""
    chapters: dict[str, list[Reported]] = {}
    for one in sorted(runs, key=lambda one: one.data):
        chapters.setdefault(one.data, []).append(one)
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    lead = f"{count} on {', '.join(chapters)}. Test accuracies are of the test images; "
    lead += (
        "validation accuracies are of images held out of training, and as the best of all epochs they flatter a little."
    )
    sections = [section for chapter in chapters.values() for section in Chapter(tuple(chapter)).sections()]
    return Page(title, lead, [*compare(runs), *sections])


@final
@dataclasses.dataclass(frozen=True)
class Chapter:
    """The runs on one data set, the best first."""

    runs: tuple[Reported, ...]

    @property
    def findings(self) -> Findings:
        return Findings(self.runs)

    @functools.cached_property
    def reached(self) -> list[Result]:
        return [found for found in results(self.runs) if found.split != "unknown"]

    def sections(self) -> list[Section]:
        data = self.runs[0].data
        found = [
            Section(data, [], chapter=True),
            Section("Results", self.results()),
            *([Section("Learning curves", [curves])] if (curves := self.curves()) else []),
        ]
        sections: dict[str, tuple[str, Callable[[PartByRun], list[Block]]]] = {
            "scores": ("Calibration, confusion and mistakes", self.findings.scores),
            "behaviour": ("Equilibria", self.findings.behaviour),
            "corruptions": ("Corruptions", self.findings.corruptions),
            "attack": ("Attacks", self.findings.attack),
            "certificates": ("Certificates", self.findings.certificates),
            "ood": ("Known and unknown classes", self.findings.ood),
            "saliency": ("Saliency", self.findings.saliency),
        }
        absent: list[tuple[str, str, str]] = []
        for part, (title, blocks) in sections.items():
            tables = [(one.label, one.run.part(part)) for one in self.runs]
            measured = {k: found for k, found in tables if found and (part != "scores" or "calibration" in found)}
            runs = [one for one in self.runs if one.label not in measured and applies(part, one)]
            missing = [one for one in runs if one.weights]  # of records without weights there is nothing to measure
            if measured:
                try:
                    shown = blocks(measured)
                except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                    damaged = f"The part {part} of {', '.join(measured)} is damaged ({error!r})"
                    raise TrainingError(f"{damaged}: {command(part, self.runs)}") from None
                if missing:
                    shown.append(self.missing("Not measured", part, missing))
                found.append(Section(title, shown))
            elif missing:
                absent.append((title, PARTS[part].sentence, command(part, missing)))
        found.append(Section("Settings and environment", [self.origins()]))
        if absent:
            headings = ("not measured yet", "what it is", "the command that does it")
            found.append(Section("Still to measure", [Table(headings, absent, headings)]))
        return found

    def results(self) -> list[Block]:
        heads = ("run", "model", "seed", "parameters", "test accuracy", "95 % interval")
        rows = []
        for one in self.runs:
            numbers = (
                cell(one.parameters, ","),
                cell(one.test) if one.test is not None else "not evaluated",
                f"{100 * interval[0]:.2f}–{interval[1]:.2%}" if (interval := one.interval()) else DASH,
                cell(one.validation),
                f"{len(one.run.rows())}",
                f"{one.seconds:.0f}",
            )
            rows.append((one.label, one.config.model.name, f"{one.config.seed}", *numbers))
        labels = {one.run.path.as_posix(): one.label for one in self.runs}
        for found in (found for found in self.reached if found.std is not None):
            name, size = f"{labels[found.runs[0]]}, mean ± std", cell(found.parameters, ",")
            text = (f"{found.accuracy:.2%} ± {found.std:.2%}", DASH, DASH, f"{found.epochs}", f"{found.seconds:.0f}")
            rows.append((name, found.model, f"{found.seeds} seeds", size, *text))
        best = 0 if self.runs[0].test is not None else None
        blocks: list[Block] = [Table((*heads, "best validation", "epochs", "device-seconds"), rows, ("model",), best)]
        missing = [one for one in self.runs if one.test is None]
        if missing:
            blocks.append(self.missing("Not evaluated on the test images", "scores", missing))
        detail, costs = self.detail(), self.costs()
        return blocks + ([detail] if detail.rows else []) + ([costs] if costs else [])

    def missing(self, words: str, part: str, runs: Sequence[Reported]) -> Paragraph:
        """That a part of some runs was not measured, and the command that does it for those whose weights are here."""
        here = [one for one in runs if one.weights]
        gone = " (some are records only)" if here else " (without weights: records only)"
        gone = "" if len(here) == len(runs) else gone
        text = f"{words}: {', '.join(one.label for one in runs)}{gone}."
        return Paragraph(text, command(part, here) if here else "")

    def detail(self) -> Table:
        """Every metric on the test images, and calibration."""
        columns = [metric for metric in metrics.METRICS if metric.name != "accuracy"]
        extra = ("top-5", "Brier score", "ECE", "ECE, scaled", "temperature")
        rows = []
        for one in (one for one in self.runs if one.test is not None):
            found = one.evaluation
            top5 = found.get("classification", {}).get("test", {}).get("top5")
            before, after = found.get("calibration") or {}, found.get("scaled") or {}
            numbers = (before.get("brier"), before.get("ece"), after.get("ece"), after.get("temperature"))
            scores = (metric.text(one.run.test()) for metric in columns)
            rows.append((one.label, *scores, cell(top5), *(cell(number, ".4f") for number in numbers)))
        return without_empty(Table(("run", *(metric.heading for metric in columns), *extra), rows))

    def costs(self) -> list[Drawing]:
        """Accuracy against parameters and against training time, where there is something to compare.

        One point a run or a group of seeds; on held-out images only where no two were tested.
        """
        tested = [found for found in self.reached if found.split == "test"]
        shown = tested if len(tested) > 1 else [found for found in self.reached if found.split != "test"]
        drawings, y = [], "test accuracy" if shown is tested else "accuracy on held-out images"
        places = {one.run.path.as_posix(): place for place, one in enumerate(self.runs)}
        for name, words in (("parameters", "parameters"), ("seconds", "training time in device-seconds")):
            points: list[figures.Point] = []
            for found in sorted(shown, key=lambda found: places[found.runs[0]]):
                place, across = places[found.runs[0]], found.parameters if name == "parameters" else found.seconds
                label = self.runs[place].label + (f", mean of {found.seeds} seeds" if found.seeds > 1 else "")
                points += [(label, place, across, found.accuracy)] if across is not None else []
            if len(points) > 1:
                title, wide = f"Accuracy against {words.partition(' in ')[0]}", len(points) > len(figures.COLOURS)
                svg = figures.draw_points(points, words, y)
                drawings.append(Drawing(self.findings.file(name), title, svg, wide))
        return drawings

    def curves(self) -> list[Drawing]:
        drawings = []
        for metric in metrics.METRICS:
            if metric.caption:
                curves: dict[str, figures.Curve] = {}
                for one in self.runs:
                    rows = one.run.rows()
                    values = [(row[metric.drawn] or {}).get(metric.name) for row in rows]
                    curves[one.label] = ([row["epoch"] for row in rows], values)
                percent = metric.format.endswith("%}")
                svg = figures.draw_curves(curves, x="epoch", y=metric.title, log=metric.log, percent=percent)
                if svg:
                    drawings.append(Drawing(self.findings.file(metric.name), metric.caption, svg))
        return drawings

    def origins(self) -> Table:
        """What repeats each run, or makes it of the first one where no experiment of the package is near; and where."""
        heads = ("run", "kerneq train …", "device", "processes", "PyTorch", "kerneq", "source revision", "started")
        rows, first = [], self.runs[0]
        for one in self.runs:
            told = one.settings or (f"({first.label})", *changes(first.config, one.config))
            origin = one.run.environment()
            facts = [str(origin.get(key) or DASH) for key in ("device", "processes", "torch", "kerneq")]
            revision = str(origin.get("revision") or DASH)
            revision = revision[:10] + ("+changes" if revision.endswith("+changes") else "")
            rows.append((one.label, " ".join(told), *facts, revision, str(origin.get("started") or DASH)))
        return Table(heads, rows, heads)


def applies(part: str, one: Reported) -> bool:
    """Whether a part of the evaluation says something about a run."""
    if part == "ood":
        return one.config.data.subset == "first-five-classes"
    if part == "certificates":
        return isinstance(one.config.model.settings, KernelConfig)
    return part != "behaviour" or not isinstance(one.config.model.settings, ResNetConfig)


def command(part: str, runs: Sequence[Reported]) -> str:
    """The command that measures a part of some runs."""
    asked = [] if part == "scores" else ["--part", part]
    return shlex.join(["kerneq", "evaluate", *(str(one.run.path) for one in runs), *asked])


def without_empty(table: Table) -> Table:
    """The table without the columns in which nobody has a number."""
    kept = [i for i in range(len(table.headings)) if any(row[i] != DASH for row in table.rows)]
    rows = [tuple(row[i] for i in kept) for row in table.rows]
    return dataclasses.replace(table, headings=tuple(table.headings[i] for i in kept), rows=rows)
