"""Train the entries of docs/results/queue.toml, in their order, as long as the time lasts.

    python experiments/run_queue.py                             # list the entries and their seconds
    python experiments/run_queue.py --runs /tmp/runs --seconds 1500 [NAME …]

Run with the folder of the data sets as KERNEQ_DATA. An entry is started only if its seconds fit into the remaining
time, or if it may be `resumed`: then it is stopped when the time is up, and the next call with the same RUNS goes on
from its last checkpoint. An entry with `seeds` is a run for each, NAME-seed0 and so on. An entry is skipped if its
record is in the repository, if its run is complete, or if the run it comes `after` has less than its `least` accuracy
on held-out images. If one fails, the others still run. A run without held-out images is evaluated on the test images
once, at its end, while the next entry starts, and its weights are exported to RUNS/weights/NAME. The output of an entry
is RUNS/NAME.log; after every entry the records of all runs, without weights, are packed into RUNS/records.tar.gz:
unpack them into docs/results.
"""

import argparse
import dataclasses
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from kerneq.lab.run import Run, TrainingError
from kerneq.lab.run.config import Config, ConfigError, load

HERE = Path(__file__).resolve().parents[1]
QUEUE = HERE / "docs/results/queue.toml"
RECORDS = ("config.toml", "metrics.jsonl", "classes.json", "environment.json", "evaluation.json", "evaluation/*.json")
RECORDED = (HERE / "docs/results", HERE / "kerneq/weights")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One entry of the queue: a training, or any other command."""

    name: str  # of its run folder
    why: str
    seconds: float  # that it takes, start-up included
    train: str = ""  # the arguments of `kerneq train`
    command: str = ""  # for a shell, in which $RUNS is the folder of the runs
    after: str = ""  # the run whose held-out accuracy decides whether this one is trained
    least: float = 0.0  # that accuracy, at least
    seeds: Sequence[int] = ()  # that the comparison has: fixed before its first run, each of them a run
    decides: str = ""  # which statement of the pages its test figures decide, by the rule of docs/results.md
    resumed: bool = False  # whether it may be stopped and go on later

    def __post_init__(self) -> None:
        if bool(self.train) == bool(self.command):
            raise ValueError(f"`{self.name}` must have either `train` or `command`.")
        if bool(self.after) != bool(self.least) or not 0 <= self.least <= 1:
            raise ValueError(f"`{self.name}`: `after` and `least`, a share from 0 to 1, go together.")

    def steps(self, runs: Path) -> list[list[str]]:
        """The commands, one after another; the second evaluates a run that counts on the test images."""
        if self.command:
            return [["bash", "-c", self.command]]
        kerneq = [sys.executable, "-m", "kerneq"]
        run, exported = str(runs / self.name), str(runs / "weights" / self.name)
        train = [*kerneq, "train", *shlex.split(self.train), "--name", self.name, "--runs", str(runs), "--resume"]
        return [train, [*kerneq, "evaluate", run], [*kerneq, "export", run, exported]] if self.counts else [train]

    @property
    def config(self) -> Config:
        """The settings of a training."""
        file, *changes = shlex.split(self.train)
        return load(file, changes)

    @property
    def counts(self) -> bool:
        """Whether it trains on all images, so that it may meet the test images."""
        return bool(self.train) and self.config.data.validation == 0


def read(path: Path) -> list[Entry]:
    """The entries of a queue, one for each seed; `always` stands before the own settings of every training."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    entries = [Entry(**entry) for entry in table["run"]]
    return [one for entry in entries for one in expand(entry, table.get("always", ""))]


def expand(entry: Entry, always: str) -> list[Entry]:
    """The entry, its training with the settings `always`, once for each of its seeds."""
    if not entry.train:
        return [entry]
    file, _, changes = entry.train.partition(" ")
    train = f"{file} {always} {changes}".strip()
    if not entry.seeds:
        return [dataclasses.replace(entry, train=train)]
    return [
        dataclasses.replace(entry, name=f"{entry.name}-seed{seed}", train=f"{train} seed={seed}", seeds=())
        for seed in entry.seeds
    ]


def is_done(entry: Entry, runs: Path) -> bool:
    """Whether the entry's record is in the repository, or its run, if it is one, is complete in `runs`."""
    if any((folder / entry.name).is_dir() for folder in RECORDED):
        return True
    run = Run(runs / entry.name)
    return run.finished and (bool(run.test()) or not entry.counts)


def find_obstacle(entry: Entry, runs: Path) -> str:
    """Why the run that an entry comes after prevents it, as a sentence; empty if it does not."""
    if not entry.after:
        return ""
    reached = [Run(folder / entry.after).best_accuracy() for folder in (runs, *RECORDED)]
    best = max((accuracy for accuracy in reached if accuracy is not None), default=None)
    if best is None:
        return f"not started: {entry.after}, which it comes after, has no accuracy on held-out images"
    return "" if best >= entry.least else f"left out: {entry.after} has not reached {entry.least:.2%}"


@dataclasses.dataclass(frozen=True)
class Begun:
    """An entry whose first command has succeeded; its other commands may run beside the next entry."""

    steps: Sequence[list[str]]
    since: float  # as time.monotonic has it


def begin(entry: Entry, runs: Path, end: float) -> Begun | str:
    """Run the first command of an entry; return the rest of it, or a sentence if it failed or was not started."""
    began = time.monotonic()
    try:
        if is_done(entry, runs):
            return "done before"
        if words := find_obstacle(entry, runs):
            return words
        if entry.seconds > end - began and not entry.resumed:
            return f"not started: takes {entry.seconds:.0f} s, {end - began:.0f} are left"
        first, *others = entry.steps(runs)
        return execute(entry.name, first, runs, end) or Begun(others, began)
    except (ConfigError, TrainingError, ValueError) as error:  # a misspelt experiment, a damaged record, a lone quote
        return f"failed: {error}"


def conclude(entry: Entry, outcome: Begun | str, runs: Path, end: float) -> None:
    """Run the other commands of an entry, pack the records and print how it ended."""
    if isinstance(outcome, Begun):
        failures = (execute(entry.name, step, runs, end) for step in outcome.steps)
        outcome = next(filter(None, failures), "") or describe_result(Run(runs / entry.name), outcome.since)
    pack(runs)
    print(f"{entry.name}: {outcome}", flush=True)


def execute(name: str, command: list[str], runs: Path, end: float) -> str:
    """Run a command and end all processes it started; return how it failed, or an empty text."""
    began = time.monotonic()
    environment = os.environ | {"RUNS": str(runs), "PYTHONFAULTHANDLER": "1"}  # a crash leaves its stack in the log
    with (runs / f"{name}.log").open("ab") as log:
        # A separate process group: otherwise processes started by a shell would outlive it.
        process = subprocess.Popen(command, cwd=HERE, env=environment, stdout=log, stderr=log, process_group=0)
        try:
            code = process.wait(max(end - began, 0))
        except subprocess.TimeoutExpired:
            return f"stopped after {time.monotonic() - began:.0f} s: the time is up"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return f"failed with code {code}: see {log.name}" if code else ""


def describe_result(run: Run, began: float) -> str:
    """The seconds since a run began and its accuracies, as a sentence."""
    best, test = run.best_accuracy(), run.test().get("accuracy")
    held_out = f", held out {best:.2%}" if best is not None else ""
    return f"{time.monotonic() - began:.0f} s{held_out}" + (f", test {test:.2%}" if test is not None else "")


def pack(runs: Path) -> None:
    """Pack the records of all runs into one file."""
    partial = runs / ".records.tar.gz"
    with tarfile.open(partial, "w:gz") as archive:
        for path in sorted(path for pattern in RECORDS for path in runs.glob(f"*/{pattern}")):
            archive.add(path, path.relative_to(runs))
    partial.replace(runs / "records.tar.gz")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these, in the order of the queue")
    parser.add_argument("--queue", type=Path, default=QUEUE)
    parser.add_argument("--runs", type=Path, help="the folder of the runs; without it the queue is shown")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="how long there is")
    arguments = parser.parse_args()
    try:
        entries = read(arguments.queue)
    except (OSError, KeyError, TypeError, ValueError) as error:  # no such file, no TOML, a misspelt key
        parser.error(f"{arguments.queue} is no queue: {error}")
    if unknown := set(arguments.names) - {entry.name for entry in entries}:
        parser.error(f"the queue has no {', '.join(sorted(unknown))}")
    entries = [entry for entry in entries if not arguments.names or entry.name in arguments.names]
    if arguments.runs is None:
        words = (f"{e.why}; decides: {e.decides}" if e.decides else e.why for e in entries)
        lines = [f"{entry.seconds:6.0f} s  {entry.name}: {why}" for entry, why in zip(entries, words, strict=True)]
        print("\n".join([*lines, f"{sum(entry.seconds for entry in entries):6.0f} s in all"]))  # at once, for `| head`
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: end the running processes
    runs, end = arguments.runs.resolve(), time.monotonic() + arguments.seconds
    runs.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(1) as beside:  # an evaluation is mostly start-up and leaves the GPU to the next training
        endings = [beside.submit(conclude, entry, begin(entry, runs, end), runs, end) for entry in entries]
    for ending in endings:
        ending.result()


if __name__ == "__main__":
    main()
