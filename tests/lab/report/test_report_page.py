import dataclasses
import html
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from run_folders import make_run

from kerneq.lab.evaluate.attack import AttackResult, Threat, ThreatResult
from kerneq.lab.evaluate.behaviour import BehaviourResult, LayerBehaviour, StoppedScore
from kerneq.lab.evaluate.certificates import CertificateResult
from kerneq.lab.evaluate.classification import calibrate, classify
from kerneq.lab.evaluate.corruptions import CorruptionResult
from kerneq.lab.evaluate.ood import Familiarity, OodResult
from kerneq.lab.evaluate.saliency import MethodScore, SaliencyResult
from kerneq.lab.report import compose, gather, render, summarize
from kerneq.lab.report.figures import Style, draw_curves, draw_points
from kerneq.lab.report.findings import SECTIONS
from kerneq.lab.report.page import Drawing, Page, Section, write_page
from kerneq.lab.run import Run, TrainingError
from kerneq.lab.run.config import differences, load
from kerneq.lab.run.folder import INCIDENTAL

CHROMIUM = next(
    (path for name in ("chromium", "google-chrome", "chromium-browser") if (path := shutil.which(name))), None
)
ROOT = Path(__file__).parents[3]


@pytest.fixture
def run(tmp_path):
    """Makes a run folder of this name."""
    return lambda name, *args, **settings: make_run(tmp_path / name, *args, **settings)


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
    threat = ThreatResult(Threat(), 0.4, [1.0, 2.0], 0.9, 0.4, [(4 / 255, 0.6), (8 / 255, 0.4)], None)
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
    assert places == sorted(places), "by model, and by no accuracy"
    assert "<p>SGD, 3 of 20 epochs, 10 % of the pictures held out:</p>" in text and ">one seed (0)<" in text
    assert f"kerneq evaluate {tmp_path / 'third'}</code>" in text, "what to do about it"
    assert ">digits " in text and re.search(">resnet18-[a-z0-9-]+ data.name=digits ", text), "the nearest experiment"
    assert "papers" not in text, "nothing is published on the digits"


def test_data_sets_have_their_chapters_and_runs_of_one_name_are_told_apart(run, tmp_path):
    run("a/geq", 0.9), run("b/geq", 0.8)
    run("other", 0.7, settings=["data.name=cifar10", "model.name=geq-5m"])
    render([tmp_path], tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    digits, cifar = text.index("## digits"), text.index("## cifar10")
    assert cifar < digits < text.index("a/geq") and cifar < text.index("| other | geq-5m |") < digits
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
    assert "| mean ± std |" in text and "| 3 seeds |" in text and "92.00% ± 2.00%" in text
    assert text.count("[Reliability of seed-0]") == text.count("[Reliability of ") == text.count("[Confusion of ") == 1
    render([tmp_path], tmp_path / "a" / "new" / "page.json")
    [result] = json.loads((tmp_path / "a" / "new" / "page.json").read_text())["results"]
    assert (result["seeds"], result["accuracy"], result["std"]) == (3, pytest.approx(0.92), pytest.approx(0.02))


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


def test_every_kind_of_evidence_is_shown_and_what_is_missing_has_its_command(run, tmp_path):
    folders = [measured(run("full", 0.9)), run("bare", 0.8), run("record", checkpoint=False)]
    runs = gather(folders)
    page = compose(runs, summarize(runs), [], "both forms")
    write_page(page, tmp_path / "page.html")
    text = html.unescape(read(tmp_path / "page.html"))
    assert all(f">{title}</h3>" in text for title, _ in SECTIONS.values())
    assert "random points do better" in text and "0.200 / 0.700" in text
    assert f"kerneq evaluate {folders[1]} --part saliency" in text and "record (without weights: records only)" in text
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
    for damage in (
        {"classification": 0},
        {"classification": {"test": None}},
        {"scores": {"test": test | {"loss": 10**400}}},
    ):
        (folder / "evaluation.json").write_text(json.dumps(written | damage))
        with pytest.raises(TrainingError, match="part scores of .* is damaged .*: kerneq evaluate"):
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


def test_of_many_runs_the_details_are_folded_and_the_contents_lead_to_them(run, tmp_path):
    folders = [measured(run(f"norm=1,seed={seed}", 0.9, settings=[f"seed={seed}"])) for seed in (0, 1)]
    render(folders, tmp_path / "two.html")
    assert read(tmp_path / "two.html").count("<details>") == 1, "the words"
    render([*folders, run("red\x1b[31m <b>", 0.8, settings=["training.epochs=3"])], tmp_path / "three.html")
    text = read(tmp_path / "three.html")
    assert text.count("<details>") > 7 and "\x1b" not in text and "<b>" not in text
    places = re.findall(r'href="#(part\d+)"', text)
    assert len(places) > 10 and all(text.count(f'id="{place}"') == 1 for place in places)
    assert ">norm=1, mean ± std<" in text and ">2 seeds<" in text and ">seed 1<" in text
    assert [text.index(f"<p>SGD, {epochs} epochs, 10 %") for epochs in ("3", "3 of 20")] != []
    assert "‖f(z) − z‖ / ‖f(z)‖" in text, "the words are explained"
