import dataclasses
import html
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from kerneq.lab.evaluate.attack import AttackResult, Threat, ThreatResult
from kerneq.lab.evaluate.behaviour import BehaviourResult, LayerBehaviour, StoppedScore
from kerneq.lab.evaluate.certificates import CertificateResult
from kerneq.lab.evaluate.classification import calibrate, classify
from kerneq.lab.evaluate.corruptions import CorruptionResult
from kerneq.lab.evaluate.ood import Familiarity, OodResult
from kerneq.lab.evaluate.saliency import MethodScore, SaliencyResult
from kerneq.lab.report import gather, render
from kerneq.lab.report.figures import Style, draw_curves, draw_points
from kerneq.lab.report.findings import SECTIONS
from kerneq.lab.report.page import Drawing, Page, Section, write_page
from kerneq.lab.report.published import Task
from kerneq.lab.report.results import Reported, Result, experiments
from kerneq.lab.report.sections import compose
from kerneq.lab.run import Run, TrainingError
from kerneq.lab.run.config import EXPERIMENTS, ConfigError, differences, load, parse, write
from kerneq.lab.run.folder import INCIDENTAL
from kerneq.models import MODELS, task

CHROMIUM = next(
    (path for name in ("chromium", "google-chrome", "chromium-browser") if (path := shutil.which(name))), None
)
ROOT = Path(__file__).parents[3]


def scores(loss: float, steps: float | None) -> dict:
    solver = {"steps": steps, "residual": 1e-4 if steps else None, "unconverged": 0.0 if steps else None}
    return {"images": 10, "loss": loss, "accuracy": 1 - loss / 10, **solver}


@pytest.fixture
def run(tmp_path):
    """A run folder made by hand, evaluated or not: three epochs, or all that its base has."""

    def make(
        name: str, accuracy: float | None = None, steps: float | None = 5.0, settings=(), checkpoint=True, base=None
    ):
        folder = tmp_path / name
        (folder / "checkpoints").mkdir(parents=True)
        config = parse(f'base = "{base}"' if base else "", settings)
        (folder / "config.toml").write_text(write(config))
        (folder / "environment.json").write_text(json.dumps({"device": "cpu", "revision": "abc", "processes": 2}))
        if checkpoint:
            (folder / "checkpoints" / "best.safetensors").touch()
        common = {"step": 1, "rate": 0.1, "seconds": 2.0}
        epochs = range(1, config.training.epochs + 1 if base else 4)
        rows = [{"epoch": e, "train": scores(3 / e, steps), "validation": scores(2 / e, steps)} for e in epochs]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row | common) + "\n" for row in rows))
        if accuracy is not None:
            test = scores(0.5, steps) | {"accuracy": accuracy}
            (folder / "evaluation.json").write_text(json.dumps({"parameters": 12345, "scores": {"test": test}}))
        return folder

    return make


def measured(folder: Path) -> Path:
    """The folder with every part of an evaluation in it, in the form in which `kerneq evaluate` writes them."""
    run, noise = Run(folder), torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 10
    logits = torch.randn(60, 10, generator=noise) + 3 * torch.nn.functional.one_hot(labels, 10)
    calibration = dataclasses.asdict(calibrate(logits, labels))
    run.write_part(
        "scores",
        run.evaluation()
        | {"classes": [f"class number {i}" for i in range(10)], "calibration": calibration, "scaled": calibration}
        | {"classification": {"test": dataclasses.asdict(classify(logits, labels))}},
    )
    trace = [1.0, 0.1, 0.01, None]
    layer = LayerBehaviour(
        "branch0",
        "Proximal()",
        3.0,
        4,
        1e-4,
        0.0,
        0.3,
        0.4,
        1.0,
        0.5,
        trace,
        [-1.0, -2.0, -2.5, None],
        [trace],
        [trace],
    )
    threat = ThreatResult(Threat(), 0.4, [1.0, 2.0], 0.9, 0.4, [(4 / 255, 0.6), (8 / 255, 0.4)], None, None)
    parts = {
        "behaviour": BehaviourResult(
            60, 8, 1e-3, 4, [layer], [StoppedScore(1, 0.5, 1.0, 0.1), StoppedScore(4, 0.9, 0.3, 1e-4)]
        ),
        "corruptions": CorruptionResult("made here", 60, 0.9, {"fog": [0.8] * 5, "snow": [0.5] * 5}, 0.65, 0.35),
        "attack": AttackResult(60, 60, 0.9, [threat], ["linf: random points do better"]),
        "saliency": SaliencyResult(60, 16, {"Grad-CAM": MethodScore(0.2, 0.7), "random": MethodScore(0.4, 0.4)}),
        "ood": OodResult(5, 5, 0.9, (0.8, 1.0), 0.1, 0.2, 0.3, {"confidence": Familiarity(0.9, 0.5, 0.8)}),
    }
    for name, part in parts.items():
        run.write_part(name, dataclasses.asdict(part))
    certificate = CertificateResult(60, 0.9, [], True, 1e-5, 3.0, [0.0, 0.1], [0.9, 0.4], 0.1, 9, 0.12, None, 9, 0)
    run.write_part("certificates", dataclasses.asdict(certificate))
    for name in ("mistakes", "saliency"):
        Image.new("RGB", (900, 40), "white").save(folder / "evaluation" / f"{name}.png")
    return folder


class Reader(HTMLParser):
    """Collects what a page refers to, and checks that its elements are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "img"):
            self.open.append(tag)
        self.links += [value or "" for name, value in attributes if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def read(page: Path) -> str:
    text = page.read_text()
    reader = Reader()
    reader.feed(text)
    assert reader.open == [] and "<script" not in text
    assert all(link.startswith(("#", "data:image/")) for link in reader.links), "the page needs nothing but itself"
    return text


def test_the_page_needs_nothing_but_itself_and_shows_the_numbers(run, tmp_path):
    folders = [run("first", 0.9), run("second", 0.95, None, ["model.name=resnet18"]), run("third")]
    render(folders, tmp_path / "out" / "page.html")
    text = read(tmp_path / "out" / "page.html")
    assert "95.00%" in text and "12,345" in text and "abc" in text and ">12<" in text, "6 s on two devices"
    places = [text.index(f">{name}</td>") for name in ("second", "first", "third")]
    assert places == sorted(places), "the best first, the one not evaluated last"
    assert f"kerneq evaluate {tmp_path / 'third'}</code>" in text, "what to do about it"
    assert ">digits " in text and re.search(">resnet18-[a-z0-9-]+ data.name=digits ", text), "the nearest experiment"
    assert "papers" not in text, "nothing is published on the digits"


def test_data_sets_have_their_chapters_and_runs_of_one_name_are_told_apart(run, tmp_path):
    run("a/geq", 0.9), run("b/geq", 0.8)
    run("other", 0.7, settings=["data.name=cifar10", "model.name=geq-5m"])
    render([tmp_path], tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    digits, cifar = text.index("## digits"), text.index("## cifar10")
    assert cifar < digits < text.index("a/geq") and cifar < text.index("| **other**") < digits
    assert "b/geq" in text and "94.8 ± 0.1" in text, "and the paper's figure beside the one of geq-5m on CIFAR-10"


def test_figures_are_found_whatever_the_page_is_called(tmp_path):
    drawing = Drawing("curve", "A curve", b"<svg/>")
    write_page(Page("title", "lead", [Section("curves", [[drawing]])]), tmp_path / "my été (2).md")
    (address,) = re.findall(r"!\[A curve\]\(([^ ()]+)\)\n", (tmp_path / "my été (2).md").read_text())
    assert (tmp_path / unquote(address)).read_bytes() == drawing.data


def test_seeds_have_a_mean_and_a_deviation(run, tmp_path):
    for seed, accuracy in enumerate((0.90, 0.92, 0.94)):
        measured(run(f"seed-{seed}", accuracy, settings=[f"seed={seed}"]))
    run("seed-2-once-more", 0.99, settings=["seed=2"])  # a seed counts once, and no accuracy chooses its run
    render([tmp_path], tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert "| **seed-0, mean ± std** |" in text and "| **3 seeds** |" in text and "**92.00% ± 2.00%**" in text
    assert text.count("[Reliability of seed-0]") == text.count("[Reliability of ") == text.count("[Confusion of ") == 1
    render([tmp_path], tmp_path / "a" / "new" / "page.json")
    [result] = json.loads((tmp_path / "a" / "new" / "page.json").read_text())["results"]
    assert (result["seeds"], result["accuracy"], result["std"]) == (3, pytest.approx(0.92), pytest.approx(0.02))


def test_the_papers_tables_come_first_and_no_test_accuracy_chooses_what_counts(run, tmp_path):
    def tested(name: str, base: str, accuracy: float, *settings: str, unknown: float | None = None) -> None:
        folder = run(name, accuracy, settings=["data.validation=0", *settings], checkpoint=False, base=base)
        scores = {"test": {"images": 10000, "accuracy": accuracy}}
        scores |= {"unknown": {"images": 2000, "accuracy": unknown}} if unknown else {}
        (folder / "evaluation.json").write_text(json.dumps({"parameters": 12345, "scores": scores}))

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
    render([tmp_path], tmp_path / "page.md")
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
    render([tmp_path], tmp_path / "page.json")
    results = json.loads((tmp_path / "page.json").read_text())["results"]
    found = next(result for result in results if result["model"] == "geq-5m")
    assert (found["seeds"], found["settings"], found["images"]) == (2, ["geq-5m-cifar10", "data.validation=0.0"], 10000)
    assert [Path(folder).name for folder in found["runs"]] == ["geq", "geq-seed1"]


def test_what_differs_in_more_than_the_model_or_ended_early_decides_nothing(run, tmp_path):
    def tested(name: str, base: str, accuracy: float, *settings: str) -> Path:
        folder = run(name, settings=["data.validation=0", *settings], checkpoint=False, base=base)
        scores = {"test": {"images": 10000, "accuracy": accuracy}}
        (folder / "evaluation.json").write_text(json.dumps({"parameters": 12345, "scores": scores}))
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
    render([tmp_path], tmp_path / "page.md")
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
    def reached(accuracy: float, *runs: str, std: float | None = None) -> Result:
        words = dict.fromkeys(("data", "subset", "device"), "")
        return Result(
            **words, model="geq-5m", split="test", accuracy=accuracy, std=std, seeds=len(runs), images=1000,
            parameters=None, published=None, epochs=1, seconds=0.0, settings=(),
            runs=tuple(SimpleNamespace(wrong=lambda split, of=wrong[name]: of) for name in runs),
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
    for name, config in experiments().items():
        said = (EXPERIMENTS / f"{name}.toml").read_text().splitlines()[0]
        entry, data = MODELS[config.model.name], config.data
        if ", published " in said:
            assert f"{entry.published[task(data.name, data.subset)]}" in said, name
        if data.subset == "four-of-five-subclasses":
            assert f"unknown {entry.published['unseen-classes']} %" in said, name
    named = {(config.model.name, task(config.data.name, config.data.subset)) for config in experiments().values()}
    published = {(model, name) for model, entry in MODELS.items() for name in entry.published}
    assert {(model, name) for model, name in published if name != "unseen-classes"} <= named


@pytest.mark.parametrize("pictures", ["mnist", "cifar100", "cifar10 at 64 px", "folder:flowers"])
def test_a_part_of_another_data_set_is_no_task_of_the_papers(pictures):
    published = {name for entry in MODELS.values() for name in entry.published}
    for subset, split in (("first-five-classes", "test"), ("four-of-five-subclasses", "unknown")):
        assert task(pictures, subset, split).partition(" at ")[0] not in published


def test_the_command_beside_a_run_repeats_its_settings(run):
    # Another kernel has its own defaults, which are not what the experiment has of the old one.
    run("kernel", base="geq-5m-cifar10", settings=["model.kernel.name=multiquadric", "model.kernel.split=8"])
    run("own", base="geq-tiny-cifar10", settings=["model.kernel.name=linear"])
    records = gather(
        [ROOT / "docs" / "results", ROOT / "kerneq" / "weights", run("other", base="geq-5m-cifar100").parent]
    )
    for one in records:
        experiment, *words = one.settings
        again = differences(load(experiment, words), one.config)
        assert [key for key in again if key not in INCIDENTAL] == [], one.label


def test_a_run_that_no_experiment_can_be_made_into_is_reported_and_counts_last(run, tmp_path, monkeypatch):
    def refuse(name, words):
        if "augment.cutout=16" in words:
            raise ConfigError("no such run")
        return load(name, words)

    run("a-stranger", 0.9, settings=["augment.cutout=16"], base="geq-5m-cifar10")
    run("known", 0.8, base="geq-5m-cifar10")
    experiments()  # they are read once, before `load` refuses anything
    monkeypatch.setattr(sys.modules[Reported.__module__], "load", refuse)
    render([tmp_path], tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert text.index("| known | geq-5m-cifar10 |") < text.index("| a-stranger | – |")


def test_every_kind_of_evidence_is_shown_and_what_is_missing_has_its_command(run, tmp_path):
    folders = [measured(run("full", 0.9)), run("bare", 0.8), run("record", checkpoint=False)]
    page = compose(gather(folders), "both forms")
    write_page(page, tmp_path / "page.html")
    text = html.unescape(read(tmp_path / "page.html"))
    assert all(f"<h3>{title}</h3>" in text for title, _ in SECTIONS.values())
    assert "random points do better" in text and "0.200 / 0.700" in text
    assert (
        f"kerneq evaluate {folders[1]} --part corruptions" in text and "record (without weights: records only)" in text
    )
    assert f"evaluate {folders[2]}" not in text, "it has no weights to evaluate"
    write_page(page, tmp_path / "page.md")
    figures = re.findall(r"!\[.*?\]\((.*?)\)", (tmp_path / "page.md").read_text())
    assert len(figures) == len(set(figures)) >= 12
    assert all((tmp_path / figure).stat().st_size > 0 for figure in figures)
    Run(folders[1]).write_part("attack", {"threats": 3})
    with pytest.raises(TrainingError, match="attack of bare is damaged.*kerneq evaluate .*bare --part attack"):
        render(folders, tmp_path / "page.html")


def test_a_name_from_a_folder_cannot_write_into_the_page(run, tmp_path):
    run("<b>bold<b> $x_1$ | `*", 0.5), run("other", 0.6)
    render([tmp_path], tmp_path / "page.html")
    assert "<b>" not in read(tmp_path / "page.html")
    render([tmp_path], tmp_path / "page.md")
    assert r"\<b\>bold\<b\> $x\_1$ \| \`\*" in (tmp_path / "page.md").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux takes any bytes as a file's name")
@pytest.mark.parametrize("form", ["html", "md", "json"])
def test_a_name_that_is_no_text_is_reported_all_the_same(run, tmp_path, form):
    render([run("a\udcff", steps=None)], tmp_path / f"page.{form}")
    assert "digits" in (tmp_path / f"page.{form}").read_text()


def test_drawings_of_runs_whose_names_are_alike_have_files_of_their_own(tmp_path):
    drawings = [Drawing("run-1", f"Confusion of {name}", name.encode()) for name in ("run_1", "run-1", "run 1")]
    write_page(Page("", "", [Section("", [drawings[:2], drawings[2:]])]), tmp_path / "page.md")
    shown = re.findall(r"!\[Confusion of (.*?)\]\((.*?)\)", (tmp_path / "page.md").read_text())
    assert [(tmp_path / file).read_text() for _, file in shown] == [name.replace("\\", "") for name, _ in shown]


def test_without_an_equilibrium_there_is_no_figure_of_its_steps(run, tmp_path):
    render([run("plain", steps=None)], tmp_path / "page.md")
    assert {path.stem for path in (tmp_path / "page-figures").iterdir()} == {"digits-loss", "digits-accuracy"}


def test_a_point_has_its_noise_and_a_curve_of_one_epoch_a_dot(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, buffer, **_: drawn.append(figure) or buffer.write("<svg></svg>")
    )
    seeds, one, far = (Style(label, place) for place, label in enumerate(("seeds", "one", "far")))
    points = [(seeds, 5e6, 0.96, (0.956, 0.964)), (one, 8e6, 0.99, (0.97, 1.01)), (far, 9e6, 0.5, (0.4, 0.6))]
    draw_points(points, "size", "share")
    draw_curves([(seeds, (1, 40), (0.1, 0.2)), (one, (40,), (0.9,))], x="epoch", y="share")
    bars = [segment for lines in drawn[0].axes[0].collections for segment in lines.get_segments()]
    assert [[y for _, y in bar] for bar in bars] == [pytest.approx([0.956, 0.964]), pytest.approx([0.97, 1.0])]
    assert [line.get_marker() for line in drawn[1].axes[0].lines][-1] == "o"


def test_more_runs_than_a_figure_tells_apart_stand_under_the_names_of_their_models(run, tmp_path):
    bases, images = ("geq-tiny-digits", "resnet-tiny-digits"), {"images": 100, "accuracy": 0.9}
    for size in range(10, 19):
        for base in bases:
            folder = run(f"{base}-{size}", settings=[f"training.batch_size={size}"], checkpoint=False, base=base)
            scores = {"parameters": 1000 * size, "scores": {"test": images}}
            (folder / "evaluation.json").write_text(json.dumps(scores))
    render([tmp_path], tmp_path / "page.md")
    points, curves = ((tmp_path / f"page-figures/digits-{name}.svg").read_text() for name in ("parameters", "accuracy"))
    for figure in (points, curves):
        assert [figure.count(f">{name}<") for name in ("geq-tiny", "resnet-tiny")] == [1, 1]
        assert "digits-10" not in figure
    assert points.count("fill-opacity: 0") == 16, "all but the one of each model that counts are hollow"
    assert curves.count("stroke-width: 0.6") == 16


def test_a_run_reads_back_what_its_folder_says(run):
    found = Run(run("first", 0.9))
    assert (found.test()["accuracy"], found.test()["steps"], found.seconds()) == (0.9, 5.0, 6.0)
    assert found.evaluation()["parameters"] == 12345
    assert [row["train"]["loss"] for row in found.rows()] == [3.0, 1.5, 1.0]
    assert found.best_accuracy() == pytest.approx(1 - 2 / 30)


def test_what_cannot_be_reported_is_a_sentence(run, tmp_path):
    folder = run("first", 0.9)
    with pytest.raises(TrainingError, match="page.pdf"):
        render([folder], tmp_path / "page.pdf")
    with pytest.raises(TrainingError, match="config.toml/page.html could not be written: "):
        render([folder], folder / "config.toml" / "page.html")
    test, written = {"images": 10, "accuracy": 0.9}, json.loads((folder / "evaluation.json").read_text())
    damages = [
        {"scores": {"test": test | wrong}} for wrong in ({"accuracy": "high"}, {"accuracy": 2}, {"images": "many"})
    ]
    damages += [{"parameters": "x"}, {"classification": 3}, {"calibration": "x"}]
    for damaged in ("{", "[]", *(json.dumps(written | damage) for damage in damages)):
        (folder / "evaluation.json").write_text(damaged)
        with pytest.raises(TrainingError, match="evaluation.json is damaged"):
            render([folder], tmp_path / "page.md")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH")
def test_a_browser_shows_the_whole_page_on_a_desk_and_on_a_phone(run, tmp_path):
    long = run("a-run-with-a-name-that-is-longer-than-any-column-of-a-phone-would-like-it-to-be", 0.8)
    render([measured(run("full", 0.9)), measured(long)], tmp_path / "page.html")
    page = html.escape((tmp_path / "page.html").read_text())
    script = """
        onerror = message => { document.title += " error " + message }
        onload = () => {
          for (const frame of document.querySelectorAll("iframe")) {
            const page = frame.contentDocument, images = [...page.images];
            document.title += ` ${frame.width}:${page.documentElement.scrollWidth}`;
            document.title += `:${images.length}:${images.filter(image => image.naturalWidth > 0).length}`;
          }
        }"""
    frames = "".join(f'<iframe width="{width}" height="800" srcdoc="{page}"></iframe>' for width in (1280, 390))
    (tmp_path / "frames.html").write_text(f"<title>widths</title><script>{script}</script>{frames}")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    address = (tmp_path / "frames.html").as_uri()
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    done = subprocess.run([CHROMIUM, *flags, profile, address], capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr, "an error, or a warning, of the page"
    widths = re.findall(r" (\d+):(\d+):(\d+):(\d+)", done.stdout[: done.stdout.index("</title>")])
    assert [int(width) for width, *_ in widths] == [1280, 390]
    for width, content, images, loaded in widths:
        assert int(content) <= int(width), "nothing is beside the page"
        assert int(images) == int(loaded) > 15


def test_what_the_repository_says_of_its_results_is_what_its_records_hold(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    # The words are compared, not the figures, of which there are dozens.
    monkeypatch.setattr(Figure, "savefig", lambda figure, buffer, **settings: buffer.write("<svg></svg>"))
    folders = [Path("docs/results"), Path("kerneq/weights")]
    for file, title in (("docs/results.md", "Results"), ("kerneq/models/results.json", "")):
        render(folders, tmp_path / Path(file).name, title)
        assert (tmp_path / Path(file).name).read_text() == Path(file).read_text(), "`make results` brings it up to date"
