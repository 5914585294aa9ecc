"""From runs to the sections of a report: a chapter for each data set, a section for each kind of evidence."""

import dataclasses
import shlex
from collections.abc import Callable, Sequence
from typing import final

from ..evaluate import PARTS
from ..models import KernelConfig, ResNetConfig
from ..run import TrainingError
from ..run.folder import FREE
from ..settings import rows as settings_of
from ..training import metrics
from . import figures
from .findings import Block, Findings, PartByRun, share
from .page import DASH, Drawing, Page, Paragraph, Section, Table, span
from .published import compare
from .results import Reported, results


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

    def sections(self) -> list[Section]:
        data = self.runs[0].data
        found = [
            Section(data, [Paragraph(self.sentence())], chapter=True),
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
            elif missing and part in PARTS:
                absent.append((title, PARTS[part].sentence, command(part, missing)))
        found += [Section("Settings that differ", [settings])] if (settings := self.settings()).rows else []
        found.append(Section("Environment", [self.environment()]))
        if absent:
            headings = ("not measured yet", "what it is", "the command that does it")
            found.append(Section("Still to measure", [Table(headings, absent, headings)]))
        return found

    def sentence(self) -> str:
        best = self.runs[0]
        if best.test is None or best.interval is None:
            return "No run on these data was evaluated on the test images: every accuracy here is of held-out images."
        words = f"Best on the test images: {best.label} with {best.test:.2%}, 95 % interval {span(best.interval)}"
        return words + (f", {best.parameters:,} parameters." if best.parameters else ".")

    def results(self) -> list[Block]:
        heads = ("run", "model", "seed", "parameters", "test accuracy", "95 % interval")
        rows = []
        for one in self.runs:
            numbers = (
                f"{one.parameters:,}" if one.parameters else DASH,
                share(one.test) if one.test is not None else "not evaluated",
                span(one.interval) if one.interval else DASH,
                share(one.validation),
                f"{len(one.run.rows())}",
                f"{one.seconds:.0f}",
            )
            rows.append((one.label, one.config.model.name, f"{one.config.seed}", *numbers))
        by_path = {one.run.path.as_posix(): one for one in self.runs}
        for found in (found for found in results(self.runs) if found.std is not None and found.split == "test"):
            members = [by_path[path] for path in found.runs]
            names = f"{members[0].label}, mean ± std of seeds {', '.join(f'{one.config.seed}' for one in members)}"
            size = f"{found.parameters:,}" if found.parameters else DASH
            text = (f"{found.accuracy:.2%} ± {found.std:.2%}", DASH, DASH, f"{found.epochs}", f"{found.seconds:.0f}")
            rows.append((names, found.model, f"{found.seeds} seeds", size, *text))
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
            rows.append((one.label, *scores, share(top5), *(f"{n:.4f}" if n is not None else DASH for n in numbers)))
        return without_empty(Table(("run", *(metric.heading for metric in columns), *extra), rows))

    def costs(self) -> list[Drawing]:
        """Accuracy against parameters and against training time, where there is something to compare.

        One point a run or a group of seeds; on held-out images only where nobody was tested.
        """
        drawings, every = [], [found for found in results(self.runs) if found.split != "unknown"]
        shown = [found for found in every if found.split == "test"]
        shown = shown if len(shown) > 1 else every
        places = {one.run.path.as_posix(): place for place, one in enumerate(self.runs)}
        for name, words in (("parameters", "parameters"), ("seconds", "training time in device-seconds")):
            points, papers = [], set()
            for found in shown:
                across = found.parameters if name == "parameters" else found.seconds
                one = self.runs[places[found.runs[0]]]
                label = one.label if found.seeds == 1 else f"{one.label}, mean of {found.seeds} seeds"
                if across is not None:
                    points.append(figures.Point(label, places[found.runs[0]], across, found.accuracy, found.split))
                if name == "parameters" and found.published and one.published_parameters:
                    papers.add((one.published_parameters, found.published))
            if len(points) > 1:
                title = f"Accuracy against {words.partition(' in ')[0]}"
                svg = figures.draw_points(sorted(points, key=lambda point: point.place), sorted(papers), words)
                drawings.append(Drawing(self.findings.file(name), title, svg, len(points) > len(figures.COLOURS)))
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

    def settings(self) -> Table:
        """Every setting of which two runs have different values, and who has which."""
        values: dict[str, dict[str, list[str]]] = {}
        for one in self.runs:
            for key, value, _ in settings_of(one.config):
                if key not in FREE:
                    values.setdefault(key, {}).setdefault(str(value), []).append(one.label)
        rows = []
        for key, found in values.items():
            commonest = max(found, key=lambda value: len(found[value]))
            for value, names in found.items() if len(found) > 1 else ():
                many = value == commonest and len(names) > 2
                rows.append((key, value, "all others that have it" if many else ", ".join(names)))
        return Table(("setting", "value", "runs"), rows, ("value", "runs"))

    def environment(self) -> Table:
        heads = ("run", "device", "processes", "PyTorch", "kerneq", "source revision", "started")
        rows = []
        for one in self.runs:
            origin = one.run.environment()
            facts = [str(origin.get(key) or DASH) for key in ("device", "processes", "torch", "kerneq")]
            revision = str(origin.get("revision") or DASH)
            revision = revision[:10] + ("+changes" if revision.endswith("+changes") else "")
            rows.append((one.label, *facts, revision, str(origin.get("started") or DASH)))
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
