import json
import re
from html.parser import HTMLParser

import pytest

from kerneq.report import draw, gather, render
from kerneq.run import Run, TrainingError
from kerneq.run.config import Config, write
from kerneq.training.metrics import METRICS


def scores(loss: float, steps: float | None) -> dict:
    solver = {"steps": steps, "residual": 1e-4 if steps else None, "unconverged": 0.0 if steps else None}
    return {"images": 10, "loss": loss, "accuracy": 1 - loss / 10, **solver}


@pytest.fixture
def run(tmp_path):
    """A run folder made by hand: three epochs, evaluated or not."""

    def make(name: str, accuracy: float | None = None, steps: float | None = 5.0):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.toml").write_text(write(Config()))
        (folder / "environment.json").write_text(json.dumps({"device": "cpu", "revision": "abc"}))
        rows = [
            {
                "epoch": e,
                "step": e,
                "rate": 0.1,
                "seconds": 2.0,
                "train": scores(3 / e, steps),
                "validation": scores(2 / e, steps),
            }
            for e in (1, 2, 3)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if accuracy is not None:
            test = scores(0.5, steps) | {"accuracy": accuracy}
            (folder / "evaluation.json").write_text(json.dumps({"parameters": 12345, "scores": {"test": test}}))
        return folder

    return make


class Reader(HTMLParser):
    """Collects what a page refers to, and checks that its elements are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "use", "path", "rect"):
            self.open.append(tag)
        self.links += [value or "" for name, value in attributes if name in ("src", "href", "xlink:href")]

    def handle_startendtag(self, tag, attributes):
        self.links += [value or "" for name, value in attributes if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        if tag not in ("meta", "use", "path", "rect"):
            assert self.open.pop() == tag


def test_the_page_needs_nothing_but_itself_and_shows_the_numbers(run, tmp_path):
    render([run("first", 0.9), run("second", 0.95, steps=None), run("third")], tmp_path / "out" / "page.html")
    text = (tmp_path / "out" / "page.html").read_text()
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    assert all(link.startswith("#") for link in reader.links), "links only within the page"
    assert "95.00%" in text and "12,345" in text and "abc" in text and "6.0" in text
    assert text.count("<figure>") == 4 and "<script" not in text
    places = [text.index(f"<td>{name}</td>") for name in ("second", "first", "third")]
    assert places == sorted(places), "the best first, the one not evaluated last"


def test_a_name_from_a_folder_cannot_write_into_the_page(run, tmp_path):
    render([run("<b>bold<b>", 0.5)], tmp_path / "page.html")
    assert "<b>" not in re.sub(r"<svg.*?</svg>", "", (tmp_path / "page.html").read_text(), flags=re.S)


def test_without_an_equilibrium_there_is_no_figure_of_its_steps(run):
    runs = gather([run("plain", steps=None)])
    drawn = {metric.name for metric in METRICS if metric.caption and draw(runs, metric)}
    assert drawn == {"loss", "accuracy"}


def test_a_run_reads_back_what_its_folder_says(run):
    found = Run(run("first", 0.9))
    assert (found.test()["accuracy"], found.test()["steps"], found.seconds()) == (0.9, 5.0, 6.0)
    assert found.evaluation()["parameters"] == 12345
    assert [row["train"]["loss"] for row in found.rows()] == [3.0, 1.5, 1.0]
    assert found.best_accuracy() == pytest.approx(1 - 2 / 30)


def test_a_damaged_evaluation_is_a_sentence(run):
    folder = run("first", 0.9)
    (folder / "evaluation.json").write_text("{")
    with pytest.raises(TrainingError, match="evaluation.json is damaged"):
        gather([folder])
