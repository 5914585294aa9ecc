import io
import json
import os
import re
import signal

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kerneq.lab.console import describe_seconds
from kerneq.lab.run import Stopped
from kerneq.lab.training import AbstractLogger, loop
from kerneq.lab.training.logger import (
    Progress,
    TensorBoardLogger,
    TerminalLogger,
    format_epoch,
    take_largest,
)
from kerneq.lab.training.metrics import Accumulator

SCORES = {"images": 100, "loss": 1.25, "accuracy": 0.5, "steps": 6.5, "residual": 2e-4, "unconverged": 0.125}
PROGRESS = Progress(epoch=2, epochs=3, step=15, steps=30, rate=0.1, images_per_second=1234.0, scores=SCORES)


@pytest.mark.parametrize("width", [80, 200])
def test_the_bar_shows_epoch_share_time_left_loss_accuracy_and_speed(width):
    output = io.StringIO()
    terminal = TerminalLogger(Console(file=output, force_terminal=True, width=width), title="geq-tiny-cifar10-0")
    terminal.log_progress(PROGRESS)
    terminal.bar.refresh()
    terminal.close()
    shown = ["geq-tiny-cifar10-0 epoch 2/3", "50%", "--:--", "loss 1.2500"]  # no time left yet: one report
    for words in [*shown, *(["loss 1.2500 · 50.00%", "1,234 images/s"] if width > 80 else [])]:
        assert words in output.getvalue()
    assert "unconverged" not in output.getvalue()


def test_a_long_run_on_a_cpu_says_what_it_will_take_and_a_stop_is_confirmed_at_once(run, monkeypatch):
    monkeypatch.setattr(loop, "SHORT", 0.0)
    said = []

    class Stopping(AbstractLogger):
        def log_epoch(self, row):
            os.kill(os.getpid(), signal.SIGINT)
            assert said[-1] == "stopping after this step …"

        def log_message(self, text):
            said.append(text)
            if text.startswith("stopping"):
                raise ImportError("as rich does where the signal falls into an import of its own")

    with pytest.raises(Stopped):
        run("training.epochs=2", loggers=[Stopping()])
    assert said[0].startswith("about ") and "on this CPU" in said[0] and len(said) == 2
    durations = ["about 45 s", "about 12 min", "about 3 h 20 min", "about 4 days"]
    assert [describe_seconds(s) for s in (45, 720, 12_000, 400_000)] == durations


def test_where_there_is_no_terminal_finished_epochs_are_written_and_where_the_time_went(tmp_path, run):
    output = io.StringIO()
    logger = TerminalLogger(Console(file=output, force_terminal=False), title="toy")
    rows = run("training.epochs=2", loggers=[logger])
    *lines, last = output.getvalue().splitlines()
    assert lines == [format_epoch(row, "toy") for row in rows]
    assert "held out loss" in output.getvalue() and "bound" in output.getvalue()
    assert re.fullmatch(r"toy \d.*? s: start .*\(imports .*, first steps .*\), training .*, validation .*", last)
    seconds = json.loads((tmp_path / "run" / "environment.json").read_text())["seconds"]
    assert seconds["training"] + seconds["first steps"] >= sum(row["seconds"] for row in rows) - 0.01


def test_an_epoch_is_one_line_of_a_terminal_and_no_part_of_it_is_cut():
    row = {"epoch": 7, "train": SCORES, "validation": SCORES, "diagnostics": {"branch0/norm": 2.0}, "seconds": 12.34}
    whole = format_epoch(row, "birds")
    assert whole == (
        "birds epoch   7 | loss 1.2500 50.00% | held out loss 1.2500 50.00% | 12.3 s | "
        "6.5 steps | residual 2.0e-04 | 12.5% above tol | norm 2"
    )
    assert format_epoch(row, "birds", 80) == whole[: whole.index(" | 6.5")]
    assert format_epoch(row, "birds", 40) == "birds epoch   7 | loss 1.2500 50.00%"


def test_an_epoch_line_shows_the_largest_of_the_branches_numbers():
    assert take_largest({"branch0/norm": 1.0, "branch1/norm": 2.0, "gamma": 0.5}) == {"norm": 2.0, "gamma": 0.5}


def test_tensorboard_has_the_numbers_of_metrics_jsonl(tmp_path, run):
    rows = run("training.epochs=2", loggers=[TensorBoardLogger(tmp_path / "board")])
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    for group, number in (("train", "loss"), ("validation", "accuracy"), ("validation", "steps")):
        seen = [(event.step, event.value) for event in events.Scalars(f"{group}/{number}")]
        assert seen == [(row["step"], pytest.approx(row[group][number])) for row in rows]
    assert events.Scalars("diagnostics/bound")


def test_tensorboard_that_cannot_be_written_costs_a_run_its_curves_and_nothing_else(tmp_path, run):
    (tmp_path / "board").write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="TensorBoard's curves end here: File exists. The run goes on.") as said:
        assert len(run("training.epochs=2", loggers=[TensorBoardLogger(tmp_path / "board")])) == 2
    assert len(said) == 1


def test_the_sums_are_read_by_the_clock_and_not_at_every_step(run, monkeypatch):
    reads = []
    read = Accumulator.read
    monkeypatch.setattr(Accumulator, "read", lambda self, sums: reads.append(1) or read(self, sums))
    monkeypatch.setattr(loop, "INTERVAL", 1e9)
    run("training.epochs=2")
    assert len(reads) == 4, "training and validation, once an epoch"


def test_a_logger_sees_the_run_go_by(run, monkeypatch):
    monkeypatch.setattr(loop, "INTERVAL", 0.0)
    seen, seen_epochs = [], []

    class Notes(AbstractLogger):
        def log_progress(self, progress):
            seen.append((progress.epoch, progress.step, progress.scores["images"]))

        def log_epoch(self, row):
            seen_epochs.append(row["epoch"])

        def close(self):
            seen_epochs.append("closed")

    run("training.epochs=2", loggers=[Notes()])
    assert seen[0] == (1, 1, 128) and seen[-1] == (2, 20, 1280) and len(seen) == 20
    assert seen_epochs == [1, 2, "closed"]
