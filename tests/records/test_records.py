"""The comparison of records with the papers, on runs made by hand and on those of this repository."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure
from run_folders import make_run, write_test_scores

from kerneq.lab.report import render
from kerneq.lab.report.results import Reported, Result, load_experiments
from kerneq.lab.run.config import EXPERIMENTS, ConfigError, load
from kerneq.models import MODELS, our_accuracies, task
from records.__main__ import ACCURACIES, FOLDERS, PAGE, main, write_results
from records.published import Task

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path):
    """Makes a run folder of this name."""
    return lambda name, *args, **settings: make_run(tmp_path / name, *args, **settings)


def test_the_papers_tables_come_first_and_no_test_accuracy_chooses_what_counts(run, tmp_path):
    def tested(name: str, base: str, accuracy: float, *settings: str, unknown: float | None = None) -> None:
        folder = run(name, accuracy, settings=["data.validation=0", *settings], checkpoint=False, base=base)
        unseen = {"images": 2000, "accuracy": unknown} if unknown else None
        write_test_scores(folder, {"images": 10000, "accuracy": accuracy}, unseen)

    features = "model.features=[64, 64, 128, 128, 256, 256]"
    tested("geq-cutout", "geq-5m-cifar10", 0.97, "augment.cutout=16", features)
    tested("geq-seed1", "geq-5m-cifar10", 0.9543, "seed=1", "training.validate_epochs=9", "training.graph=false")
    tested("geq", "geq-5m-cifar10", 0.9523)
    tested("geq-as-published", "geq-5m-cifar10-paper", 0.91)
    tested("resnet", "resnet18-cifar10", 0.9625)
    tested("resnet-short", "resnet18-cifar10", 0.9545, "training.epochs=60")
    tested("resnet-short-seed1", "resnet18-cifar10", 0.9541, "training.epochs=60", "seed=1")
    tested("mopteq", "mopteq-8m-cifar10", 0.9493)
    tested("mopteq-short", "mopteq-8m-cifar10", 0.9493, "training.epochs=60")
    tested("mopteq-short-seed1", "mopteq-8m-cifar10", 0.9489, "training.epochs=60", "seed=1")
    tested("super", "geq-8m-superclass", 0.85)
    tested("super-seed1", "geq-8m-superclass", 0.85, "seed=1", unknown=0.78)
    tested("linear", "mopteq-8m-superclass", 0.83, unknown=0.77)
    write_results([tmp_path], tmp_path / "page.md", tmp_path / "page.json")
    text = (tmp_path / "page.md").read_text()
    assert text.index("## The papers' figures") < text.index("## cifar10")
    rows = [line for line in text.splitlines() if line.startswith("| geq-5m | 12,345 | ")]
    first = "95.33 ± 0.14, 2 seeds | +0.53 | higher | geq, …-seed1 | geq-5m-cifar10 data.validation=0.0 (and seed=1) |"
    assert first in rows[0]
    assert "91.00 (90.42–91.55) | −3.80 | – | geq-as-published | geq-5m-cifar10-paper |" in rows[1]
    assert len(rows) == 2, "one of an experiment"
    quoted = r"augment.cutout=16 'model.features=\[64, 64, 128, 128, 256, 256\]' |"
    assert text.count(quoted) == 1, "as a shell takes it, in the chapter"
    assert "| geq-8m | – | – | 95.6 ± 0.2 | not run yet | – |" in text and "No run yet on cifar100, " in text
    unseen = "| geq-8m | 12,345 | 60 | 80.1 ± 0.6 | 78.00 (76.13–79.76) | −2.10 | as published | super-seed1 |"
    assert f"{unseen} geq-8m-superclass seed=1 data.validation=0.0 |" in text, (
        "the one of two seeds that has the figure"
    )
    assert "| run | unseen sub-classes |\n| :-- | --: |\n" in text and "\n| super-seed1 | 78.00% |\n" in text
    assert "| +0.33 | as published | mopteq |" in text and "| −0.40 | as published | linear |" in text
    assert "Of 7 published figures: 4 higher, 3 as published." in text
    orders = "Of 4 published orders of two models: 1 reversed, 1 confirmed, 1 smaller than published, 1 undecided."
    assert orders in text
    reversed_order = "| geq-5m before resnet18 | cifar10 | +1.3 | −0.92 | reversed | 95.33 of geq, 2 seeds |"
    assert f"\n{reversed_order} 96.25 of resnet |\n" in text
    # Of MOptEq and ResNet-18 those of 60 epochs are compared: two seeds each.
    assert "| mopteq-8m before resnet18 | cifar10 | +1.1 | −0.52 | smaller than published | 94.91 of " in text
    assert "| geq-8m before mopteq-8m | unseen-classes | +2.7 | +1.00 | undecided |" in text
    assert "| geq-8m before mopteq-8m | super-classes | +0.8 | +2.00 | confirmed | 85.00 of super, 2 seeds |" in text
    accuracies = json.loads((tmp_path / "page.json").read_text())
    assert accuracies["geq-5m"]["cifar10"]["seeds"] == 2 and set(accuracies["geq-8m"]) == {
        "super-classes",
        "unseen-classes",
    }
    assert accuracies["geq-5m"]["cifar10"]["accuracy"] == pytest.approx(0.9533)
    render([tmp_path], tmp_path / "page.json")
    results = json.loads((tmp_path / "page.json").read_text())["results"]
    found = next(result for result in results if result["model"] == "geq-5m")
    assert (found["seeds"], found["settings"], found["images"]) == (2, ["geq-5m-cifar10", "data.validation=0.0"], 10000)
    assert [Path(folder).name for folder in found["runs"]] == ["geq", "geq-seed1"]


def test_what_differs_in_more_than_the_model_or_ended_early_decides_nothing(run, tmp_path):
    def tested(name: str, base: str, accuracy: float, *settings: str) -> Path:
        folder = run(name, settings=["data.validation=0", *settings], checkpoint=False, base=base)
        write_test_scores(folder, {"images": 10000, "accuracy": accuracy})
        return folder

    for seed, (five, eight) in enumerate(((0.9602, 0.9655), (0.9588, 0.9671), (0.9611, 0.9660)), start=1):
        tested(f"geq-{seed}", "geq-5m-cifar10", five, f"seed={seed}")
        tested(f"large-{seed}", "geq-8m-cifar10", eight, f"seed={seed}", "training.epochs=125")
    tested("half-batches", "geq-8m-cifar10", 0.95, "training.batch_size=256", "training.epochs=125")
    tested("resnet", "resnet18-cifar10", 0.9613)
    tested("short", "mopteq-8m-cifar10", 0.9493, "training.epochs=60", "augment.cutout=16")
    early = tested("early", "geq-5m-cifar10", 0.95, "seed=3")
    rows = (early / "metrics.jsonl").read_text().splitlines()
    (early / "metrics.jsonl").write_text("\n".join(rows[:80]) + "\n")
    write_results([tmp_path], tmp_path / "page.md", tmp_path / "page.json")
    text = (tmp_path / "page.md").read_text()
    assert "| geq-8m before geq-5m | cifar10 | +0.8 | +0.62 | confirmed | 96.62 of large-1, 3 seeds | 96.00 of" in text
    assert "| geq-5m before resnet18 | cifar10 | +1.3 | −0.13 | smaller than published |" in text
    confounded = "+1 | +1.69 | not compared: another augment.cutout, training.epochs | 96.62 of large-1, 3 seeds |"
    assert confounded in text.replace("\\", "")
    [row] = (line for line in text.splitlines() if line.startswith("| geq-5m | 12,345 | "))
    assert "96.00 ± 0.12, 3 seeds | +1.20 | higher | geq-1, geq-2, geq-3 |" in row, "early is no seed of these"
    assert "| 80 of 125 |" in text
    papers, _, chapter = text.partition("\n## cifar10\n")
    assert "| large-1, large-2, large-3 |" in papers and "half-batches" not in papers, "a seed is no change"
    assert "| half-batches |" in chapter
    assert text.index("| large-2 |") < text.index("| **large-1, mean ± std** |") < text.index("| large-1 |")


def test_accuracies_on_the_same_pictures_are_compared_picture_by_picture():
    def record(name: str) -> SimpleNamespace:
        return SimpleNamespace(evaluation={"classification": {"test": {"wrong": wrong[name]}}})

    def reached(accuracy: float, *runs: str, std: float | None = None) -> Result:
        words = dict.fromkeys(("data", "subset", "device"), "")
        return Result(
            **words, model="geq-5m", split="test", accuracy=accuracy, std=std, seeds=len(runs), images=1000,
            parameters=None, published=None, epochs=1, seconds=0.0, settings=(),
            runs=tuple(map(record, runs)),
        )  # fmt: skip

    wrong = {"a": [*range(40)], "b": [*range(30), *range(50, 70)], "twin": [*range(40)], "old": None}
    pair = Task("cifar10", "cifar10", {})
    a, b = reached(0.96, "a"), reached(0.95, "b")
    # McNemar: 10 pictures are wrong in a only, 20 in b only. For another seed of a single run stands the published ±.
    published = 0.001**2
    assert pair.variance(a, b) == pytest.approx((30 - 10**2 / 1000) / 1000**2 + 2 * published)
    assert pair.variance(a, reached(0.96, "twin")) == pytest.approx(2 * published)
    alone = (0.96 * 0.04 + 0.95 * 0.05) / 1000
    assert pair.variance(a, reached(0.95, "old")) == pytest.approx(alone + 2 * published)
    seeds = reached(0.96, "a", "twin", std=0.002)  # two seeds that agree on every picture, and a std of other causes
    assert pair.variance(seeds, b) == pytest.approx(pair.variance(a, b) - published + 0.002**2 / 2)
    some = reached(0.96, "old", "a", std=0.002)  # the pictures of one of two seeds
    assert pair.variance(some, b) == pytest.approx(pair.variance(seeds, b))


def test_the_first_line_of_an_experiment_names_the_published_figure():
    for name, config in load_experiments().items():
        said = (EXPERIMENTS / f"{name}.toml").read_text().splitlines()[0]
        entry, data = MODELS[config.model.name], config.data
        if ", published " in said:
            assert f"{entry.published[task(data.name, data.subset)]}" in said, name
        if data.subset == "four-of-five-subclasses":
            assert f"unknown {entry.published['unseen-classes']} %" in said, name
    named = {(config.model.name, task(config.data.name, config.data.subset)) for config in load_experiments().values()}
    published = {(model, name) for model, entry in MODELS.items() for name in entry.published}
    assert {(model, name) for model, name in published if name != "unseen-classes"} <= named


@pytest.mark.parametrize("pictures", ["mnist", "cifar100", "cifar10 at 64 px", "folder:flowers"])
def test_a_part_of_another_data_set_is_no_task_of_the_papers(pictures):
    published = {name for entry in MODELS.values() for name in entry.published}
    for subset, split in (("first-five-classes", "test"), ("four-of-five-subclasses", "unknown")):
        assert task(pictures, subset, split).partition(" at ")[0] not in published


def test_a_run_that_no_experiment_can_be_made_into_is_reported_and_counts_last(run, tmp_path, monkeypatch):
    def refuse(name, words):
        if "augment.cutout=16" in words:
            raise ConfigError("no such run")
        return load(name, words)

    run("a-stranger", 0.9, settings=["augment.cutout=16"], base="geq-5m-cifar10")
    run("known", 0.8, base="geq-5m-cifar10")
    load_experiments()  # they are read once, before `load` refuses anything
    monkeypatch.setattr(sys.modules[Reported.__module__], "load", refuse)
    write_results([tmp_path], tmp_path / "page.md", tmp_path / "page.json")
    text = (tmp_path / "page.md").read_text()
    assert text.index("| known | geq-5m-cifar10 |") < text.index("| a-stranger | – |")


def test_what_the_repository_says_of_its_results_is_what_its_records_hold(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    # The words are compared, not the figures, of which there are dozens.
    monkeypatch.setattr(Figure, "savefig", lambda figure, buffer, **settings: buffer.write("<svg></svg>"))
    write_results(FOLDERS, tmp_path / "results.md", tmp_path / "results.json")
    for file in (PAGE, ACCURACIES):
        assert (tmp_path / file.name).read_text() == file.read_text(), "`make results` brings it up to date"
    assert our_accuracies()["geq-5m"]["cifar10"].runs == ["kerneq/weights/geq-5m-cifar10"]


def test_the_command_writes_both_files_and_what_it_cannot_read_is_a_sentence(run, tmp_path, capsys):
    run("geq", 0.9, base="geq-5m-cifar10")
    options = ["--page", f"{tmp_path / 'page.md'}", "--accuracies", f"{tmp_path / 'page.json'}"]
    main([f"{tmp_path}", *options])
    assert "page.json" in capsys.readouterr().out and "## The papers' figures" in (tmp_path / "page.md").read_text()
    with pytest.raises(SystemExit, match="records: .*nowhere is not a run folder"):
        main([f"{tmp_path / 'nowhere'}", *options])
