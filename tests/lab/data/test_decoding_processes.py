"""The processes that decode picture files: what may befall them, and that they end with the one that they work for."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from data_files import picture

EPOCH = """
import resource, signal, sys
from kerneq.lab.data import Batches, load

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: None)
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
for x, _ in Batches(load(f"folder:{sys.argv[1]}", "train", size=128), 4, workers=2).epoch(0):
    print(len(x), flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pictures")
    for number in range(20):
        for name in "ab":
            picture(path / "train" / name / f"{number}.png", (number, 0, 0))
    return path


@contextmanager
def epoch(folder: Path, limit: int = -1) -> Iterator[subprocess.Popen[str]]:
    """A process with a group of its own that has its first batch of ten, and waits for a line before each other one.

    No file may become longer than `limit` bytes, those in shared memory among them."""
    command = [sys.executable, "-c", EPOCH, str(folder), str(limit)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, **pipes, text=True, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_an_epoch_of_picture_files_needs_no_shared_memory(folder):
    with epoch(folder, limit=1000) as process:
        out, error = process.communicate(timeout=30)
        assert out.split() == ["4"] * 10, error


def test_a_signal_to_the_whole_group_of_processes_leaves_those_that_decode_alone(folder):
    with epoch(folder) as process:
        process.stdout.readline()
        for number in (signal.SIGINT, signal.SIGTERM):
            os.killpg(process.pid, number)
        out, error = process.communicate(timeout=30)
        assert out.split() == ["4"] * 9, error


def test_those_that_decode_end_with_a_process_that_is_killed(folder):
    with epoch(folder) as process:
        process.stdout.readline()
        process.kill()
        process.communicate(timeout=30)  # which ends when nobody has the other end of its pipes


def test_a_killed_process_that_decodes_ends_the_epoch_in_a_sentence(folder):
    for worker in (0, 1):
        with epoch(folder) as process:
            process.stdout.readline()
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            assert len(children) == 2
            os.kill(int(children[worker]), signal.SIGKILL)
            out, error = process.communicate(timeout=30)
            assert process.returncode == 1
            # PyTorch raises its error wherever the program is just then: in the epoch, or behind its back.
            assert "DataError: A process that decodes pictures was killed" in error or "sys.stdin.readline()" in error
