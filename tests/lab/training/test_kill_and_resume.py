import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch
from PIL import Image
from toys import StopAt, build_toy, metrics, resumptions, same_state

from kerneq.lab.run import Run, Stopped
from kerneq.lab.training import loop, train
from kerneq.lab.training.build import build_model
from kerneq.loading import read_checkpoint

HERE = Path(__file__).parent


def test_ten_kills_at_random_moments_leave_no_trace_in_weights_or_metrics(tmp_path):
    subprocess.run([sys.executable, str(HERE / "killer.py"), str(tmp_path), "10", "5"], check=True, timeout=200)
    assert same_state(tmp_path / "whole", tmp_path / "killed")
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "killed")
    assert any(step % 20 for step in resumptions(tmp_path / "killed")), "no kill fell into the middle of an epoch"


def test_a_kill_after_the_last_step_of_an_epoch_leaves_no_trace_either(tmp_path, run, monkeypatch):
    settings = ("model.name=geq-dense-tiny", "training.batch_size=600", "training.checkpoint_steps=1")
    run(*settings, folder="whole", build=build_model)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(loop.Supervisor, "finish_epoch", lambda *arguments: 1 / 0)
        run(*settings, folder="killed", build=build_model)
    run(*settings, folder="killed", build=build_model, resume=True)
    assert resumptions(tmp_path / "killed") == [1]
    assert same_state(tmp_path / "whole", tmp_path / "killed")
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "killed")


@pytest.mark.parametrize(
    ("kind", "mix"),
    [("step", "augment.mixup=0.2"), ("cosine", "augment.randaugment=1"), ("one-cycle", "training.ema=0.9")],
)
def test_control_c_saves_the_step_in_hand_and_the_run_goes_on_from_it_under_every_schedule(stop_and_resume, kind, mix):
    stop_and_resume(f"schedule.kind={kind}", "training.epochs=2", "training.clip=1.0", mix)


class PipeToTee(StopAt):
    """Presses Ctrl-C, of which the reader of the output dies first: rich then ends the program."""

    def log_message(self, text):
        raise SystemExit(1)


def test_control_c_saves_the_step_in_hand_where_it_ends_the_reader_of_the_output_too(tmp_path, run):
    with pytest.raises(Stopped):
        run(loggers=[PipeToTee(1)])
    facts = read_checkpoint(tmp_path / "run" / "checkpoints" / "last.safetensors")[1]
    assert facts["epoch"] == 1 and facts["batch"] == 1


def test_a_stop_asked_for_between_two_looks_saves_the_step_all_the_same(tmp_path, run, monkeypatch):
    answers = iter([False, True, True])
    monkeypatch.setattr(loop, "catch_stop", lambda active, announce: nullcontext(lambda: next(answers)))
    with pytest.raises(Stopped, match="Stopped after step 2;"):
        run()
    assert read_checkpoint(tmp_path / "run" / "checkpoints" / "last.safetensors")[1]["step"] == 2


def test_control_c_after_the_last_step_ends_what_comes_after_a_run_that_is_complete(tmp_path, run):
    with pytest.raises(Stopped, match="Stopped after step 30, the last one; .* is complete"):
        run(loggers=[StopAt(3)])
    assert Run(tmp_path / "run").finished and len(metrics(tmp_path / "run")) == 3


def test_resuming_a_finished_run_changes_nothing(tmp_path, run):
    run()
    before = read_checkpoint(tmp_path / "run" / "checkpoints" / "last.safetensors")[0]
    assert len(run(resume=True)) == 3
    assert resumptions(tmp_path / "run") == [30]
    after = read_checkpoint(tmp_path / "run" / "checkpoints" / "last.safetensors")[0]
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_two_seeds_give_two_runs(tmp_path, small):
    for seed in (1, 2):
        train(small(f"seed={seed}", "training.epochs=1"), tmp_path / str(seed), build=build_toy)
    assert not same_state(tmp_path / "1", tmp_path / "2")


def test_a_killed_process_that_decodes_pictures_ends_the_training_in_a_sentence_and_loses_nothing(tmp_path):
    for number in range(140):  # enough for two such processes
        path = tmp_path / "pictures" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 255 * (number % 2), 0)).save(path)
    command = [
        sys.executable,
        "-m",
        "kerneq",
        "train",
        "geq-dense-tiny-digits",
        "--runs",
        str(tmp_path),
        "--name",
        "run",
    ]
    settings = [f"data.name=folder:{tmp_path / 'pictures'}", "data.size=8", "training.batch_size=8", "device=cpu"]
    more = ["training.epochs=1000", "training.checkpoint_steps=1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    training = subprocess.Popen([*command, *settings, *more], **pipes)
    last, threads = tmp_path / "run" / "checkpoints" / "last.safetensors", Path(f"/proc/{training.pid}/task")
    while training.poll() is None:  # a kill as its victim is about to end by itself changes nothing
        with suppress(OSError):
            workers = (threads / str(training.pid) / "children").read_text().split()
            if last.exists() and workers:
                os.kill(int(workers[-1]), signal.SIGKILL)
        time.sleep(0.05)
    said = training.communicate(timeout=60)[1]
    assert training.returncode == 1 and "Traceback" not in said, said
    assert "A process that decodes pictures was killed" in said and "--resume" in said
    assert read_checkpoint(last)[1]["step"] > 0
