"""The results of evaluations as tables and drawings: a function for each part, which takes the part of each run."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, final

from ...loading import read_small
from ..evaluate.ood import TITLES
from . import figures
from .page import DASH, Block, Drawing, Paragraph, Table, format_number
from .results import Reported, Result

PartByRun = Mapping[str, Mapping[str, Any]]  # what a part found, by the labels of the runs that have it
NORMS = {"linf": "ℓ∞", "l2": "ℓ2"}
MANY = 2 * len(figures.COLOURS)  # runs that figures tell apart; of more they show the models


@final
@dataclasses.dataclass(frozen=True)
class Chapter:
    """The runs on one data set, what they reached, and what their drawings share."""

    data: str
    runs: tuple[Reported, ...]
    results: tuple[Result, ...]

    def collect_pictures(self, measured: PartByRun, name: str, words: str) -> list[Block]:
        """Return the pictures of this name that the runs have, as one block, if they have any."""
        found = []
        for one in self.runs:
            file = one.run.path / "evaluation" / f"{name}.png"
            if one.label in measured and file.is_file():
                caption = f"{words} {one.label}"
                found.append(Drawing(self.name_file(name, one.label), caption, read_small(file), wide=True))
        return [found] if found else []

    @property
    def styles(self) -> dict[str, figures.Style]:
        """How a figure shows each run, by its label: in the same colour in all of them."""
        return {one.label: figures.Style(one.label, place) for place, one in enumerate(self.runs)}

    def style_runs(self, count: int) -> tuple[dict[str, figures.Style], str]:
        """Return how a figure of `count` runs or results shows each run, by its label, and a hint for its caption.

        A figure of too many runs shows them as their models, of whose results one counts.
        """
        names = {one.label: one.config.model.name for one in self.runs}
        models = list(dict.fromkeys(names.values()))
        if count <= MANY or len(models) == 1:
            return self.styles, ""
        first = {found.model: found for found in reversed(self.results)}.values()
        counting = {one.label for found in first for one in found.runs}
        styles = {label: figures.Style(name, models.index(name), label in counting) for label, name in names.items()}
        return styles, "; filled or thick: the runs of a model that count"

    def name_file(self, *words: str) -> str:
        """Return the name of a drawing's file."""
        text = " ".join((self.data, *words))
        return "-".join("".join(c if c.isascii() and (c.isalnum() or c in ".-") else " " for c in text).split())


def divide(runs: Sequence[Reported], results: Sequence[Result]) -> list[Chapter]:
    """Return a chapter for each data set, with its runs and its results."""
    names = sorted({one.data for one in runs})
    own = ([one for one in runs if one.data == data] for data in names)
    theirs = ([found for found in results if found.runs[0].data == data] for data in names)
    return [Chapter(*parts) for parts in zip(names, map(tuple, own), map(tuple, theirs), strict=True)]


def show_scores(chapter: Chapter, measured: PartByRun) -> list[Block]:
    groups = [[one.label for one in result.runs if one.label in measured] for result in chapter.results]
    firsts = sorted({group[0] for group in groups if group}, key=list(measured).index)
    styles, by_model = chapter.style_runs(len(firsts))
    reliability, confusion = [], []
    for label in (label for label in firsts if styles[label].counts):
        found = measured[label]
        bins = {f"as trained, ECE {found['calibration']['ece']:.3f}": found["calibration"]["bins"]}
        if scaled := found.get("scaled"):
            bins[f"T = {scaled['temperature']:.2f}, ECE {scaled['ece']:.3f}"] = scaled["bins"]
        svg = figures.draw_reliability(bins)
        reliability.append(Drawing(chapter.name_file("reliability", label), f"Reliability of {label}", svg))
        svg = figures.draw_confusion(found["classes"], found["classification"]["test"]["confusion"])
        confusion.append(Drawing(chapter.name_file("confusion", label), f"Confusion of {label}", svg))
    words = "a point is a bin of predictions, larger with more of them; on the dotted line 80% means 80%."
    words += " Of runs that differ in their seed one is drawn." if any(group[1:] for group in groups) else ""
    words += " Of a model's runs those that count are drawn." if by_model else ""
    counts = "rows are labels, columns predictions; blue is right, orange wrong, deeper for more of its row."
    mistakes = chapter.collect_pictures(measured, "mistakes", "The most confident mistakes of")
    return [Paragraph(f"Reliability: {words}"), reliability, Paragraph(f"Confusion: {counts}"), confusion, *mistakes]


def show_behaviour(chapter: Chapter, measured: PartByRun) -> list[Block]:
    rows, drawings = [], []
    stopped: list[figures.Curve] = []
    for label, found in measured.items():
        for layer in found["layers"]:
            limits = [format_number(layer[key], ".2f") for key in ("bound", "convexity")]
            factor = f"{layer['contraction']:.2f} (at most {layer['most_contraction']:.2f})"
            steps = f"{layer['steps']:.1f} (at most {layer['most_steps']})"
            failures = f"{layer['unconverged']:.1%}"
            rows.append((label, layer["name"], steps, f"{layer['residual']:.1e}", failures, factor, *limits))
        svg = figures.draw_traces(found["layers"], found["tol"])
        drawings.append(Drawing(chapter.name_file("traces", label), f"Within a solve: {label}", svg, wide=True))
        ends, shares = ([s[key] for s in found["stopped"]] for key in ("steps", "accuracy"))
        stopped.append((chapter.styles[label], ends, shares))
    svg = figures.draw_curves(stopped, x="steps at most", y="test accuracy", percent=True)
    worth = Drawing(chapter.name_file("stopped"), "What the equilibrium is worth: solves stopped early", svg)
    heads = ("run", "layer", "steps", "residual", "not converged", "contraction", "bound L", "convexity μ")
    words = "Contraction is the spectral radius of ∂f/∂z at z*, at most L; with μ > 0 the equilibrium is unique."
    words += " Traces go on past the tolerance; thick lines are means, thin ones single pictures."
    return [Paragraph(words), Table(heads, rows, ("layer",)), [worth], drawings]


def show_corruptions(chapter: Chapter, measured: PartByRun) -> list[Block]:
    rows = []
    for label, found in measured.items():
        shares = (format_number(found[key]) for key in ("clean", "mean_accuracy", "mean_error"))
        rows.append((label, *shares, f"{found['images']} pictures, {found['source']}"))
    bars = {k: {name: fmean(values) for name, values in v["accuracy"].items()} for k, v in measured.items()}
    colours = {label: figures.COLOURS[i % len(figures.COLOURS)] for i, label in enumerate(measured)}
    svg = figures.draw_bars(bars, {label: found["clean"] for label, found in measured.items()}, colours)
    heads = ("run", "clean accuracy", "mean accuracy, corrupted", "mean corruption error", "pictures")
    drawing = Drawing(chapter.name_file("corruptions"), "Accuracy under the corruptions of CIFAR-10-C", svg, wide=True)
    sources = {found["source"] for found in measured.values()}
    differ = "Not all were measured on the same corrupted pictures (the last column): only runs with the same compare."
    return [*([Paragraph(differ)] if len(sources) > 1 else []), Table(heads, rows, ("pictures",)), [drawing]]


def show_attack(chapter: Chapter, measured: PartByRun) -> list[Block]:
    rows: list[tuple[str, ...]] = []
    curves: dict[str, list[figures.Curve]] = {}
    for label, found in measured.items():
        for threat in found["threats"]:
            t = threat["threat"]
            norm = t["norm"]
            ball = f"{NORMS.get(norm, norm)} ≤ {t['radius'] * 255:g}/255, PGD-{t['steps']} × {t['restarts']}"
            signs = [words.partition(": ")[2] for words in found["concerns"] if words.startswith(f"{norm}: ")]
            accuracies = map(format_number, (found["clean"], threat["accuracy"], threat.get("random")))
            rows.append((label, ball, f"{found['images']}", *accuracies, "; ".join(signs) or "none"))
            radii, shares = zip(*threat["radii"], strict=True)
            curves.setdefault(norm, []).append((chapter.styles[label], [255 * r for r in radii], shares))
    heads = ("run", "attack", "pictures", "clean", "attacked", "at random points", "signs of a masked gradient")
    tested = max(found["tested"] for found in measured.values())
    words = "At random points: right at all of as many points of the ball as the attack has steps. That and the curves"
    words += f" are of the first {tested} pictures at most, the curves by one restart: weaker than the table's."
    drawings = []
    for norm, some in curves.items():
        title = NORMS.get(norm, norm)
        svg = figures.draw_accuracy(some, f"radius ({title}) in units of 1/255", "accuracy")
        drawings.append(Drawing(chapter.name_file("attack", norm), f"Accuracy under PGD, {title}", svg))
    return [Paragraph(words), Table(heads, rows, ("attack", "signs of a masked gradient")), drawings]


def show_certificates(chapter: Chapter, measured: PartByRun) -> list[Block]:
    rows = []
    for label, found in measured.items():
        every, attacked, needed = (
            format_number(found[key], ".3f") for key in ("mean_radius", "attacked_radius", "found_radius")
        )
        whole = ("yes" if found["unique"] else "no", f"{found['images']}", format_number(found["accuracy"]), every)
        rows.append((label, *whole, f"{found['attacked']}", attacked, needed, f"{found['broken']}"))
    curves = [(chapter.styles[label], found["radii"], found["certified"]) for label, found in measured.items()]
    svg = figures.draw_accuracy(curves, "ℓ2 radius, pixels in [0, 1]", "certified accuracy")
    heads = ("run", "unique equilibrium", "pictures", "accuracy", "mean certified radius")
    some = ("attacked", "their certified radius", "distance an attack needs", "broken")
    words = (
        "Certified accuracy: the share of the pictures that are right and provably keep their class under every change "
        "of their pixels, in [0, 1], that is shorter (ℓ2) than the radius. Pictures that are wrong have the radius 0; "
        "attacked are some that are right, and a broken one would be an error in the proof."
    )
    drawing = Drawing(chapter.name_file("certificates"), "Certified accuracy", svg)
    return [Paragraph(words), Table((*heads, *some), rows), [drawing]]


def show_ood(chapter: Chapter, measured: PartByRun) -> list[Block]:
    rows = []
    for label, found in measured.items():
        keys = ("known_kl", "unknown_kl_uniform_q", "unknown_kl_q_uniform")
        aurocs = [found["familiarity"].get(name, {}).get("auroc") for name in TITLES]
        numbers = (format_number(value, ".4f") for value in (*(found[key] for key in keys), *aurocs))
        rows.append((label, format_number(found["accuracy"]), *numbers))
    kl = ("known KL(label ‖ q)", "unknown KL(uniform ‖ q)", "unknown KL(q ‖ uniform)")
    words = (
        "Published (KerDEQ, Table 3): OptEq known KL 0.38, unknown KL 1.51; KerDEQ 0.306, 1.21. "
        "Which of the two unknown KL is meant is not said there."
    )
    heads = ("run", "known accuracy", *kl, *(f"AUROC of {title}" for title in TITLES.values()))
    published = [Paragraph(words)] if chapter.runs[0].config.data.name == "cifar10" else []
    if smoothed := [one.label for one in chapter.runs if one.label in measured and one.config.training.label_smoothing]:
        words = "label smoothing draws predictions towards the uniform one, so their KLs compare with no others."
        published.append(Paragraph(f"{', '.join(smoothed)}: {words}"))
    return [*published, Table(heads, rows)]


def show_saliency(chapter: Chapter, measured: PartByRun) -> list[Block]:
    names = list(dict.fromkeys(name for found in measured.values() for name in found["methods"]))
    rows: list[tuple[str, ...]] = [("pictures", *(f"{found['images']}" for found in measured.values()))]
    for name in names:
        scores = [found["methods"].get(name) for found in measured.values()]
        rows.append((name, *(f"{s['deletion']:.3f} / {s['insertion']:.3f}" if s else DASH for s in scores)))
    words = "Deletion (lower is better) / insertion (higher is better): areas under the probability of the class."
    words += " Patch weights (in older records: weights) are ω, which the equilibrium of a radial kernel gives to every"
    words += " patch, 1 where W fits it, towards 0 where it does not; random is a map of noise."
    pictures = chapter.collect_pictures(measured, "saliency", "Where it looks:")
    return [Paragraph(words), Table(("map", *measured), rows), *pictures]


# The sections of a chapter that show a part of an evaluation, by its name: their titles, and who makes their blocks.
SECTIONS: dict[str, tuple[str, Callable[[Chapter, PartByRun], list[Block]]]] = {
    "scores": ("Calibration, confusion and mistakes", show_scores),
    "behaviour": ("Equilibria", show_behaviour),
    "corruptions": ("Corruptions", show_corruptions),
    "attack": ("Attacks", show_attack),
    "certificates": ("Certificates", show_certificates),
    "ood": ("Known and unknown classes", show_ood),
    "saliency": ("Saliency", show_saliency),
}
