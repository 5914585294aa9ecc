"""The comparison of records with the papers, on runs made by hand and on those of this repository."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure as Canvas
from run_folders import make_run, write_test_scores
from scipy import stats

from kerneq.lab.report import render
from kerneq.lab.report.results import Reported, Result, load_experiments
from kerneq.lab.run.config import EXPERIMENTS, ConfigError, differences, load
from kerneq.models import MODELS, our_accuracies, task
from records.__main__ import ACCURACIES, FOLDERS, PAGE, main, write_results
from records.evidence import TWINS
from records.noise import Churn, Difference, adjust, compare_pictures, pool_churn, subtract

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tested(tmp_path):
    """Makes the folder of a run that met the test images."""

    def make(name: str, base: str, accuracy: float, *settings: str, unknown: float | None = None) -> Path:
        settings = [*([] if base.endswith("-paper") else ["data.validation=0"]), *settings]
        folder = make_run(tmp_path / "runs" / name, settings=settings, checkpoint=False, base=base)
        write_test_scores(
            folder,
            {"images": 10000, "accuracy": accuracy, "loss": 1.0},
            {"images": 2000, "accuracy": unknown} if unknown else None,
        )
        return folder

    return make


def write(tmp_path: Path) -> str:
    """The page about the runs that `tested` made."""
    write_results([tmp_path / "runs"], tmp_path / "page.md", tmp_path / "page.json")
    return (tmp_path / "page.md").read_text()


def test_every_published_figure_has_a_grade_and_no_test_accuracy_chooses_what_counts(tested, tmp_path):
    tested("geq-cutout", "geq-5m-cifar10", 0.97, "augment.cutout=16")
    tested("geq-seed1", "geq-5m-cifar10", 0.9543, "seed=1", "training.validate_epochs=9", "training.graph=false")
    tested("geq", "geq-5m-cifar10", 0.9523)
    tested("resnet-as-published", "resnet18-cifar10-paper", 0.935)
    tested("resnet-as-published-1", "resnet18-cifar10-paper", 0.937, "seed=1")
    tested("resnet", "resnet18-cifar10", 0.9625)
    tested("mdeq", "mdeq-10m-cifar10", 0.9, "training.epochs=12")
    tested("super", "geq-8m-superclass", 0.85)
    tested("super-seed1", "geq-8m-superclass", 0.85, "seed=1", unknown=0.78)
    text = write(tmp_path)
    ours = "our recipe, nine residual blocks, another stem, another norm, another γ"
    assert f"| geq-5m | cifar10 | 94.8 ± 0.1 | 95.33 ± 0.14 | +0.53 higher | 125 | 2 | C | {ours} |" in text
    assert "| resnet18 | cifar10 | 93.5 ± 0.2 | 96.25 | +2.75 higher | 125 | 1 | C | our recipe |" in text
    assert "| resnet18 | cifar10 | 93.5 ± 0.2 | 93.60 ± 0.14 | +0.10 as published | 200 | 2 | B | – |" in text
    assert "90.00 | −4.20 not compared | 12 | 1 | C | our recipe, untuned |" in text, "short: never lower"
    assert "| geq-8m | unseen-classes | 80.1 ± 0.6 | 78.00 | −2.10 " in text, "of the seed that has the figure"
    assert "| kerdeq-8m | cifar10 | 95.3 ± 0.2 | – | – | – | – | D | no run |" in text
    accuracies = json.loads((tmp_path / "page.json").read_text())
    assert accuracies["geq-5m"]["cifar10"]["seeds"] == 2
    assert accuracies["geq-5m"]["cifar10"]["accuracy"] == pytest.approx(0.9533)
    render([tmp_path], tmp_path / "page.json")
    results = json.loads((tmp_path / "page.json").read_text())["results"]
    found = next(result for result in results if result["model"] == "geq-5m")
    assert (found["seeds"], found["settings"], found["images"]) == (2, ["geq-5m-cifar10", "data.validation=0.0"], 10000)
    assert [Path(folder).name for folder in found["runs"]] == ["geq", "geq-seed1"]


def test_orders_are_of_equal_trainings_and_those_of_a_single_run_stand_under_it(tested, tmp_path):
    for seed, (five, eight) in enumerate(((0.9602, 0.9655), (0.9588, 0.9671), (0.9611, 0.9660))):
        tested(f"geq-{seed}", "geq-5m-cifar10", five, f"seed={seed}")
        tested(f"large-{seed}", "geq-8m-cifar10", eight, f"seed={seed}", "training.epochs=125")
    tested("half-batches", "geq-8m-cifar10", 0.95, "training.batch_size=256", "training.epochs=125")
    tested("explicit", "geq-8m-cifar10", 0.97, "seed=1", "training.epochs=125", "model.explicit=true")
    tested("resnet", "resnet18-cifar10", 0.9313)
    tested("short", "mopteq-8m-cifar10", 0.9493, "training.epochs=60", "augment.cutout=16")
    early = tested("early", "geq-5m-cifar10", 0.95, "seed=3")
    rows = (early / "metrics.jsonl").read_text().splitlines()
    (early / "metrics.jsonl").write_text("\n".join(rows[:80]) + "\n")
    text = write(tmp_path)
    orders = text.partition("## Published orders")[2].partition("\n## ")[0]
    rows = [line for line in orders.splitlines() if " before " in line and line.startswith("|")]
    assert rows[0].startswith("| geq-8m before geq-5m | cifar10 | Muon, 125 | +0.8 | +0.62 ± ")
    assert rows[0].endswith("| confirmed | compatible | 3, 3 | – |") and "96.00 ± 0.12" in text, "early is no seed"
    assert [row.split(" | ")[-1] for row in rows[1:]] == ["resnet |"] * 2
    assert "confirmed | larger | 3, 1 | resnet |" in orders
    assert "geq-8m before mopteq-8m (augment.cutout, training.epochs)" in orders.replace("\\", "")
    attribution = (tmp_path / "page-pages/attribution.md").read_text()
    control = (
        "| `geq-8m-cifar10 seed=1 data.validation=0.0 model.explicit=true training.epochs=125` | cifar10 | 96.62 | "
    )
    assert f"{control}97.00 | −0.38 ± " in attribution, "and it is no run of the published model"
    assert "| geq-8m | 0.0 | cifar10 | Muon, 125 | 96.62 | +3.49 ± " in attribution
    page = (tmp_path / "page-pages/cifar10.md").read_text()
    assert "| half-batches | geq-8m | one seed (0) |" in page and "80 of 125 epochs" in page
    first = page.index("Muon, CutMix on 50 %, 125 epochs")
    assert first < page.index("| geq-0 |") < page.index("| geq-2 |") < page.index("| resnet |"), "by model and seed"


def make_result(accuracy: float, *wrong: list[int] | None, std: float | None = None) -> Result:
    """A result of runs that were wrong about these of 1 000 pictures."""
    words = dict.fromkeys(("data", "subset", "device"), "")
    runs = [SimpleNamespace(evaluation={"classification": {"test": {"wrong": places}}}) for places in wrong]
    return Result(
        **words, model="geq-5m", split="test", accuracy=accuracy, std=std, seeds=len(runs), images=1000,
        parameters=None, published=None, epochs=1, seconds=0.0, settings=(), runs=tuple(runs),
    )  # fmt: skip


def test_accuracies_on_the_same_pictures_are_compared_picture_by_picture():
    a, b = make_result(0.96, [*range(40)]), make_result(0.95, [*range(30), *range(50, 70)])
    # McNemar: 10 pictures are wrong in a only, 20 in b only.
    assert compare_pictures(a, b) == pytest.approx((30 - 10**2 / 1000) / 1000**2)
    assert compare_pictures(a, a) == 0
    alone = (0.96 * 0.04 + 0.95 * 0.05) / 1000
    assert compare_pictures(a, make_result(0.95, None)) == pytest.approx(alone)
    some = make_result(0.96, None, [*range(40)], std=0.002)  # the pictures of one of two seeds
    assert compare_pictures(some, b) == pytest.approx(compare_pictures(a, b))


def test_the_noise_of_seeds_is_pooled_and_t_counts_its_degrees_of_freedom():
    lucky = make_result(0.96, [*range(40)], [*range(40)], [*range(40)], std=1e-5)
    other = make_result(0.95, *[[*range(50)]] * 3, std=0.004)
    share = 0.95 * 0.05 / 1000
    churn = pool_churn([lucky, other, make_result(0.9, None)])
    assert churn.df == 4 and churn.share**2 == pytest.approx(0.004**2 / share / 2, rel=1e-3)
    assert churn.variance(other) == pytest.approx(0.004**2 / 6, rel=1e-3)
    found = subtract(lucky, other, churn)
    pictures, seeds = compare_pictures(lucky, other), churn.variance(lucky) + churn.variance(other)
    assert found.error**2 == pytest.approx(pictures + seeds)
    assert found.df == pytest.approx((pictures + seeds) ** 2 / (seeds**2 / 4 + pictures**2 / 999))
    sample = [0.5, 0.2, 0.9, -0.3, 1.5, 0.2]
    gap = Difference(sum(sample) / 6, stats.sem(sample), 5)
    assert gap.p() == pytest.approx(stats.ttest_1samp(sample, 0).pvalue)
    assert gap.p(0.5, 0.0) == pytest.approx(1.0)
    assert pool_churn([]) == Churn(0.5, 1)


def test_holms_p_are_those_of_a_worked_example():
    assert adjust([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert adjust([0.6, 0.7]) == [1.0, 1.0] and adjust([]) == []


def test_models_that_are_called_one_function_differ_in_a_unit_of_length_alone():
    for one, other in TWINS.items():
        for data in ("cifar10", "cifar100"):
            a, b = (load(f"{name}-{data}") for name in (one, other))
            assert set(differences(a, b)) == {"model.name", "model.kernel.gamma"} and a.model.settings.length is None


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


def test_a_run_that_no_experiment_can_be_made_into_is_reported(tested, tmp_path, monkeypatch):
    def refuse(name, words):
        if "augment.cutout=16" in words:
            raise ConfigError("no such run")
        return load(name, words)

    tested("a-stranger", "geq-5m-cifar10", 0.9, "augment.cutout=16")
    tested("known", "geq-5m-cifar10", 0.8)
    load_experiments()  # they are read once, before `load` refuses anything
    monkeypatch.setattr(sys.modules[Reported.__module__], "load", refuse)
    assert "| 80.00 |" in write(tmp_path), "it counts last"
    assert "| a-stranger | geq-5m |" in (tmp_path / "page-pages/cifar10.md").read_text()


def test_what_the_repository_says_of_its_results_is_what_its_records_hold(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    # The words are compared, not the figures, of which there are dozens.
    monkeypatch.setattr(Canvas, "savefig", lambda figure, buffer, **settings: buffer.write("<svg></svg>"))
    write_results(FOLDERS, tmp_path / "results.md", tmp_path / "results.json")
    pages = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.md"))
    kept = [PAGE, *PAGE.parent.glob("results-pages/**/*.md")]
    assert [PAGE.parent / page for page in pages] == sorted(kept)
    for page in pages:
        assert (tmp_path / page).read_text() == (PAGE.parent / page).read_text(), "`make results` brings it up to date"
    assert (tmp_path / "results.json").read_text() == ACCURACIES.read_text()
    assert len(PAGE.read_text().splitlines()) <= 150
    assert our_accuracies()["geq-5m"]["cifar10"].runs == ["kerneq/weights/geq-5m-cifar10"]


def test_the_command_writes_both_files_and_what_it_cannot_read_is_a_sentence(tested, tmp_path, capsys):
    tested("geq", "geq-5m-cifar10", 0.9)
    options = ["--page", f"{tmp_path / 'page.md'}", "--accuracies", f"{tmp_path / 'page.json'}"]
    main([f"{tmp_path / 'runs'}", *options])
    assert "page.json" in capsys.readouterr().out and "## All published figures" in (tmp_path / "page.md").read_text()
    with pytest.raises(SystemExit, match="records: .*nowhere is not a run folder"):
        main([f"{tmp_path / 'nowhere'}", *options])
