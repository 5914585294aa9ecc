"""Run folders that somebody made to do harm: crafted checkpoints with valid hashes, pipes and devices for files."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch

import kerneq as kq
from kerneq.lab.cli import main
from kerneq.lab.data import DataError, load
from kerneq.lab.run import CheckpointError, Run, Stopped, TrainingError, checkpoint
from kerneq.lab.run.config import ConfigError, parse
from kerneq.lab.training import AbstractLogger, train
from kerneq.loading import read_checkpoint

MODEL = ["model.name=geq-tiny", "model.width=8", "model.features=[8]", "model.scales=[2]", "model.fusion=2"]


class Stop(AbstractLogger):
    def log_epoch(self, row):
        os.kill(os.getpid(), 2)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was stopped after its first epoch."""
    path = tmp_path_factory.mktemp("runs") / "run"
    config = parse("", [*MODEL, "training.epochs=2", "training.batch_size=600", "training.ema=0.5", "device=cpu"])
    with pytest.raises(Stopped):
        train(config, path, loggers=[Stop()])
    return path


def craft(run, tmp_path, change):
    """A copy of the run, both checkpoints of which `change` has edited and hashed anew."""
    copy = shutil.copytree(run, tmp_path / "copy")
    for which in ("last", "best"):
        path = copy / "checkpoints" / f"{which}.safetensors"
        tensors, facts = read_checkpoint(path)
        facts = change(tensors, facts) or facts
        checkpoint.save(path, tensors, facts)
    (copy / "checkpoints" / "previous.safetensors").unlink(missing_ok=True)
    return copy


def put(**entries):
    return lambda tensors, facts: facts | entries


def drop(name):
    return lambda tensors, facts: {key: value for key, value in facts.items() if key != name}


def edit(part, function):
    """Change all tensors with this in their name, or add one."""

    def change(tensors, facts):
        for name in [name for name in tensors if part in name] or [part]:
            tensors[name] = function(tensors.get(name, torch.zeros(2)))

    return change


def remove(part):
    """Remove all tensors with this in their name."""

    def change(tensors, facts):
        for name in [name for name in tensors if part in name]:
            del tensors[name]

    return change


DEEP = json.loads("[" * 900 + "]" * 900)  # as deep as it can be written from here


@pytest.mark.parametrize(
    "change",
    [
        put(epoch="x"),
        put(epoch=-1),
        put(epoch=True),
        put(epoch=None),
        put(epoch=[1]),
        put(epoch=DEEP),
        put(step="x"),
        put(config=0),
        put(config=None),
        put(config=""),
        put(config="model = 3"),
        put(config="[model]\nname = 3"),
        put(config="= ="),
        drop("config"),
        drop("epoch"),
        edit("head.weight", lambda t: t.to(torch.complex64)),
        edit(".stem.0.1.running_mean", lambda t: t * torch.nan),
        edit(".head.weight", lambda t: t.to(torch.int64)),
        edit(".head.bias", lambda t: torch.tensor(3.0)),
        edit("model.more", lambda t: t),
        remove(".stem.0.0"),
        remove(".head.bias"),
    ],
)
def test_a_crafted_checkpoint_is_refused_wherever_weights_are_loaded(stopped, tmp_path, change):
    copy = craft(stopped, tmp_path, change)
    with pytest.raises(CheckpointError):
        kq.load(copy)
    with pytest.raises(CheckpointError):
        kq.predict(copy, __file__, device="cpu")
    with pytest.raises(CheckpointError):
        train(Run(copy).config(), copy, resume=True)


@pytest.mark.parametrize(
    "change",
    [
        put(batch="x"),
        put(batch=10**9),
        put(step=10**30),
        put(rate=None),
        put(rate="1"),
        put(best="x"),
        put(seconds=[]),
        put(meter=3),
        put(meter=[["a"]]),
        put(stale=-1),
        edit("meter", lambda t: t[:1]),
        edit("model.stem.0.0.weight", lambda t: t * torch.inf),
        edit("momentum.head.weight", lambda t: t[:1]),
        edit("momentum.more", lambda t: t),
        edit("random.cpu.0", lambda t: t[:3]),
        remove("momentum.head.bias"),
        remove("average."),
    ],
)
def test_a_crafted_checkpoint_is_refused_where_a_run_would_go_on(stopped, tmp_path, change):
    copy = craft(stopped, tmp_path, change)
    with pytest.raises(CheckpointError):
        train(Run(copy).config(), copy, resume=True)


@pytest.mark.parametrize(
    "text", ["[]", "null", "3", '"x"', "[" * 100_000 + "]" * 100_000, "{", '{"resumed": [3], "images": "x"}']
)
def test_records_that_are_no_tables_of_records_count_as_none(stopped, tmp_path, text):
    copy = shutil.copytree(stopped, tmp_path / "copy")
    for name in ("environment.json", "classes.json"):
        (copy / name).write_text(text)
    assert Run(copy).counts() == () and Run(copy).classes() == () and not Run(copy).finished
    assert kq.load(copy).classes == ()
    with pytest.warns(UserWarning, match=r"environment.json was missing or damaged"):
        assert len(train(Run(copy).config(), copy, resume=True)) == 2


@pytest.mark.parametrize("kind", ["pipe", "zeros", "folder", "large"])
def test_a_pipe_or_a_device_in_the_place_of_a_file_is_refused_at_once(stopped, tmp_path, kind, monkeypatch):
    """Each of these would wait for ever, or fill the memory."""

    def replace(path):
        path.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "zeros":
            path.symlink_to("/dev/zero")
        elif kind == "folder":
            path.mkdir()
        else:
            with open(path, "wb") as file:
                file.truncate(10**12)  # without using the disk

    for name in ("config.toml", "classes.json", "environment.json", "metrics.jsonl", "evaluation.json"):
        copy = shutil.copytree(stopped, tmp_path / name)
        replace(copy / name)
        run = Run(copy)
        if name in ("config.toml", "metrics.jsonl", "evaluation.json"):
            with pytest.raises((ConfigError, TrainingError, OSError)):
                {"config.toml": run.config, "metrics.jsonl": run.rows, "evaluation.json": run.evaluation}[name]()
        if name == "config.toml":
            with pytest.raises(ConfigError):
                kq.load(copy)
        else:
            assert kq.load(copy).classes == (() if name == "classes.json" else tuple("0123456789"))
        assert run.classes() == (() if name == "classes.json" else tuple("0123456789"))
        assert bool(run.environment()) == (name != "environment.json")
    for name in ("best.safetensors", "last.safetensors"):
        replace(stopped_copy := shutil.copytree(stopped, tmp_path / name) / "checkpoints" / name)
        if kind != "large":
            with pytest.raises(CheckpointError):
                kq.load(stopped_copy.parents[1], name.partition(".")[0])
    (tmp_path / "pictures").mkdir()
    replace(tmp_path / "pictures" / "classes.txt")
    with pytest.raises(DataError, match="is not a readable text file"):
        load(f"folder:{tmp_path / 'pictures'}", "train")
    replace(Path(tmp_path / "a.toml"))
    for command in ("train", "sweep"):
        monkeypatch.setattr("sys.argv", ["kerneq", command, str(tmp_path / "a.toml")])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2


WRONG = (None, "x", True, -1, [], [1], {}, {"a": {"b": [None]}}, 1e308, 10**400, DEEP, float("nan"))
WHOLE = ("", "[]", "null", "3", "{", "[" * 100_000 + "]" * 100_000, "\0", '{"scores": null}')


def places(table, above=()):
    """Where a value of a table might be another: every key, and the first entry of every list."""
    for key, value in table.items() if isinstance(table, dict) else enumerate(table[:1]):
        yield (*above, key)
        if isinstance(value, dict | list):
            yield from places(value, (*above, key))


def edited(text, draw):
    """The text of a JSON file with one value of it replaced, or left out."""
    table = at = json.loads(text)
    *above, last = draw.choice([*places(table)])
    for key in above:
        at = at[key]
    if draw.random() < 0.1:
        del at[last]
    else:
        at[last] = draw.choice(WRONG)
    return json.dumps(table)


@pytest.fixture(scope="module")
def measured(stopped, tmp_path_factory):
    """The run with its scores and its behaviour."""
    copy = shutil.copytree(stopped, tmp_path_factory.mktemp("measured") / "run")
    kq.evaluate(copy, device="cpu")
    kq.evaluate(copy, "behaviour", device="cpu")
    return copy


@pytest.mark.filterwarnings("ignore")  # of what was left out
@pytest.mark.parametrize(
    "name", ["evaluation.json", "evaluation/behaviour.json", "environment.json", "classes.json", "metrics.jsonl"]
)
def test_an_edited_record_is_used_or_refused_in_a_sentence(measured, tmp_path, kerneq, name):
    """A few edits of each file; 400 such commands were run once, without a traceback."""
    draw, text = random.Random(name), (measured / name).read_text()
    for number, damaged in enumerate([*draw.sample(WHOLE, 2), *(edited(text, draw) for _ in range(4))]):
        copy = shutil.copytree(measured, tmp_path / f"{number}")
        (copy / name).write_text(damaged)
        command = ("export", copy, copy / "small") if number % 2 else ("report", copy, "--output", copy / "page.html")
        code, _, err = kerneq(*command)  # a bug would come through
        assert code == 0 or (code == 1 and err.strip()), (command, damaged[:200])
