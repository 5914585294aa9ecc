"""The table of metrics: how its entries are accumulated, and that one entry is enough to show a number everywhere."""

import io
import json

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from toys import build_toy, solution

from kerneq import cli
from kerneq.evaluate import evaluate
from kerneq.report import gather, render
from kerneq.training import metrics
from kerneq.training.logger import TensorBoardLogger, TerminalLogger
from kerneq.training.metrics import Accumulator, Curve, Metric


def test_the_accumulator_gives_means_over_images_and_over_solves():
    accumulator = Accumulator(torch.device("cpu"))
    logits = torch.eye(4)
    accumulator.add(torch.tensor(2.0), logits, torch.tensor([0, 1, 2, 0]), {"a": solution(4), "b": solution(4)})
    accumulator.add(
        torch.tensor(1.0),
        logits[:2],
        torch.tensor([[0.0, 0.9, 0, 0.1], [0, 1, 0, 0]]),
        {"a": solution(2), "b": solution(2)},
    )
    got = accumulator.read()
    means = {"loss": 10 / 6, "accuracy": 4 / 6, "steps": 4, "residual": 1e-3, "unconverged": 4 / 12}
    assert got == {"images": 6, **{name: pytest.approx(mean) for name, mean in means.items()}}


def test_a_model_without_an_equilibrium_has_no_solver_numbers():
    accumulator = Accumulator(torch.device("cpu"))
    accumulator.add(torch.tensor(1.0), torch.eye(2), torch.tensor([0, 1]), {})
    got = accumulator.read()
    assert got["loss"] == 1 and (got["steps"], got["residual"], got["unconverged"]) == (None, None, None)


def test_sums_go_on_where_they_were_saved_and_those_of_the_first_version_are_understood():
    saved, restored = (Accumulator(torch.device("cpu")) for _ in range(2))
    saved.add(torch.tensor(2.0), torch.eye(4), torch.tensor([0, 1, 2, 0]), {"a": solution(4)})
    restored.restore(saved.sums, saved.entries)
    assert restored.read() == saved.read()
    restored.restore(torch.tensor([4.0, 8.0, 3.0, 4.0, 16.0, 4e-3, 1.0]))
    assert restored.read() == pytest.approx(saved.read(), rel=1e-6)


def test_a_metric_that_saved_sums_do_not_have_is_not_measured_until_the_next_epoch():
    accumulator = Accumulator(torch.device("cpu"))
    accumulator.restore(torch.tensor([4.0, 8.0, 4.0]), ("images", "loss", "solves"))
    assert accumulator.read()["loss"] == 2 and accumulator.read()["accuracy"] is None
    accumulator.reset()
    accumulator.add(torch.tensor(1.0), torch.eye(2), torch.tensor([0, 1]), {})
    assert accumulator.read()["accuracy"] == 1


CONFIDENCE = Metric(
    name="confidence",
    title="mean confidence",
    format="{:.3f}",
    over="images",
    total=lambda batch: batch.logits.float().softmax(1).amax(1).sum(),
    phrase="confidence {}",
    curve=Curve("Confidence on held-out images", "validation"),
    demo=True,
)


def test_a_new_metric_is_one_entry_of_the_table(tmp_path, run, monkeypatch):
    run("training.epochs=1", folder="before")
    evaluate(tmp_path / "before", device="cpu", build=build_toy)
    monkeypatch.setattr(metrics, "METRICS", (*metrics.METRICS, CONFIDENCE))
    output = io.StringIO()
    loggers = [TerminalLogger(Console(file=output)), TensorBoardLogger(tmp_path / "board")]
    [row] = run("training.epochs=1", folder="after", loggers=loggers)
    result = evaluate(tmp_path / "after", device="cpu", build=build_toy)
    value = f"{result.scores['test']['confidence']:.3f}"
    assert f"confidence {row['validation']['confidence']:.3f}" in output.getvalue()
    board = EventAccumulator(str(tmp_path / "board")).Reload()
    [event] = board.Scalars("train/confidence")
    assert event.value == pytest.approx(row["train"]["confidence"])
    assert json.loads((tmp_path / "after" / "evaluation.json").read_text())["scores"]["test"]["confidence"] > 0.1
    # The run that was trained and evaluated without it has a dash there, and no curve.
    render([tmp_path / "before", tmp_path / "after"], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "test mean confidence" in page and f"<td>{value}</td>" in page and "<td>–</td>" in page
    assert "Confidence on held-out images" in page
    shown = io.StringIO()
    console = Console(file=shown, width=200)
    console.print(cli.evaluation_table(result))
    console.print(cli.demo_table(gather([tmp_path / "before", tmp_path / "after"])))
    assert shown.getvalue().count(value) == 2 and "test mean confidence" in shown.getvalue()
