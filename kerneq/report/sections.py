"""From runs to the sections of a report: a chapter for each data set, a section for each kind of evidence."""

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, final

from ..evaluate import PARTS, over_seeds
from ..evaluate.ood import TITLES
from ..models import ResNetConfig
from ..run import TrainingError
from ..run.folder import FREE
from ..settings import rows as settings_of
from ..training.metrics import METRICS
from . import figures
from .page import Drawing, Page, Paragraph, Section, Table
from .results import Reported

Block = Paragraph | Table | list[Drawing]
Measured = Mapping[str, Mapping[str, Any]]  # what a part found, by the labels of the runs that have it
DASH = "–"
NORMS = {"linf": "ℓ∞", "l2": "ℓ2"}


def compose(runs: Sequence[Reported], title: str) -> Page:
    """The page about some runs; those on different data are in different chapters."""
    chapters: dict[str, list[Reported]] = {}
    for one in sorted(runs, key=lambda one: one.data):
        chapters.setdefault(one.data, []).append(one)
    names = ", ".join(chapters)
    lead = (
        f"{counted(len(runs), 'run')} on {names}. Test accuracies are of the test images; validation accuracies are of "
    )
    lead += "images held out of training, and as the best of all epochs they flatter a little. Published figures are of the "
    lead += "model of that name, by its authors; a run may have changed its settings."
    sections = [section for chapter in chapters.values() for section in Chapter(tuple(chapter)).sections()]
    return Page(title, lead, sections)


@final
@dataclasses.dataclass(frozen=True)
class Chapter:
    """The runs on one data set, the best first."""

    runs: tuple[Reported, ...]

    def sections(self) -> list[Section]:
        data = self.runs[0].data
        found = [
            Section(data, [Paragraph(self.sentence())], chapter=True),
            Section("Results", self.results()),
            *([Section("Learning curves", [curves])] if (curves := self.curves()) else []),
        ]
        evidence: dict[str, tuple[str, Callable[[Measured], list[Block]]]] = {
            "scores": ("Calibration, confusion and mistakes", self.scores),
            "behaviour": ("Equilibria", self.behaviour),
            "corruptions": ("Corruptions", self.corruptions),
            "attack": ("Attacks", self.attack),
            "certificates": ("Certificates", self.certificates),
            "ood": ("Known and unknown classes", self.ood),
            "saliency": ("Saliency", self.saliency),
        }
        absent: list[tuple[str, str, str]] = []
        for part, (title, blocks) in evidence.items():
            measured = {one.label: one.run.part(part) for one in self.runs}
            measured = {label: table for label, table in measured.items() if part != "scores" or "calibration" in table}
            measured = {label: table for label, table in measured.items() if table}
            missing = [one for one in self.runs if one.label not in measured and applies(part, one)]
            if measured:
                try:
                    shown = blocks(measured)
                except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                    files = ", ".join(measured)
                    raise TrainingError(
                        f"The part {part} of {files} is damaged ({error!r}): {command(part, self.runs)}"
                    ) from None
                if missing:
                    shown.append(self.missing("Not measured", part, missing))
                found.append(Section(title, shown))
            elif any(one.weights for one in missing) and part in PARTS:
                absent.append((title, PARTS[part].sentence, command(part, [one for one in missing if one.weights])))
        found += [Section("Settings that differ", [self.settings()])] if len(self.runs) > 1 else []
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
        words += f", {best.parameters:,} parameters" if best.parameters else ""
        return words + (f"; published for {best.config.model.name}: {best.published:.1%}." if best.published else ".")

    def results(self) -> list[Block]:
        heads = (
            "run",
            "model",
            "seed",
            "parameters",
            "published",
            "test accuracy",
            "95 % interval",
            "best validation",
            "epochs",
        )
        rows = []
        for one in self.runs:
            numbers = (
                f"{one.parameters:,}" if one.parameters else DASH,
                share(one.published, 1),
                share(one.test) if one.test is not None else "not evaluated",
                span(one.interval) if one.interval else DASH,
                share(one.validation),
                f"{len(one.run.rows())}",
                f"{one.seconds:.0f}",
            )
            rows.append((one.label, one.config.model.name, f"{one.config.seed}", *numbers))
        seeds = over_seeds([one.run for one in self.runs])
        by_path = {one.run.path: one for one in self.runs}
        for group in seeds:
            members = [by_path[run.path] for run in group.runs]
            first = members[0]
            mean, std = group.mean["accuracy"], group.std["accuracy"]
            time = f"{fmean(one.seconds for one in members):.0f}"
            size, paper = f"{first.parameters:,}" if first.parameters else DASH, share(first.published, 1)
            text = (f"{mean:.2%} ± {std:.2%}", DASH, DASH, f"{len(first.run.rows())}", time)
            names = f"mean ± standard deviation of {', '.join(one.label for one in members)}"
            rows.append((names, first.config.model.name, f"{len(members)} seeds", size, paper, *text))
        best = 0 if self.runs[0].test is not None else None
        blocks: list[Block] = [Table((*heads, "device-seconds"), rows, ("model",), best)]
        missing = [one for one in self.runs if one.test is None]
        if missing:
            blocks.append(self.missing("Not evaluated on the test images", "scores", missing))
        detail, costs = self.detail(), self.costs()
        return blocks + ([detail] if detail.rows else []) + ([costs] if costs else [])

    def missing(self, words: str, part: str, runs: Sequence[Reported]) -> Paragraph:
        """That a part of some runs was not measured, and the command that does it for those whose weights are here."""
        here = [one for one in runs if one.weights]
        gone = (
            ""
            if len(here) == len(runs)
            else " (without weights: records only)"
            if not here
            else " (some are records only)"
        )
        text = f"{words}: {', '.join(one.label for one in runs)}{gone}."
        return Paragraph(text, command(part, here) if here else "")

    def detail(self) -> Table:
        """Every metric on the test images, and calibration."""
        metrics = [metric for metric in METRICS if metric.name != "accuracy"]
        extra = ("top-5", "Brier score", "ECE", "ECE, scaled", "temperature")
        rows = []
        for one in (one for one in self.runs if one.test is not None):
            found = one.evaluation
            top5 = found.get("classification", {}).get("test", {}).get("top5")
            before, after = found.get("calibration") or {}, found.get("scaled") or {}
            numbers = (before.get("brier"), before.get("ece"), after.get("ece"), after.get("temperature"))
            scores = (metric.text(one.run.test()) for metric in metrics)
            rows.append((one.label, *scores, share(top5), *(f"{n:.4f}" if n is not None else DASH for n in numbers)))
        return without_empty(
            Table(("run", *(metric.heading for metric in metrics), *extra), rows), keep=len(metrics) + 1
        )

    def costs(self) -> list[Drawing]:
        """Accuracy against parameters and against training time, where there is something to compare."""
        drawings = []
        for name, words in (("parameters", "parameters"), ("seconds", "training time in device-seconds")):
            points: list[figures.Point] = []
            for one in self.runs:
                across = one.parameters if name == "parameters" else one.seconds
                accuracy = one.test if one.test is not None else one.validation
                if across is not None and accuracy is not None:
                    kind = "test" if one.test is not None else "validation"
                    points.append((one.label, float(across), accuracy, kind))
            sizes = {(one.published_parameters, one.published) for one in self.runs if one.published}
            papers = [(float(size), share) for size, share in sizes if size and share and name == "parameters"]
            if len(points) > 1:
                title = f"Accuracy against {words.partition(' in ')[0]}"
                drawings.append(Drawing(self.file(name), title, figures.draw_points(points, sorted(papers), words)))
        return drawings

    def curves(self) -> list[Drawing]:
        drawings = []
        for metric in METRICS:
            if metric.caption:
                curves: dict[str, figures.Curve] = {}
                for one in self.runs:
                    rows = one.run.rows()
                    values = [(row[metric.drawn] or {}).get(metric.name) for row in rows]
                    curves[one.label] = ([row["epoch"] for row in rows], values)
                percent = metric.format.endswith("%}")
                svg = figures.draw_curves(curves, x="epoch", y=metric.title, log=metric.log, percent=percent)
                if svg:
                    drawings.append(Drawing(self.file(metric.name), metric.caption, svg))
        return drawings

    def scores(self, measured: Measured) -> list[Block]:
        reliability, confusion = [], []
        for label, found in measured.items():
            steps = {f"as trained, ECE {found['calibration']['ece']:.3f}": found["calibration"]["bins"]}
            if found.get("scaled"):
                scaled = found["scaled"]
                steps[f"T = {scaled['temperature']:.2f}, ECE {scaled['ece']:.3f}"] = scaled["bins"]
            name = f"Reliability of {label}"
            reliability.append(Drawing(self.file("reliability", label), name, figures.draw_reliability(steps)))
            svg = figures.draw_confusion(found["classes"], found["classification"]["test"]["confusion"])
            confusion.append(Drawing(self.file("confusion", label), f"Confusion of {label}", svg))
        words = (
            "Reliability: a point is a bin of predictions, larger with more of them; on the dotted line 80% means 80%."
        )
        counts = (
            "Confusion: rows are labels, columns predictions; blue is right, orange wrong, deeper for more of its row."
        )
        pictures = self.pictures(measured, "mistakes", "The most confident mistakes of")
        return [Paragraph(words), reliability, Paragraph(counts), confusion, *([pictures] if pictures else [])]

    def behaviour(self, measured: Measured) -> list[Block]:
        rows, drawings = [], []
        for label, found in measured.items():
            for layer in found["layers"]:
                limits = [f"{layer[key]:.2f}" if layer[key] is not None else DASH for key in ("bound", "convexity")]
                factor = f"{layer['contraction']:.2f} (at most {layer['most_contraction']:.2f})"
                steps = f"{layer['steps']:.1f} (at most {layer['most_steps']})"
                failures = f"{layer['unconverged']:.1%}"
                rows.append((label, layer["name"], steps, f"{layer['residual']:.1e}", failures, factor, *limits))
            svg = figures.draw_traces(found["layers"], found["tol"])
            drawings.append(Drawing(self.file("traces", label), f"Within a solve: {label}", svg, wide=True))
        stopped = {
            k: ([s["steps"] for s in v["stopped"]], [s["accuracy"] for s in v["stopped"]]) for k, v in measured.items()
        }
        worth = Drawing(
            self.file("stopped"),
            "What the equilibrium is worth: solves stopped early",
            figures.draw_stopped(self.aligned(stopped)),
        )
        heads = ("run", "layer", "steps", "residual", "not converged", "contraction", "bound L", "convexity μ")
        words = "Contraction is the spectral radius of ∂f/∂z at z*, at most L; with μ > 0 the equilibrium is unique."
        words += " Traces go on past the tolerance; thick lines are means, thin ones single pictures."
        return [Paragraph(words), Table(heads, rows, ("layer",)), [worth], drawings]

    def corruptions(self, measured: Measured) -> list[Block]:
        rows = []
        for label, found in measured.items():
            source = f"{found['images']} pictures, {found['source']}"
            rows.append(
                (label, share(found["clean"]), share(found["mean_accuracy"]), share(found["mean_error"]), source)
            )
        bars = {k: {name: fmean(values) for name, values in v["accuracy"].items()} for k, v in measured.items()}
        colours = {one.label: figures.COLOURS[i % len(figures.COLOURS)] for i, one in enumerate(self.runs)}
        svg = figures.draw_bars(bars, {label: found["clean"] for label, found in measured.items()}, colours)
        heads = ("run", "clean accuracy", "mean accuracy, corrupted", "mean corruption error", "pictures")
        drawing = Drawing(self.file("corruptions"), "Accuracy under the corruptions of CIFAR-10-C", svg, wide=True)
        return [Table(heads, rows, ("pictures",)), [drawing]]

    def attack(self, measured: Measured) -> list[Block]:
        rows: list[tuple[str, ...]] = []
        curves: dict[str, dict[str, figures.Curve]] = {}
        for label, found in measured.items():
            for threat in found["threats"]:
                t = threat["threat"]
                norm = NORMS.get(t["norm"], t["norm"])
                ball = f"{norm} ≤ {t['radius'] * 255:g}/255, PGD-{t['steps']} × {t['restarts']}"
                signs = [words.partition(": ")[2] for words in found["concerns"] if words.startswith(f"{t['norm']}: ")]
                accuracies = (share(found["clean"]), share(threat["accuracy"]), share(threat["noise"]))
                rows.append((label, ball, *accuracies, "; ".join(signs) or "none"))
                radii, shares = zip(*threat["radii"], strict=True)
                curve = ([0.0, *(255 * r for r in radii)], [found["clean"], *shares])
                curves.setdefault(norm, {})[label] = curve
        heads = ("run", "attack", "clean", "attacked", "random noise", "signs of a masked gradient")
        drawings = [
            Drawing(
                self.file("attack", {"ℓ∞": "linf", "ℓ2": "l2"}.get(norm, norm)),
                f"Accuracy under PGD, {norm}",
                figures.draw_radii(self.aligned(some), f"radius ({norm}) in units of 1/255", "accuracy"),
            )
            for norm, some in curves.items()
        ]
        return [Table(heads, rows, ("attack", "signs of a masked gradient")), drawings]

    def certificates(self, measured: Measured) -> list[Block]:
        rows = []
        for label, found in measured.items():
            distance = f"{found['found_radius']:.3f}" if found["found_radius"] is not None else DASH
            numbers = (share(found["accuracy"]), f"{found['mean_radius']:.3f}", distance, f"{found['broken']}")
            rows.append((label, "yes" if found["unique"] else "no", *numbers))
        curves = {label: (found["radii"], found["certified"]) for label, found in measured.items()}
        svg = figures.draw_radii(self.aligned(curves), "ℓ2 radius, pixels in [0, 1]", "certified accuracy")
        heads = ("run", "unique equilibrium", "accuracy", "mean certified radius", "distance an attack needs", "broken")
        return [Table(heads, rows), [Drawing(self.file("certificates"), "Certified accuracy", svg)]]

    def ood(self, measured: Measured) -> list[Block]:
        rows = []
        for label, found in measured.items():
            keys = ("known_kl", "unknown_kl_uniform_q", "unknown_kl_q_uniform")
            scores = [found["familiarity"].get(name) for name in TITLES]
            aurocs = [f"{score['auroc']:.4f}" if score else DASH for score in scores]
            rows.append((label, share(found["accuracy"]), *(f"{found[key]:.4f}" for key in keys), *aurocs))
        kl = ("known KL(label ‖ q)", "unknown KL(uniform ‖ q)", "unknown KL(q ‖ uniform)")
        return [Table(("run", "known accuracy", *kl, *(f"AUROC of {title}" for title in TITLES.values())), rows)]

    def saliency(self, measured: Measured) -> list[Block]:
        names = list(dict.fromkeys(name for found in measured.values() for name in found["methods"]))
        rows: list[tuple[str, ...]] = []
        for name in names:
            scores = [found["methods"].get(name) for found in measured.values()]
            rows.append((name, *(f"{s['deletion']:.3f} / {s['insertion']:.3f}" if s else DASH for s in scores)))
        words = "Deletion (lower is better) / insertion (higher is better): areas under the probability of the class."
        pictures = self.pictures(measured, "saliency", "Where it looks:")
        return [Paragraph(words), Table(("map", *measured), rows), *([pictures] if pictures else [])]

    def pictures(self, measured: Measured, name: str, words: str) -> list[Drawing]:
        """The pictures of this name that the runs have."""
        found = []
        for one in self.runs:
            file = one.run.path / "evaluation" / f"{name}.png"
            if one.label in measured and file.is_file():
                found.append(Drawing(self.file(name, one.label), f"{words} {one.label}", file.read_bytes(), wide=True))
        return found

    def aligned(self, curves: Mapping[str, figures.Curve]) -> dict[str, figures.Curve]:
        """A curve for every run, empty where there is none, so that a run has one colour in all figures."""
        return {one.label: curves.get(one.label, ((), ())) for one in self.runs}

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
            for place, (value, names) in enumerate(found.items() if len(found) > 1 else ()):
                many = value == commonest and len(names) > 2
                rows.append((key if place == 0 else "", value, "all others that have it" if many else ", ".join(names)))
        return Table(("setting", "value", "runs"), rows, ("value", "runs"))

    def environment(self) -> Table:
        heads = ("run", "device", "processes", "PyTorch", "kerneq", "source revision", "started")
        rows = []
        for one in self.runs:
            origin = one.run.environment()
            facts = [
                str(origin.get(k) or DASH) for k in ("device", "processes", "torch", "kerneq", "revision", "started")
            ]
            facts[4] = facts[4][:10] + ("+changes" if facts[4].endswith("+changes") else "")
            rows.append((one.label, *facts))
        return Table(heads, rows, heads)

    def file(self, *words: str) -> str:
        """The name of a drawing's file."""
        text = "-".join((self.runs[0].data, *words))
        return "-".join("".join(c if c.isascii() and (c.isalnum() or c in ".-") else " " for c in text).split())


def applies(part: str, one: Reported) -> bool:
    """Whether a part of the evaluation says something about a run."""
    if part == "ood":
        return one.config.data.subset == "first-five-classes"
    return part not in ("behaviour", "certificates") or not isinstance(one.config.model.settings, ResNetConfig)


def command(part: str, runs: Sequence[Reported]) -> str:
    """The command that measures a part of some runs."""
    asked = [] if part == "scores" else ["--part", part]
    return shlex.join(["kerneq", "evaluate", *(str(one.run.path) for one in runs), *asked])


def without_empty(table: Table, keep: int) -> Table:
    """The table without the columns past the first `keep` in which nobody has a number."""
    kept = [i for i in range(len(table.headings)) if i < keep or any(row[i] != DASH for row in table.rows)]
    rows = [tuple(row[i] for i in kept) for row in table.rows]
    return dataclasses.replace(table, headings=tuple(table.headings[i] for i in kept), rows=rows)


def share(value: float | None, digits: int = 2) -> str:
    return f"{value:.{digits}%}" if value is not None else DASH


def span(interval: Sequence[float]) -> str:
    return f"{interval[0]:.2%} … {interval[1]:.2%}"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
