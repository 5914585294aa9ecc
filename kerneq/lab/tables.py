"""The tables that commands print, but for those of predictions and sweeps, which are beside their numbers."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.table import Column, Table
from rich.text import Text

from ..loading import names as shipped_names
from ..models import MODELS, Measured, build, our_accuracies, parameters
from .console import describe_seconds, numbers, plain
from .data.datasets import Description
from .evaluate import PARTS, over_seeds
from .evaluate.parts import PlannedPart
from .evaluate.scores import spread
from .run import SHIPPED, Run
from .training import metrics
from .verify.search import ROUNDING, Finding, Verdict


def summary_table(rows: Iterable[tuple[str, str]]) -> Table:
    """Names and values, a line each, without borders."""
    table = Table.grid(padding=(0, 2), pad_edge=True)
    for name, value in rows:
        table.add_row(plain(name, "dim"), plain(value))
    return table


def plan_table(plan: Iterable[PlannedPart]) -> Table:
    """What will be measured of a run, with the time it takes, and what is left out, with the reason."""
    table = Table.grid(padding=(0, 2), pad_edge=True)
    for step in plan:
        duration = "–" if step.left_out else "?" if step.seconds is None else describe_seconds(step.seconds)
        words = plain(step.left_out, "dim") if step.left_out else plain(PARTS[step.name].sentence)
        table.add_row(plain(step.name), Text(duration, no_wrap=True), words)
    return table


def comparison_table(runs: Sequence[Run]) -> Table:
    """The metrics of several runs on their test images, a row each, a dash where one was not evaluated."""
    headings = (metric.title.replace(" ", "\n") for metric in _tested())  # which leave room for the run
    table = Table(Column("run", overflow="fold"), *numbers(*headings))
    for run in runs:
        table.add_row(plain(run.path), *(metric.text(run.test()) for metric in _tested()))
    return table


def describe_seeds(runs: Sequence[Run]) -> list[str]:
    """Mean ± standard deviation of the runs that differ in their seed only, a sentence for each group."""
    sentences = []
    for group in over_seeds(runs):
        means, tests = [], [run.test() for run in group]
        for metric in _tested():
            shares = [test[metric.name] for test in tests if test.get(metric.name) is not None]
            told = [metric.format.format(number) for number in spread(shares)] if len(shares) == len(tests) else ["–"]
            means.append(f"{metric.title} {' ± '.join(told)}")
        paths = ", ".join(str(run.path) for run in group)
        sentences.append(f"{paths}, mean ± std of {len(group)} seeds: {', '.join(means)}")
    return sentences


def _tested() -> list[metrics.Metric]:
    """The metrics of test images; those over adjoints are of training."""
    return [metric for metric in metrics.METRICS if metric.over != "adjoints"]


def demo_table(runs: Iterable[Run]) -> Table:
    """The models of the demo with their scores, sizes and training times."""
    shown = [metric for metric in metrics.METRICS if metric.demo]
    columns = numbers(*(metric.heading for metric in shown), "size", "seconds")
    table = Table(Column("model", no_wrap=True), *columns, title="Embedded digits: 8×8 pictures, 10 classes")
    for run in runs:
        size = millions(run.evaluation()["parameters"])
        table.add_row(plain(run.name), *(metric.text(run.test()) for metric in shown), size, f"{run.seconds():.1f}")
    return table


def data_table(found: Iterable[Description], root: Path) -> Table:
    """The data sets: whether each was found, where, or how to get it."""
    title = plain(f"Data sets under {root} (set KERNEQ_DATA to look elsewhere)")
    narrow = [Column(heading, no_wrap=True) for heading in ("name", "found")]
    table = Table(*narrow, Column("where, or how to get it", overflow="fold"), title=title, show_lines=True)
    for row in found:
        place = row.path or "part of the installation"
        where = place if row.found else row.get if row.path is None else row.problem
        words = Text.assemble(plain(where), "\n", (f"licence: {row.licence}", "dim"))
        table.add_row(row.name, "[green]yes" if row.found else "[yellow]no", words)
    own = "pictures of your own: one folder for each class in PATH, or in PATH/train and PATH/test"
    example = "kerneq train geq-tiny-cifar10 data.name=folder:PATH data.size=32 training.batch_size=16"
    table.add_row("folder:PATH", "", Text.assemble(own, "\n", (example, "bold")))
    return table


def claims_table(findings: Iterable[Finding]) -> Table:
    """The claims of the papers: the verdict on each, and the worst case that was found."""
    colours = {Verdict.HOLDS: "green", Verdict.CORRECTED: "yellow", Verdict.FAILS: "bold red"}
    title = "Worst case found: left-hand side over right-hand side, as published → corrected"
    columns = [Column("claim"), Column("verdict", no_wrap=True), *numbers("worst", "s")]
    table = Table(*columns, title=title, box=None, padding=(0, 1, 0, 0))
    for finding in findings:
        why = finding.evidence.where if finding.erratum is None else f"{finding.erratum}. {finding.evidence.where}"
        words = Text.assemble(f"{finding.published}: {finding.claim}\n", (why, "dim"))
        verdict = Text(finding.verdict.value, colours[finding.verdict])
        table.add_row(words, verdict, finding.worst, f"{finding.seconds:.1f}")
    return table


def describe_verdicts(findings: Sequence[Finding]) -> str:
    """How many claims have each verdict."""
    counts = Counter(finding.verdict.value for finding in findings)
    told = ", ".join(f"{count} {word}" for word, count in counts.items())
    seconds = sum(finding.seconds for finding in findings)
    return f"{len(findings)} claims in {seconds:.0f} s: {told}. A ratio above 1 + {ROUNDING:g} breaks a claim."


def models_table() -> Table:
    """The models of the zoo, a row for each data set on which one has an accuracy, published or ours."""
    left = {name: Column(name, no_wrap=True) for name in ("name", "data", "ours, %")}
    columns = [left["name"], *numbers("size", "eq."), left["data"], *numbers("paper, %"), left["ours, %"]]
    title = "Models: kerneq train … model.name=NAME"
    table = Table(*columns, title=title, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    equations, every = _equations(), our_accuracies()
    for name, entry in MODELS.items():
        size, ours = parameters(build(name)), every.get(name, {})
        first = [name, millions(size), str(equations.index(entry.equation) + 1)]
        for data in dict.fromkeys((*entry.published, *ours)) or ("",):
            published = f"{entry.published[data]}".replace(" ", "") if data in entry.published else ""
            accuracy = accuracy_text(ours[data], size) if data in ours else ""
            table.add_row(*first, data.replace(" at ", "@").replace(" px", ""), published, accuracy)
            first = [""] * 3
    return table


def describe_models() -> list[str]:
    """The sentences below the table of the models: equations, papers, and weights that ship."""
    papers: dict[str, list[str]] = {}
    for name, entry in MODELS.items():
        papers.setdefault(entry.paper, []).append(name)
    shipped = (f"{name} ({Run(SHIPPED / name).test()['accuracy']:.2%})" for name in shipped_names())
    return [
        *(f"{place}: {equation}" for place, equation in enumerate(_equations(), start=1)),
        *(f"{paper}: {', '.join(names)}" for paper, names in papers.items()),
        "ours: on the test images, of the run nearest to today's recipe, ± over seeds; docs/results.md has all.",
        "In brackets the epochs trained, and the size where it was another.",
        f"Trained weights that ship, for kerneq predict: {', '.join(shipped)}",
    ]


def _equations() -> list[str]:
    """The equations of the models, in the order of their numbers in the table."""
    return list(dict.fromkeys(entry.equation for entry in MODELS.values()))


def accuracy_text(found: Measured, size: int) -> str:
    """A test accuracy of ours with its epochs; where the run's model had another size than the named one, with that."""
    spread = f"±{100 * found.std:.2f}" if found.std is not None else ""
    other = f", {millions(found.parameters)}" if millions(found.parameters) != millions(size) else ""
    return f"{100 * found.accuracy:.2f}{spread} ({found.epochs}{other})"


def millions(count: int) -> str:
    """A number of parameters in few digits."""
    return f"{count / 1e6:.1f}M" if count >= 100_000 else f"{count / 1e3:.1f}k"
