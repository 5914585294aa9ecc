import errno
import json
import os
import time

import pytest
from toys import Said, StopAt, Toy, build_toy

from kerneq.lab.evaluate import evaluate
from kerneq.lab.run import CheckpointError, Run, Stopped, TrainingError, checkpoint
from kerneq.lab.run.config import ConfigError
from kerneq.lab.training import AbstractLogger, build, loop
from kerneq.loading import read_checkpoint


def test_a_run_folder_tells_where_its_numbers_come_from(tmp_path, run):
    run("seed=3", "training.epochs=1")
    facts = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert facts["seed"] == 3
    assert {"kerneq", "torch", "python", "revision", "device", "processes", "command"} <= facts.keys()
    assert "seed = 3" in (tmp_path / "run" / "config.toml").read_text()
    [row] = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert row["train"]["images"] == 1280 and row["validation"]["images"] == 144


def test_a_run_is_neither_overwritten_nor_resumed_with_other_settings(run):
    run("training.epochs=1")
    with pytest.raises(TrainingError, match="already holds a run; add --resume"):
        run("training.epochs=1")
    with pytest.raises(TrainingError, match="another value of `model.width`, `optimizer.lr`"):
        run("training.epochs=1", "optimizer.lr=0.3", "model.width=3", resume=True)


def test_a_folder_in_use_is_refused_and_names_the_process(tmp_path, run):
    with Run(tmp_path / "run").locked():
        with pytest.raises(TrainingError, match=f"in use by process {os.getpid()}"):
            run(resume=True)
    run("training.epochs=1")


def test_a_child_of_the_process_does_not_hold_the_lock(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)  # or the lock would go with the folder made for it
    with Run(tmp_path / "run").locked():
        (read, write), (ready, begun) = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:  # as a worker of a data loader: alive until the pipe is closed
            os.close(write)
            os.write(begun, b".")
            os.read(read, 1)
            os._exit(0)
        os.read(ready, 1)  # it lets go of the lock as it begins
        for end in (read, ready, begun):
            os.close(end)
    try:
        with Run(tmp_path / "run").locked():
            pass
    finally:
        os.close(write)
        os.waitpid(child, 0)


def test_a_path_that_is_a_file_is_refused(tmp_path, run):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(TrainingError, match="cannot be used"):
        run()


def test_a_damaged_checkpoint_is_reported_with_the_way_out_and_the_way_out_works(tmp_path, run):
    whole = run(folder="whole")
    run()
    last = tmp_path / "run" / "checkpoints" / "last.safetensors"
    content = last.read_bytes()
    last.write_bytes(content[:-100])
    with pytest.raises(CheckpointError, match=r"last.safetensors is damaged .* Remove it to continue from .*previous"):
        run(resume=True)
    assert last.read_bytes() == content[:-100], "nothing may be changed by a refusal"
    last.unlink()
    rows = run(resume=True)
    assert [row["train"] for row in rows] == [row["train"] for row in whole]


def test_a_run_whose_settings_were_changed_or_lost_is_refused_and_no_checkpoint_is_to_be_removed(tmp_path, run):
    run("training.epochs=1")
    config = tmp_path / "run" / "config.toml"
    content = config.read_text()
    config.write_text(content.replace("lr = 0.1", "lr = 0.3"))
    with pytest.raises(CheckpointError, match=r"config\.toml") as refused:
        run("training.epochs=1", "optimizer.lr=0.3", resume=True)
    assert "Remove" not in str(refused.value) and "previous" not in str(refused.value)
    config.unlink()
    with pytest.raises(TrainingError, match=r"no config\.toml that says of what: put it back, or take another --name"):
        run("training.epochs=1", resume=True)


def test_the_checkpoint_of_another_model_is_refused(tmp_path, run):
    run("training.epochs=1")
    with pytest.raises(CheckpointError, match="belongs to another run: size mismatch for head.weight"):
        run("training.epochs=1", resume=True, build=lambda config, images: Toy(1, 10, width=9))


def test_a_full_disk_ends_the_run_in_a_sentence_and_the_run_goes_on_when_there_is_room(tmp_path, run, monkeypatch):
    run(folder="whole")
    save, calls = checkpoint.write_atomically, []

    def full(path, data):
        calls.append(path)
        if len(calls) > 3:  # the best and last of the first epoch fit, and the best of the second
            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(no_space()))
                save(path, data)
        else:
            save(path, data)

    monkeypatch.setattr(checkpoint, "write_atomically", full)
    with pytest.raises(TrainingError, match="No space left on device.*--resume"):
        run()
    monkeypatch.setattr(checkpoint, "write_atomically", save)
    assert Run(tmp_path / "run").newest() is not None
    rows = run(resume=True)
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    first, second = (read_checkpoint(Run(tmp_path / n).checkpoint("last"))[0] for n in ("whole", "run"))
    assert all((first[name] == second[name]).all() for name in first)


@pytest.mark.parametrize("resume", [False, True])
def test_the_weights_and_records_of_a_run_that_was_exported_or_tidied_up_are_not_overwritten(tmp_path, run, resume):
    run("training.epochs=1")
    for which in ("last", "previous"):
        Run(tmp_path / "run").checkpoint(which).unlink(missing_ok=True)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    with pytest.raises(TrainingError, match="has its best weights" if resume else "already holds a run"):
        run("training.epochs=1", resume=resume)
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize(("file", "text"), [("config.toml", "# notes of my own"), ("metrics.jsonl", '{"loss": 0.5}\n')])
def test_what_no_run_wrote_is_not_overwritten(tmp_path, run, file, text):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / file).write_text(text)
    for resume in (False, True):
        with pytest.raises(TrainingError, match=f"{file} is of no run, and would be overwritten"):
            run(resume=resume)
    assert (tmp_path / "run" / file).read_text() == text


def test_what_a_kill_before_the_first_checkpoint_left_is_not_overwritten_without_a_word_and_begins_anew(tmp_path, run):
    with pytest.raises(Stopped):
        run("training.checkpoint_epochs=3", loggers=[StopAt(1)])
    Run(tmp_path / "run").checkpoint("last").unlink()
    with pytest.raises(TrainingError, match="already holds a run; add --resume"):
        run("training.checkpoint_epochs=3")
    with pytest.raises(TrainingError, match="another value of `optimizer.lr`"):
        run("training.checkpoint_epochs=3", "optimizer.lr=0.3", resume=True)
    said = Said()
    assert [row["epoch"] for row in run("training.checkpoint_epochs=3", resume=True, loggers=[said])] == [1, 2, 3]
    assert f"{tmp_path / 'run'} has no checkpoint to go on from: it begins anew" in said.texts


def test_best_weights_of_more_epochs_than_lie_between_two_checkpoints_are_not_overwritten(tmp_path, run):
    with pytest.raises(Stopped):
        run(loggers=[StopAt(2)])
    for which in ("last", "previous"):
        Run(tmp_path / "run").checkpoint(which).unlink()
    with pytest.raises(TrainingError, match="has its best weights of 2 epochs, but no last checkpoint"):
        run(resume=True)


class Moving(AbstractLogger):
    """Gives the run's folder another name when the first epoch ends."""

    def __init__(self, folder):
        self.folder = folder

    def log_epoch(self, row):
        if row["epoch"] == 1:
            while not Run(self.folder).checkpoint("last").exists():  # what is written is written beside the training
                time.sleep(0.01)
            self.folder.rename(self.folder.with_name("moved"))


def test_a_folder_that_is_moved_while_its_run_goes_on_ends_it_and_goes_on_where_it_is(tmp_path, run):
    with pytest.raises(TrainingError, match="was moved or deleted while its run went on"):
        run("data.validation=0", loggers=[Moving(tmp_path / "run")])
    assert not (tmp_path / "run").exists()
    rows = run("data.validation=0", folder="moved", resume=True)
    assert [row["epoch"] for row in rows] == [1, 2, 3]


def no_space() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Poisoned(Toy):
    """Gives NaN from its 16th training step on."""

    def classify(self, x):
        if self.norm.num_batches_tracked >= 15 and self.training:
            x = x * float("nan")
        return super().classify(x)


def test_a_loss_that_is_no_number_ends_the_run_and_spares_the_last_good_checkpoint(tmp_path, run):
    with pytest.raises(TrainingError, match="loss became nan by step 20 .*What was saved before is intact"):
        run(build=lambda config, images: Poisoned(1, 10))
    tensors, facts = read_checkpoint(Run(tmp_path / "run").checkpoint("last"))
    assert facts["step"] == 10
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_weights_that_are_no_numbers_are_not_saved(tmp_path, run, monkeypatch):
    monkeypatch.setattr(loop, "INTERVAL", 1e9)  # on a busy machine a report would read the loss first
    with pytest.raises(TrainingError, match="weight became infinite or NaN by step 16 .*intact"):
        run("training.checkpoint_steps=1", build=lambda config, images: Poisoned(1, 10))
    assert read_checkpoint(Run(tmp_path / "run").checkpoint("last"))[1]["step"] == 15


def test_an_unknown_device_is_refused(run):
    for device in ("gpu", "cuda:x", "meta"):
        with pytest.raises(ConfigError, match="`device` must be auto, cpu, cuda or cuda:N"):
            run(f"device={device}")


def test_training_never_reads_the_test_split(run, monkeypatch):
    asked = []
    load = build.load
    monkeypatch.setattr(build, "load", lambda name, split, **rest: asked.append(split) or load(name, split, **rest))
    run("training.epochs=1")
    assert asked == ["train"]


def test_weights_of_other_settings_are_refused_by_evaluation_and_resumption(tmp_path, run):
    run("training.epochs=1", "model.name=geq-tiny")
    run("training.epochs=1", "model.name=geq-tiny", "seed=7", folder="other")
    path = tmp_path / "run" / "config.toml"
    before = path.read_text()
    assert "\nnorm = 1.0\n" in before
    path.write_text(before.replace("\nnorm = 1.0\n", "\nnorm = 0.1\n"))
    with pytest.raises(CheckpointError, match=r"best.safetensors was trained .* `model.norm` was 1.0 and is 0.1\."):
        evaluate(tmp_path / "run", build=build_toy)
    with pytest.raises(CheckpointError, match=r"last.safetensors was trained .* `model.norm` was 1.0 and is 0.1\."):
        run("training.epochs=1", "model.name=geq-tiny", "model.norm=0.1", resume=True)
    path.write_text(before)
    best = Run(tmp_path / "run").checkpoint("best")
    best.write_bytes(Run(tmp_path / "other").checkpoint("best").read_bytes())
    with pytest.raises(CheckpointError, match="`seed` was 7 and is 0"):
        evaluate(tmp_path / "run", build=build_toy)
    assert evaluate(tmp_path / "run", checkpoint="last", build=build_toy).epoch == 1
    best.unlink()
    with pytest.raises(CheckpointError, match=r"There is no checkpoint .*: ask for the last one"):
        evaluate(tmp_path / "run", build=build_toy)


def test_a_checkpoint_whose_weights_are_no_numbers_is_refused(tmp_path, run):
    run("training.epochs=1")
    path = Run(tmp_path / "run").checkpoint("best")
    tensors, facts = read_checkpoint(path)
    checkpoint.save(path, tensors | {"model.head.bias": tensors["model.head.bias"] * float("nan")}, facts)
    with pytest.raises(CheckpointError, match="its `head.bias` has infinite or NaN entries"):
        evaluate(tmp_path / "run", build=build_toy)


def test_a_damaged_record_of_where_a_run_came_from_does_not_stop_it(tmp_path, run):
    run("training.epochs=1")
    path = tmp_path / "run" / "environment.json"
    for content in (b"", b"[1", b"[]", b"{}", b'{"resumed": 3}', b"\xff\xfe", b"[" * 100_000, None):
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.warns(UserWarning, match="environment.json was missing or damaged: begun anew"):
            assert len(run("training.epochs=1", resume=True)) == 1
        assert json.loads(path.read_text())["resumed"][0]["step"] == 10


BROKEN = [b"{}", b"3", b'"epoch"', b"\xff", b"[" * 100_000, b'{"epoch": "1"}', b'{"epoch": 1, "step": 1}']
BROKEN += [b'{"epoch": 1, "step": 1, "seconds": 1, "train": {"loss": "x"}, "validation": null}']
BROKEN += [b'{"epoch": 1, "step": 1, "seconds": 1, "train": {}, "validation": 3}']


def test_a_line_that_is_no_row_of_metrics_or_was_cut_short_by_a_kill_is_named_and_skipped(tmp_path, run):
    run("training.epochs=1")
    path = tmp_path / "run" / "metrics.jsonl"
    good = path.read_bytes()
    for number, content in [(1, line + b"\n" + good) for line in BROKEN] + [(2, good + b'{"epoch": 2, "tra')]:
        path.write_bytes(content)
        assert len(Run(tmp_path / "run").rows()) == 1 and Run(tmp_path / "run").best_accuracy() is not None
        with pytest.warns(UserWarning, match=f"metrics.jsonl: skipped what is no row of metrics, line {number}"):
            run("training.epochs=1", resume=True)
        assert path.read_bytes() == good


def test_a_number_that_is_none_is_written_as_null(tmp_path, run):
    run("training.epochs=1")
    written = Run(tmp_path / "run")
    [row] = written.rows()
    written.add_row(row | {"epoch": 2, "diagnostics": {"energy": float("nan"), "norm": float("inf")}})
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert written.rows()[1]["diagnostics"] == {"energy": None, "norm": None}


def test_a_lock_that_is_a_link_is_not_followed(tmp_path, run):
    (tmp_path / "run").mkdir()
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "run" / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(TrainingError, match="cannot be used"):
        run()
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_pipe_in_place_of_a_checkpoint_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "c.safetensors")
    with pytest.raises(CheckpointError, match="is a folder or a device, not a checkpoint"):
        read_checkpoint(tmp_path / "c.safetensors")


def test_a_batch_larger_than_the_data_is_refused_and_leaves_no_folder_behind(tmp_path, run):
    with pytest.raises(TrainingError, match="cannot be put into batches.*only 1298 pictures"):
        run("training.batch_size=5000", folder="runs/refused")
    assert not (tmp_path / "runs").exists()
    (tmp_path / "mine").mkdir()
    with pytest.raises(TrainingError):
        run("training.batch_size=5000", folder="mine")
    assert (tmp_path / "mine").exists()


@pytest.mark.parametrize("kill", ["unlink", "link", "fsync", "replace"])
def test_there_is_a_last_checkpoint_wherever_a_kill_falls(tmp_path, monkeypatch, kill):
    run = Run(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    for step in (0, 1):
        run.save({}, {"step": step})

    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, kill, killed)
        run.save({}, {"step": 2})
    assert read_checkpoint(run.checkpoint("last"))[1]["step"] == 1
    for step in (2, 3):
        run.save({}, {"step": step})
    assert read_checkpoint(run.checkpoint("previous"))[1]["step"] == 2
    assert sorted(file.stem for file in (tmp_path / "checkpoints").glob("[!.]*")) == ["last", "previous"]


def test_what_killed_processes_left_half_written_is_removed_when_the_run_goes_on(tmp_path, run):
    run("training.epochs=1")
    for name in (".last.safetensors.tmp", ".best.safetensors.123.tmp"):
        (tmp_path / "run" / "checkpoints" / name).touch()
    run("training.epochs=1", resume=True)
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


@pytest.mark.parametrize("words", ["Connection closed by peer [127.0.0.1]", "Read error: Connection reset by peer"])
def test_the_death_of_another_process_is_a_sentence(run, words):
    def broken(config, images):
        raise RuntimeError(words)

    with pytest.raises(TrainingError, match="Another process of this run has died"):
        run(build=broken)
