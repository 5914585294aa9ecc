import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from worker import SETTINGS, build_plain

from kerneq.lab.evaluate import TrainedRun
from kerneq.lab.evaluate.scores import score
from kerneq.lab.run import Run
from kerneq.lab.run.config import parse
from kerneq.lab.training import process, train
from kerneq.lab.training.process import Process
from kerneq.loading import read_checkpoint

WORKER = str(Path(__file__).parent / "worker.py")


def launch(*arguments: str, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    """Start two processes through torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [f"--max-restarts={restarts}", "--monitor-interval=0.1", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)


def close(first: Run, second: Run) -> None:
    """The same images, metrics and weights, up to the order in which sums are rounded."""
    for a, b in zip(first.rows(), second.rows(), strict=True):
        assert a["step"] == b["step"] and a["train"]["images"] == b["train"]["images"]
        assert a["validation"]["images"] == b["validation"]["images"] == 144
        for group in ("train", "validation"):
            assert a[group]["loss"] == pytest.approx(b[group]["loss"], rel=1e-4)
            assert a[group]["accuracy"] == pytest.approx(b[group]["accuracy"], abs=1.5 / 144)
    tensors, others = (read_checkpoint(folder.checkpoint("last"))[0] for folder in (first, second))
    for name in (name for name in tensors if name.startswith(("model.", "average.", "momentum."))):
        torch.testing.assert_close(tensors[name], others[name], rtol=1e-3, atol=1e-4)


def test_two_processes_train_as_one_does_even_if_torchrun_restarts_a_killed_one(tmp_path):
    one, two = Run(tmp_path / "one"), Run(tmp_path / "two")
    result = launch(WORKER, str(two.path), "15", restarts=3)  # on a loaded machine gloo may abort as it starts
    assert result.returncode == 0, result.stderr
    resumed, *_ = two.environment()["resumed"]
    assert resumed["step"] == 12 and two.environment()["processes"] == 2
    train(parse("", SETTINGS), one.path, build=build_plain)  # with the same global batch
    close(one, two)


def test_the_command_line_trains_under_torchrun_and_one_process_does_the_talking(tmp_path):
    arguments = ["-m", "kerneq", "train", "model.name=geq-dense-tiny", "training.epochs=1", "--runs", str(tmp_path)]
    result = launch(*arguments, "training.batch_size=256", "training.ema=0.9", "--name", "run")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("best validation accuracy") == 1
    [row] = Run(tmp_path / "run").rows()
    assert row["train"]["images"] == 1280 and row["validation"]["images"] == 144
    # Every process has seen other images, and validates with the batch norms that the first of them saves.
    trained = TrainedRun.open(tmp_path / "run")
    assert row["validation"]["loss"] == pytest.approx(score(trained, trained.held_out())[0]["loss"], rel=1e-5)


def test_a_cpu_computes_in_float32_whatever_amp_says():
    with Process(torch.device("cpu")).autocast(True):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_an_error_of_the_thread_that_wakes_a_gpu_is_raised(monkeypatch):
    def fail(device, amp):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(process, "_touch", fail)
    with process.wake(torch.device("cpu"), amp=True):
        pass  # nothing to wake
    with pytest.raises(torch.OutOfMemoryError, match="no room"), process.wake(torch.device("cuda"), amp=True):
        pass
