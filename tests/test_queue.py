"""What waits for a GPU (docs/results/queue.toml) can be run: every entry is a valid experiment, and the runner runs."""

import json
import runpy
import subprocess
import sys
import tarfile
import time
import tomllib
from pathlib import Path

import pytest

from kerneq.lab.run.config import check

HERE = Path(__file__).parents[1]
SCRIPT = HERE / "experiments/run_queue.py"
ENTRIES = runpy.run_path(str(SCRIPT))["read"](HERE / "docs/results/queue.toml")

SMALL = """
always = "training.epochs=1"
[[run]]
name = "broken"
why = "it fails, and the next runs"
command = "echo no card; exit 3"
seconds = 1
[[run]]
name = "counts"
why = "all images, so the test images at its end"
train = "geq-tiny-digits data.validation=0"
seconds = 1
[[run]]
name = "long"
why = "it does not fit"
train = "geq-tiny-digits training.epochs=2"
seeds = [3, 4]
seconds = 1e6
[[run]]
name = "hopeless"
why = "what it comes after held nothing out"
after = "counts"
least = 0.5
command = "exit 4"
seconds = 1
"""


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry.train], ids=lambda entry: entry.name)
def test_every_training_that_waits_is_a_valid_experiment(entry):
    check(entry.config)


def test_names_are_not_used_twice():
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)


def test_a_run_that_meets_the_test_images_says_beforehand_what_it_decides_with_which_seeds():
    for table in tomllib.loads((HERE / "docs/results/queue.toml").read_text())["run"]:
        first = next(entry for entry in ENTRIES if entry.name.startswith(table["name"]))
        if first.counts:
            assert table["decides"] and table["seeds"], table["name"]
        assert not table.get("resumed") or first.config.training.checkpoint_epochs < first.config.training.epochs


def run_queue(*arguments: object) -> str:
    done = subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, cwd=HERE)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_runs_what_fits_goes_on_after_a_failure_and_does_nothing_twice(tmp_path):
    (tmp_path / "queue.toml").write_text(SMALL)
    arguments = ("--queue", tmp_path / "queue.toml", "--runs", tmp_path / "runs", "--seconds", 600)
    first = run_queue(*arguments).splitlines()
    assert first[0].startswith("broken: failed with code 3")
    assert "test " in first[1]
    assert first[2].startswith("long-seed3: not started") and first[3].startswith("long-seed4: not started")
    assert first[4] == "hopeless: not started: counts, which it comes after, has no accuracy on held-out images"
    assert (tmp_path / "runs/broken.log").read_text() == "no card\n"
    with tarfile.open(tmp_path / "runs/records.tar.gz") as records:
        assert {"counts/config.toml", "counts/metrics.jsonl", "counts/evaluation.json"} <= set(records.getnames())
        assert not any("weights" in name for name in records.getnames())
    assert (tmp_path / "runs/weights/counts/checkpoints/best.safetensors").is_file()
    assert run_queue(*arguments, "counts") == "counts: done before\n"


def test_an_entry_that_may_be_resumed_is_started_in_any_time_and_goes_on_in_the_next_call(tmp_path):
    text = (
        SMALL.partition("[[run]]")[0]
        + """
[[run]]
name = "pieces"
why = "it takes longer than there is"
train = "geq-tiny-digits training.epochs=2 training.checkpoint_epochs=1"
resumed = true
seeds = [0]
seconds = 1e6
"""
    )
    (tmp_path / "queue.toml").write_text(text)
    arguments = ("--queue", tmp_path / "queue.toml", "--runs", tmp_path / "runs", "--seconds")
    assert run_queue(*arguments, 0.5).startswith("pieces-seed0: stopped after")
    assert " s, held out " in run_queue(*arguments, 600)


WRONG = """
[[run]]
name = "misspelt"
why = "there is no such experiment"
train = "geq-tiny-digitz"
seconds = 0
[[run]]
name = "unwanted"
why = "what it comes after has less"
after = "tried"
least = 0.5
command = "exit 4"
seconds = 0
[[run]]
name = "quoted"
why = "it does not end"
train = "geq-tiny-digits '"
seconds = 0
[[run]]
name = "slow"
why = "it takes longer than it says"
command = "(sleep 1; touch $RUNS/survived) & wait"
seconds = 0
"""


def test_a_misspelt_experiment_is_that_entrys_failure_and_no_command_outlives_its_time(tmp_path):
    (tmp_path / "queue.toml").write_text(WRONG)
    (tmp_path / "runs" / "tried").mkdir(parents=True)
    row = {"epoch": 1, "step": 1, "seconds": 1.0, "train": {}, "validation": {"accuracy": 0.4}, "diagnostics": {}}
    (tmp_path / "runs" / "tried" / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    said = run_queue("--queue", tmp_path / "queue.toml", "--runs", tmp_path / "runs", "--seconds", 0.5).splitlines()
    assert said[0].startswith("misspelt: failed: There is no experiment") and "geq-tiny-digits" in said[0]
    assert said[1] == "unwanted: left out: tried has not reached 50.00%"
    assert said[2] == "quoted: failed: No closing quotation" and said[3].startswith("slow: stopped after")
    time.sleep(1)
    assert not (tmp_path / "runs" / "survived").exists()
