import functools
import os
import signal

import pytest
import torch
from helpers import DEVICES
from torch import nn
from toys import Toy, build_toy

from kerneq.lab.data import Augment, Batches, load
from kerneq.lab.run import Run, Stopped, checkpoint
from kerneq.lab.training import AbstractLogger, loop, process, train
from kerneq.lab.training.build import make_training_batches
from kerneq.lab.training.loop import subtract_margin
from kerneq.lab.training.process import Process
from kerneq.loading import read_checkpoint

without_dropout = functools.partial(build_toy, dropout=0.0)


def test_the_toy_learns_the_digits(run):
    rows = run("training.epochs=10", "training.ema=0.9", build=without_dropout)
    assert rows[-1]["train"]["loss"] < rows[0]["train"]["loss"] / 2
    assert rows[-1]["validation"]["accuracy"] > 0.85


def test_a_run_folder_may_be_a_text_as_everywhere_else(tmp_path, small):
    assert len(train(small("training.epochs=1"), str(tmp_path / "run"), build=without_dropout)) == 1


def test_a_step_is_that_of_plain_sgd_on_the_same_batch(tmp_path, small):
    config = small("training.epochs=1", "training.batch_size=1293", "optimizer.nesterov=false")
    train(config, tmp_path / "run", build=without_dropout)
    got, _ = read_checkpoint(Run(tmp_path / "run").checkpoint("last"))
    torch.manual_seed(0)
    batches, _ = make_training_batches(config, Process(torch.device("cpu")))
    model = without_dropout(config, batches.images)
    [(x, target)] = batches.epoch(0)
    nn.functional.cross_entropy(model(x), target).backward()
    for name, parameter in model.named_parameters():
        decay = 5e-4 if parameter.dim() > 1 else 0.0
        want = parameter - 0.1 * (parameter.grad + decay * parameter)
        torch.testing.assert_close(got[f"model.{name}"], want)


def test_the_best_weights_are_the_averaged_ones_that_were_validated(tmp_path, run, monkeypatch):
    validate, accuracies = loop.validate, iter([0.2, 0.6, 0.4, 0.6])
    with monkeypatch.context() as patch:
        patch.setattr(loop, "validate", lambda *given: validate(*given) | {"accuracy": next(accuracies)})
        run("training.ema=0.99", "training.epochs=4")
    _, facts = read_checkpoint(Run(tmp_path / "run").checkpoint("best"))
    assert facts["best"] == 0.6 and facts["epoch"] == 2
    run("training.ema=0.99", "training.epochs=1", folder="short")
    best, last = (read_checkpoint(Run(tmp_path / "short").checkpoint(w))[0] for w in ("best", "last"))
    assert all(torch.equal(best[f"model.{n}"], last[f"average.{n}"]) for n in Toy(1, 10).state_dict())


def test_with_nothing_held_out_every_image_trains_and_the_last_weights_are_the_best(tmp_path, run, monkeypatch):
    save, saved = checkpoint.save, []
    monkeypatch.setattr(checkpoint, "save", lambda path, *rest: (saved.append(path.stem), save(path, *rest)))
    rows = run("data.validation=0", "training.epochs=2", "training.batch_size=100")
    assert [row["validation"] for row in rows] == [None, None]
    assert rows[0]["train"]["images"] == 1400
    assert read_checkpoint(Run(tmp_path / "run").checkpoint("best"))[1]["epoch"] == 2
    assert saved == ["last", "best", "last"]


def test_bfloat16_channels_last_compiled_and_clipped_training_runs(run):
    built = []

    def build(config, images):
        built.append(build_toy(config, images))
        return built[-1]

    settings = ("training.amp=true", "training.channels_last=true", "training.compile=true", "training.clip=0.5")
    rows = run(*settings, "training.label_smoothing=0.1", "training.epochs=2", build=build)
    assert rows[-1]["train"]["loss"] < rows[0]["train"]["loss"]
    assert built[0].compiled
    assert built[0].stem.weight.is_contiguous(memory_format=torch.channels_last)


def test_deterministic_mode_is_switched_on_and_off_again(run):
    run("training.deterministic=true", "training.epochs=1", "device=cpu", folder="a")  # a GPU has no such mean
    assert torch.are_deterministic_algorithms_enabled()
    run("training.epochs=1", folder="b")
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_margin_is_taken_from_the_logit_of_the_true_class():
    logits = torch.arange(6.0).view(2, 3)
    assert torch.equal(
        subtract_margin(logits, torch.tensor([2, 0]), 0.5) - logits, torch.tensor([[0, 0, -0.5], [-0.5, 0, 0]])
    )
    soft = torch.tensor([[0.25, 0.75, 0.0], [1.0, 0.0, 0.0]])
    assert torch.equal(subtract_margin(logits, soft, 2.0), logits - 2 * soft)
    assert subtract_margin(logits, soft, 0.0) is logits


@pytest.mark.parametrize("device", DEVICES)
def test_batches_made_beside_the_steps_are_the_same(device):
    images = load("digits", "train")
    batches = Batches(images, 64, Augment(crop=1, trivial=True, cutmix=1.0), device=device)
    expected = [(x.cpu(), target.cpu()) for x, target in batches.epoch(1, start=2)]
    work = torch.randn(*(2048, 2048) if device == "cuda" else (2, 2), device=device)
    found = []
    for x, target in process.prefetch(batches.epoch(1, start=2), torch.device(device)):
        work = torch.tanh(work @ work / 64)  # a step, which on a GPU is still running when the next batch is made
        found.append((x + 0 * work[0, 0], target.clone()))
    assert len(found) == len(expected) == len(batches) - 2
    for got, wanted in zip(found, expected, strict=True):
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, wanted, strict=True))


def test_a_run_is_validated_every_so_many_epochs_and_at_its_end(tmp_path, run):
    rows = run("training.epochs=5", "training.validate_epochs=2")
    measured = [(row["validation"] is not None, bool(row["diagnostics"])) for row in rows]
    assert measured == [(False, False), (True, True), (False, False), (True, True), (True, True)]
    best = max(row["validation"]["accuracy"] for row in rows if row["validation"])
    assert read_checkpoint(Run(tmp_path / "run").checkpoint("best"))[1]["best"] == best


def test_a_run_without_progress_ends_early_and_stays_ended(run, tmp_path):
    said = []

    class Listener(AbstractLogger):
        def log_epoch(self, row):
            pass

        def log_message(self, text):
            said.append(text)

    rows = run("training.epochs=50", "training.patience=2", "optimizer.lr=1e-12", loggers=[Listener()])
    best = max(range(len(rows)), key=lambda i: (rows[i]["validation"]["accuracy"], -i))
    assert len(rows) == best + 3 < 50 and "training.patience ends it here" in " ".join(said)
    assert Run(tmp_path / "run").finished
    assert len(run("training.epochs=50", "training.patience=2", "optimizer.lr=1e-12", resume=True)) == len(rows)


def test_a_stop_in_the_last_step_of_an_epoch_closes_it_with_all_its_numbers(run, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "INTERVAL", 0.0)

    class StopAtTheEnd(AbstractLogger):
        def log_progress(self, progress):
            if progress.step * 3 == progress.steps:
                os.kill(os.getpid(), signal.SIGINT)

        def log_epoch(self, row):
            pass

    with pytest.raises(Stopped, match="continues with --resume"):
        run(loggers=[StopAtTheEnd()])
    rows = Run(tmp_path / "run").rows()
    assert (
        [row["epoch"] for row in rows] == [1] and rows[0]["train"]["loss"] > 0 and rows[0]["diagnostics"]["bound"] > 0
    )
    for name in (".config.toml.1.tmp", ".metrics.jsonl.12.tmp", "checkpoints/.last.safetensors.9.tmp"):
        (tmp_path / "run" / name).touch()  # as a kill leaves them
    assert run(resume=True)[:1] == rows
    assert not list((tmp_path / "run").rglob(".*.tmp"))
