"""`kerneq evaluate`: folders of runs, parts, what is printed and what is written."""

import dataclasses
import json
import shutil
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import trained
from PIL import Image

import kerneq as kq
from kerneq import __version__
from kerneq.lab.data import DataError, Images, load
from kerneq.lab.evaluate import PARTS, NotApplicableError, Part, TrainedRun, measure_part, over_seeds, scores
from kerneq.lab.evaluate.ood import equilibrium_scores, score_images
from kerneq.lab.evaluate.scores import draw_mistakes, measure_scores
from kerneq.lab.run import Run, TrainingError, checkpoint, find_runs
from kerneq.lab.run.config import ConfigError
from kerneq.lab.training import build
from kerneq.lab.training.metrics import validate
from kerneq.loading import read_checkpoint
from kerneq.maps import Function


def test_runs_in_a_folder_are_found_measured_compared_and_written(kerneq, runs):
    code, out, err = kerneq("evaluate", runs, "--device", "cpu")
    assert code == 0 and err == ""
    for words in ("95 % interval", "top-5 accuracy", "T = 0", "ECE, adaptive ECE, MCE", "AUROC of −E(z*)"):
        assert words in out
    assert "held none out" in out, "the run on five classes"
    seeds = ", ".join(str(runs / "seeds" / f"dense-{seed}") for seed in (0, 1))
    assert f"{seeds}, mean ± std of 2 seeds: loss" in out, "of several groups each says which runs it is of"
    found = find_runs([runs, runs / "five"])
    assert [run.name for run in found] == ["five", "dense-0", "dense-1"]
    for run in found:
        table = run.part("scores")
        assert (table["checkpoint"], table["epoch"], table["kerneq"]) == ("best", 1, __version__)
        assert table["seconds"] > 0 and table == run.evaluation()
        assert (run.path / "evaluation" / "mistakes.png").is_file()
    [seeds] = over_seeds(found)
    accuracies = [run.test()["accuracy"] for run in found[1:]]
    assert [run.name for run in seeds] == ["dense-0", "dense-1"]
    assert f"accuracy {statistics.mean(accuracies):.2%} ± {statistics.stdev(accuracies):.2%}" in out
    assert found[0].part("ood")["known_images"] == 178 and found[1].part("ood") == {}
    text = (runs / "five" / "evaluation.json").read_text()
    assert "[35, " in text or "[0, " in text, "a row of the confusion matrix is a line"


def test_a_sweep_in_the_folder_of_the_run_that_it_varies_is_found_with_it(tmp_path):
    folders = [tmp_path / "geq", tmp_path / "geq" / "seed=0", tmp_path / "geq" / "seed=1"]
    for folder in folders:
        folder.mkdir()
        (folder / "config.toml").write_text("")
    assert [run.path for run in find_runs([tmp_path])] == [run.path for run in find_runs([folders[0]])] == folders


def test_a_folder_that_may_not_be_entered_hides_no_other_run(tmp_path, monkeypatch):
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text("")

    def refusing(answer):
        def ask(asked):
            if getattr(asked, "path", asked) == tmp_path / "b":
                raise PermissionError(asked)
            return answer(asked)

        return ask

    monkeypatch.setattr(Run, "exists", property(refusing(Run.exists.fget)))
    assert [run.name for run in find_runs([tmp_path])] == ["a", "c"]


def test_the_numbers_are_those_of_the_model_and_a_scaling_never_sees_a_test_label(runs):
    trained = TrainedRun.open(runs / "seeds" / "dense-0", device="cpu")
    result = measure_scores(trained)
    assert result.scores["test"] == pytest.approx(
        validate(trained.model, trained.batches(trained.test), trained.process, amp=False)
    )
    found = result.classification["test"]
    assert found.accuracy == pytest.approx(result.scores["test"]["accuracy"]) and found.images == 355
    assert result.calibration.nll == pytest.approx(result.scores["test"]["loss"], rel=1e-5)
    assert found.interval[0] < found.accuracy < found.interval[1] and result.classes == tuple("0123456789")
    shuffled = dataclasses.replace(trained.test, labels=trained.test.labels.roll(1))
    blind = dataclasses.replace(trained)
    blind.__dict__["test"] = shuffled  # as if read
    assert measure_scores(blind).scaled.temperature == result.scaled.temperature
    lines = dict(result.summary())
    assert lines["temperature"].startswith("T = ") and "→" in lines["NLL, Brier score"]


def test_the_sheet_of_mistakes_shows_the_pictures_it_names(runs):
    trained = TrainedRun.open(runs / "seeds" / "dense-0", device="cpu")
    result = measure_scores(trained)
    sheet = np.asarray(draw_mistakes(trained, result)["mistakes"])
    wrong = 355 - round(355 * result.scores["test"]["accuracy"])
    assert 8 <= len(result.mistakes) == min(wrong, 24) and sheet.shape[1] > 6 * 128
    pixels = load("digits", "test").pixels[result.mistakes[7].index, 0].numpy()
    tile = sheet[30 + 172 : 30 + 172 + 128, 8 + 136 : 8 + 136 + 128, 0]  # the second of the second row
    assert np.array_equal(tile[8::16, 8::16], pixels)
    none = draw_mistakes(trained, dataclasses.replace(result, mistakes=()))
    assert none["mistakes"].height < 40


def test_a_part_is_one_line_and_the_sentence_of_one_that_does_not_apply_is_heard_where_it_was_asked_for(
    kerneq, runs, monkeypatch
):
    @dataclasses.dataclass(frozen=True)
    class Count:
        images: int
        missing: float = float("nan")

        def summary(self):
            return [("images", str(self.images))]

    def measure_count(trained):
        if trained.config.data.subset != "all":
            raise NotApplicableError("Counting needs every class.")
        return Count(sum(len(labels) for _, labels in trained.track(trained.batches(trained.test).epoch(0), "", 6)))

    picture = Image.new("RGB", (3, 2))
    for name in PARTS.keys() - {"scores", "ood"}:  # which take long
        monkeypatch.delitem(PARTS, name)
    monkeypatch.setitem(PARTS, "count", Part(measure_count, "how many", lambda trained, result: {"one": picture}))
    code, out, _ = kerneq("evaluate", runs / "seeds" / "dense-1", "--part", "count", "--checkpoint", "last")
    run = Run(runs / "seeds" / "dense-1")
    assert code == 0 and "how many" in out and "355" in out and "accuracy" not in out
    assert run.part("count")["images"] == 355 and run.part("count")["checkpoint"] == "last"
    with Image.open(run.path / "evaluation" / "one.png") as written:
        assert written.size == (3, 2) and run.part("count")["missing"] is None
    code, _, err = kerneq("evaluate", runs / "five", "--part", "count")
    assert code == 1 and "Counting needs every class." in err
    code, out, err = kerneq("evaluate", runs / "five", "--all")
    assert code == 0 and "count: Counting needs every class." in out and out.count("how many") == 1 and err == ""
    code, out, _ = kerneq("evaluate", runs / "five")
    assert code == 0 and "Counting" not in out, "not asked for"
    code, _, err = kerneq("evaluate", runs / "five", "--part", "cuont")
    assert code == 2 and "There is no part `cuont`. Did you mean `count`?" in err and "how many" in err
    (run.path / "evaluation" / "count.json").write_text("{")
    with pytest.raises(TrainingError, match=r"count.json is damaged"):
        run.part("count")
    monkeypatch.setattr("kerneq.lab.evaluate.parts.SHIPPED", run.path.parent)
    monkeypatch.chdir(run.path)
    code, out, _ = kerneq("evaluate", "../dense-1", "--part", "count")
    assert code == 0 and "Not written: these weights are part of the installation." in out


def test_one_run_that_fails_costs_the_others_nothing(kerneq, runs, tmp_path):
    for name in ("a", "b"):
        shutil.copytree(runs / "seeds" / "dense-0", tmp_path / name)
    (tmp_path / "a" / "checkpoints" / "best.safetensors").unlink()
    code, out, err = kerneq("evaluate", tmp_path, "--device", "cpu")
    assert code == 1 and "There is no checkpoint" in err and str(tmp_path / "b") in out and "%" in out
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    (tmp_path / "a" / "evaluation.json").write_text("{")  # and the table of the others is shown all the same
    code, out, err = kerneq("evaluate", tmp_path, "--part", "behaviour", "--device", "cpu")
    assert code == 1 and "a/evaluation.json is damaged" in "".join(err.split("\n")) and "┴" in out
    (tmp_path / "empty").mkdir()
    code, _, err = kerneq("evaluate", tmp_path / "empty")
    assert code == 1 and "holds no run: neither it nor a folder in it has a config.toml." in err


def test_what_was_measured_before_the_training_went_on_does_not_count(kerneq, runs, tmp_path):
    run = Run(Path(shutil.copytree(runs / "seeds" / "dense-0", tmp_path / "run")))
    assert kerneq("evaluate", run.path, "--part", "scores", "--part", "behaviour", "--device", "cpu")[0] == 0
    assert run.test()["accuracy"] > 0 and run.part("behaviour")["epoch"] == 1
    tensors, facts = read_checkpoint(run.checkpoint("best"))
    checkpoint.save(run.checkpoint("best"), tensors, facts | {"epoch": 2})  # as training that went on would
    with pytest.warns(UserWarning, match="is of the weights of epoch 1, step .* and the best ones are of epoch 2"):
        assert run.test() == {} and run.part("behaviour") == {}
        assert kerneq("report", run.path, "--output", tmp_path / "report.md")[0] == 0
    assert "not evaluated" in (tmp_path / "report.md").read_text()
    run.checkpoint("best").unlink()  # a record that was handed on without its weights stands
    assert run.test()["accuracy"] > 0


def test_what_was_measured_earlier_in_the_same_epoch_does_not_count_where_the_step_is_known(kerneq, runs, tmp_path):
    run = Run(Path(shutil.copytree(runs / "seeds" / "dense-0", tmp_path / "run")))
    assert kerneq("evaluate", run.path, "--checkpoint", "last", "--part", "scores", "--device", "cpu")[0] == 0
    tensors, facts = read_checkpoint(run.checkpoint("last"))
    assert run.evaluation()["step"] == facts["step"]
    checkpoint.save(run.checkpoint("last"), tensors, facts | {"step": facts["step"] + 1})
    with pytest.warns(UserWarning, match=f"the last ones are of epoch 1, step {facts['step'] + 1} now"):
        assert run.test() == {}
    kerneq("export", run.path, tmp_path / "export", "--checkpoint", "last")
    assert not (tmp_path / "export" / "evaluation.json").exists()
    found = json.loads((run.path / "evaluation.json").read_text())
    run.write_part("scores", {key: value for key, value in found.items() if key != "step"})  # as earlier versions did
    assert run.test()["accuracy"] > 0


def test_a_folder_that_cannot_be_made_costs_nobody_the_result(kerneq, runs, tmp_path):
    folder = shutil.copytree(runs / "five", tmp_path / "five", ignore=shutil.ignore_patterns("evaluation*"))
    (folder / "evaluation").touch()  # a file where the folder should be
    code, out, err = kerneq("evaluate", folder)
    assert code == 1 and "AUROC" in out and "mistakes.png could not be written: File exists." in err


def test_energies_and_weights_are_those_at_the_equilibria(runs):
    trained = TrainedRun.open(runs / "five", device="cpu")
    logits, scores = score_images(trained, trained.test)
    x, _ = next(iter(trained.batches(trained.test).epoch(0)))
    with torch.no_grad():
        levels = trained.model.stem(x)
        energy, weight = torch.zeros(len(x)), []
        for branch in trained.model.branches:
            inside = torch.nn.functional.avg_pool2d(levels, branch.scale) if branch.scale > 1 else levels
            f, z = branch.equilibrium.cell.bind(inside), branch.equilibrium(inside).value
            energy += f.energy(f(z))
            weight.append(f.weights(f(z)).mean((1, 2, 3)))
    torch.testing.assert_close(scores["energy"][: len(x)].float(), -energy, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scores["weight"][: len(x)].float(), torch.stack(weight).mean(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scores["confidence"].float(), logits.softmax(1).amax(1))
    assert all(layer.solve_hook is None for layer in trained.model.layers())
    assert PARTS["ood"].measure(trained).familiarity.keys() == {"confidence", "energy", "weight"}
    assert equilibrium_scores(Function(torch.cos), torch.zeros(1)) == {}
    with pytest.raises(NotApplicableError, match="first-five-classes, and this one has all"):
        measure_part(TrainedRun.open(runs / "seeds" / "dense-0", device="cpu"), "ood")


def test_old_evaluations_and_those_without_training_images_are_understood(runs, tmp_path, monkeypatch):
    old = tmp_path / "old"
    old.mkdir()
    (old / "evaluation.json").write_text(json.dumps({"parameters": 3, "scores": {"test": {"accuracy": 0.5}}}))
    assert Run(old).part("scores")["parameters"] == 3 and Run(old).test()["accuracy"] == 0.5
    trained = TrainedRun.open(runs / "seeds" / "dense-0", device="cpu")

    def gone(self):
        raise DataError("train/ is not there.")

    monkeypatch.setattr(TrainedRun, "held_out", gone)
    result = measure_scores(trained)
    assert result.scaled is None and dict(result.summary())["temperature"].endswith("train/ is not there.")


def test_unseen_sub_classes_have_an_accuracy_of_their_own(kerneq, tmp_path, monkeypatch):
    """GEQ, Table 3. CIFAR-100 is stood in for: a picture shows its super-class, but that of fine class 80 on lies."""
    fine = torch.arange(100).repeat(4)
    labels = {"cifar100": fine, "cifar100-coarse": fine % 20}

    def stand_in(name, split, size=None):
        shown = torch.where(fine < 80, fine, fine + 1) % 20
        pixels = torch.zeros(400, 3, 32, 32, dtype=torch.uint8)
        pixels.view(400, 3, 8, 4, 8, 4)[torch.arange(400), :, shown // 4, :, shown % 4 * 2] = 255
        names = tuple(f"class {i}" for i in range(int(labels[name].max()) + 1))
        return Images(pixels, labels[name], names, (0.5,) * 3, (0.5,) * 3)

    monkeypatch.setattr(build, "load", stand_in)
    settings = ["data.name=cifar100-coarse", "data.subset=four-of-five-subclasses", "data.validation=0.1"]
    run = trained(tmp_path / "run", *settings, "model.name=geq-dense-tiny", "model.size=32", "training.epochs=8")
    code, out, _ = kerneq("evaluate", run)
    assert code == 0 and "unseen sub-classes" in out
    table = Run(run).part("scores")
    assert table["scores"]["test"]["images"] == 320 and table["scores"]["unknown"]["images"] == 80
    assert table["classification"]["test"]["accuracy"] == 1 and table["classification"]["unknown"]["accuracy"] == 0
    assert table["classes"][19] == "class 19" and table["mistakes"] == []


def test_a_plan_comes_first_and_what_is_measured_or_does_not_apply_is_left_out(kerneq, runs, tmp_path, monkeypatch):
    run = Run(Path(shutil.copytree(runs / "seeds" / "dense-1", tmp_path / "run")))
    for name in PARTS.keys() - {"scores", "ood", "corruptions", "behaviour"}:  # which take long
        monkeypatch.delitem(PARTS, name)
    (run.path / "evaluation.json").unlink(missing_ok=True)
    code, out, err = kerneq("evaluate", run.path, "--all", "--device", "cpu")
    plan = out.partition("Written")[0]
    assert code == 0 and err == "" and "2 parts, about " in plan and "Ctrl-C keeps those that are done" in plan
    assert "needs a run that" in plan and "are those of CIFAR-10-C, and this run is of digits." in plan.replace(
        "\n", " "
    )
    assert run.part("behaviour") and run.test() and not run.part("corruptions")
    code, out, _ = kerneq("evaluate", run.path, "--all", "--device", "cpu")
    assert code == 0 and "nothing is left to measure" in out and "measured already; again by --part scores" in out

    def interrupt(trained):
        raise KeyboardInterrupt

    (run.path / "evaluation.json").unlink()
    monkeypatch.setitem(PARTS, "behaviour", dataclasses.replace(PARTS["behaviour"], measure=interrupt))
    other = shutil.copytree(run.path, tmp_path / "run2")
    code, out, err = kerneq("evaluate", run.path, other, "--part", "scores", "--part", "behaviour")
    assert (
        code == 130
        and "run2" not in out
        and f"Interrupted while it measured behaviour. Written: scores in {run.path}." in err
    )


def test_a_run_is_evaluated_from_python(runs, tmp_path):
    folder = Path(shutil.copytree(runs / "seeds" / "dense-1", tmp_path / "run", ignore=lambda *_: ["evaluation.json"]))
    found = kq.evaluate(folder, device="cpu")
    assert found.scores["test"]["accuracy"] == Run(folder).test()["accuracy"]
    assert [layer.name for layer in kq.evaluate(str(folder), "behaviour").layers] == ["dense"]
    with pytest.raises(ConfigError, match="There is no part `score`. Did you mean `scores`?"):
        kq.evaluate(folder, "score")


def test_a_threshold_and_a_temperature_are_chosen_on_the_held_out_images_and_not_on_few(runs, monkeypatch):
    trained = TrainedRun.open(runs / "seeds" / "dense-0", device="cpu")
    result = measure_scores(trained)
    held_out = torch.cat([logits for _, _, logits, _ in trained.outputs(trained.held_out())])
    known = held_out.double().softmax(1).amax(1) >= result.threshold.confidence
    assert 0.95 <= float(known.double().mean()) < 0.97 and result.threshold.held_out == len(held_out) == 144
    assert 0 < result.threshold.refused < 0.15
    assert result.threshold.accuracy > result.classification["test"].accuracy, (
        "those that it refuses are the worse ones"
    )
    assert "none of them" in dict(result.summary())
    monkeypatch.setattr(scores, "FEWEST", 145)
    few = measure_scores(trained)
    assert few.threshold is None and few.scaled is None
    assert (
        dict(few.summary())["temperature"]
        == "not fitted, and no threshold chosen: 144 held-out images, of 145 at least"
    )
