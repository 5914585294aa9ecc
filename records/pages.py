"""The pages about our runs as Markdown: the papers' figures, what the equilibrium is worth, one for each data set."""

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from jinja2 import Environment

from kerneq.lab.report.findings import SECTIONS, Chapter
from kerneq.lab.report.page import Page, write_page
from kerneq.lab.report.results import Reported, Result
from kerneq.lab.report.sections import compose_results, compose_settings
from kerneq.models import MODELS

from .evidence import UNTUNED, Task, is_control, list_orders, list_unlike
from .noise import Churn, Difference, add_noise, format_p, subtract

RECIPE, BENCHMARK = Path("docs/recipe"), Path("benchmarks/results/train-cuda.json")
MUON, SGD = "docs/results/geq-5m-cifar100-muon0.05-24epochs", "docs/results/geq-5m-cifar100-refined3-24epochs"
STEPS = (  # trained with the equilibrium, and with one or two proximal steps in its place: 24 epochs, CIFAR-100
    (MUON, "docs/results/geq-5m-cifar100-muon0.05-one-step-24epochs", "Muon, one step"),
    (SGD, "docs/results/geq-5m-cifar100-one-step-24epochs", "SGD, one step"),
    (SGD, "docs/results/geq-5m-cifar100-two-steps-24epochs", "SGD, two steps"),
    (
        "docs/results/geq-5m-cifar100-deep-24epochs",
        "docs/results/geq-5m-cifar100-deep-one-step-24epochs",
        "SGD, no residual blocks, one step",
    ),
)
SMALL = {  # the same in networks of 50 to 70 thousand parameters
    "steps-seeds": "three convolutions",
    "steps-refined": "residual blocks",
    "steps-plain": "one convolution",
    "steps-muon": "Muon",
}
KERNELS = ("mopteq-8m", "mopteq-polynomial-8m", "mopteq-sigmoid-8m", "opteq")  # GEQ's network with another kernel
EXPLICIT = ("resnet18", "resnet18-imagenet")


def write_summary(tasks: Sequence[Task], churn: Churn, runs: Sequence[Reported], folder: str) -> str:
    """Return the page of all published figures and orders; its other pages are in `folder`."""
    figures = [figure for one in tasks for figure in one.figures(churn)]
    groups, left = list_orders(tasks, churn)
    tested = [one for one in runs if one.accuracy() is not None]
    orders = [
        (*order.row(p), hangs + (" (untuned)" if any(f.model in UNTUNED for f in order.alone) else ""))
        for hangs, some in groups.items()
        for order, p in some
    ]
    heads = ("model", "on", "published, %", "ours, %", "difference", "epochs", "seeds", "grade", "in what it differs")
    first = ("order", "on", "recipe, epochs", "published", "ours ± SE", "p", "Holm's p", "sign", "size", "seeds")
    return render(
        "results.md",
        folder=folder,
        runs=runs,
        churn=churn,
        figures=figures,
        orders=orders,
        tested=len(tested),
        silent=sum(not one.run.environment().get("revision") for one in tested),
        grades=", ".join(f"{sum(one.grade == grade for one in figures)} of grade {grade}" for grade in "ABCD"),
        verdicts=tally([one.verdict for one in figures if one.verdict]),
        signs=tally([row[7] for row in orders]),
        sizes=tally([row[8] for row in orders]),
        data=", ".join(f"[{data}]({folder}/{name_page(data)}.md)" for data in sorted({one.data for one in runs})),
        figure_table=tabulate(heads, [one.row() for one in figures], words=("on", "difference", "grade", heads[-1])),
        order_table=tabulate((*first, "hang on"), orders, words=("on", "recipe, epochs", "sign", "size", "hang on")),
        left=", ".join(f"{order.name} ({', '.join(order.unlike)})" for order in left) or "none",
    )


def write_attribution(
    tasks: Sequence[Task], results: Sequence[Result], churn: Churn, runs: Mapping[str, Reported]
) -> str:
    """Return the page on what the equilibrium is worth: beside controls, other kernels, ResNet-18, and its costs."""
    pairs = [order for group in list_orders(tasks, churn)[0].values() for order, _ in group]
    heads = ("beside it", "held-out images", "equilibrium, %", "instead, %", "difference ± SE", "p")
    first = ("first", "second", "on", "recipe, epochs", "first less second ± SE", "p", "seeds", "parameters ÷")
    kernels = [
        (
            a.model,
            b.model,
            order.pictures,
            row[2],
            row[4],
            row[5],
            row[9],
            f"{(a.parameters or 0) / (b.parameters or 1):.2f}",
        )
        for order in pairs
        for a, b, row in [(order.ahead, order.behind, order.row(1.0))]
        if a.model.startswith(("geq-", "kerdeq-")) and b.model in KERNELS
    ]
    steps = json.loads(BENCHMARK.read_text(encoding="utf-8"))["results"][0]["rows"]
    return render(
        "attribution.md",
        steps=tabulate(heads, [*compare_steps(runs, churn), *compare_small()], words=()),
        controls=compare_controls(results, churn),
        kernels=tabulate(first, kernels, words=("second", "on", "recipe, epochs")),
        costs=tabulate_costs(tasks, churn),
        geq=steps[0],
        resnet=next(row for row in steps if row["model"] == "resnet18"),
    )


def render(name: str, **values: Any) -> str:
    """Return the page that a template beside this file makes of some values."""
    source = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return Environment(keep_trailing_newline=True).from_string(source).render(values)


def compare_steps(runs: Mapping[str, Reported], churn: Churn) -> list[tuple[str, ...]]:
    """Return a row for each pair of runs at full size that are both here, at their last epoch."""
    rows = []
    for first, second, words in STEPS:
        if first in runs and second in runs:
            a, b = (runs[name].rows[-1]["validation"] for name in (first, second))
            noise = sum(one["accuracy"] * (1 - one["accuracy"]) / one["images"] for one in (a, b))
            gap = add_noise(a["accuracy"] - b["accuracy"], noise, churn.share**2 * noise, a["images"], churn)
            shares = [f"{100 * one['accuracy']:.2f}" for one in (a, b)]
            rows.append((words, f"{a['images']:,}", *shares, gap.describe(), format_p(gap.p())))
    return rows


def compare_controls(results: Sequence[Result], churn: Churn) -> str:
    """Return the table of the controls that met the test images, beside the model with most seeds trained likewise."""
    rows = []
    for control in (found for found in results if found.split == "test" and is_control(found)):
        same = [found for found in results if (found.model, found.data) == (control.model, control.data)]
        whole = [found for found in same if not (list_unlike(found, control) or is_control(found))]
        for found in sorted(whole, key=lambda found: -found.seeds)[:1]:
            gap, words = subtract(found, control, churn), f"`{' '.join(control.settings)}`"
            shares = [f"{100 * one.accuracy:.2f}" for one in (found, control)]
            seeds = f"{found.seeds}, {control.seeds}"
            rows.append((words, control.data, *shares, gap.describe(), format_p(gap.p()), seeds))
    heads = ("control", "on", "equilibrium, %", "control, %", "difference ± SE", "p", "seeds")
    return tabulate(heads, rows, words=("on",)) if rows else "Not run yet."


def compare_small() -> list[tuple[str, ...]]:
    """Return a row for each sweep of small networks: seed by seed, by t."""
    rows = []
    for name, words in SMALL.items():
        cells = json.loads((RECIPE / f"{name}.json").read_text(encoding="utf-8"))["cells"]
        found: dict[str, dict[str, float]] = {}
        for cell in cells:
            values = cell.get("values", cell)
            found.setdefault(values["steps"], {})[str(values["seed"])] = cell["validation"]
        one, whole = found["1"], found["equilibrium"]
        gaps = [whole[seed] - one[seed] for seed in whole]
        gap = Difference(fmean(gaps), stdev(gaps) / math.sqrt(len(gaps)), len(gaps) - 1)
        shares = [f"{100 * fmean(some.values()):.1f}" for some in (whole, one)]
        rows.append(
            (f"small, {words}, one step", f"40,000, {len(gaps)} seeds", *shares, gap.describe(), format_p(gap.p()))
        )
    return rows


def tabulate_costs(tasks: Sequence[Task], churn: Churn) -> str:
    """Return the table of the models beside the ResNet-18 of as many epochs, and beside that of as many seconds."""
    rows = []
    for one in tasks:
        results = [found for some in one.reached.values() for found in some]
        for base, found in itertools.product((found for found in results if found.model in EXPLICIT), results):
            ours, theirs = (median(run.seconds for run in some.runs) for some in (found, base))
            unlike = list_unlike(found, base)
            equal = 0.75 < ours / theirs < 4 / 3 and unlike == ["training.epochs"]
            if found.model in EXPLICIT or unlike and not equal:
                continue
            size = f"{(found.parameters or 0) / 1e6:.1f}"
            costs = (f"{(found.parameters or 0) / (base.parameters or 1):.2f}", f"{ours / theirs:.1f}")
            words = f"{'Muon' if base.runs[0].config.optimizer.muon else 'SGD'}, {found.epochs}"
            words += f" beside {base.epochs}" if equal else ""
            gap = subtract(found, base, churn).describe()
            rows.append((found.model, size, one.pictures, words, f"{100 * found.accuracy:.2f}", gap, *costs))
    rows.sort(key=lambda row: (" beside " not in row[3], row[2], row[3], list(MODELS).index(row[0])))
    heads = ("model", "million parameters", "on", "recipe, epochs", "test, %", "less ResNet-18's ± SE", "parameters ÷")
    return tabulate((*heads, "time ÷"), rows, words=("on", "recipe, epochs"))


def write_data_set(chapter: Chapter, file: Path) -> None:
    """Write the page of all runs on a data set, with links to the pages that some runs have of their own."""
    revised = sum(bool(one.run.environment().get("revision")) for one in chapter.runs)
    silent = f"{len(chapter.runs) - revised} of them do not say at which revision of the source they ran."
    lead = f"{len(chapter.runs)} runs; {silent}"
    sections = [dataclasses.replace(one, chapter=True) for one in (compose_results(chapter), compose_settings(chapter))]
    write_page(Page(f"Runs on {chapter.data}", lead, sections), file)
    links = [f"[{one.label}](runs/{one.label}.md)" for one in chapter.runs if has_page(one)]
    if links:
        file.write_text(
            f"{file.read_text(encoding='utf-8')}\nPages of single runs: {', '.join(links)}.\n", encoding="utf-8"
        )


def has_page(one: Reported) -> bool:
    """Return whether more than the scores was measured of a run, so that it has a page of its own."""
    return any(one.run.part(part) for part in SECTIONS if part != "scores")


def name_page(data: str) -> str:
    """Return the name of a data set's page, without its suffix."""
    return "-".join("".join(c if c.isalnum() else " " for c in data).split())


def tabulate(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], words: tuple[str, ...]) -> str:
    """Return a table; the first column and those in `words` stand to the left."""
    rule = "|".join(":--" if head in (heads[0], *words) else "--:" for head in heads)
    cells = [" | ".join(cell.replace("|", "\\|") or "–" for cell in row) for row in rows]
    return "\n".join([f"| {' | '.join(heads)} |", f"|{rule}|", *(f"| {row} |" for row in cells)])


def tally(words: Sequence[str]) -> str:
    """Return how often each word is among some, the most frequent first."""
    kinds = sorted(set(words) - {"–"}, key=lambda word: (-words.count(word), word))
    return ", ".join(f"{words.count(word)} {word}" for word in kinds) or "none"
