"""`kerneq predict` and the library behind it, on runs of an epoch or less."""

import csv
import dataclasses
import io
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import trained
from PIL import Image
from predict_helpers import painted, write_digits

from kerneq.lab import prediction
from kerneq.lab.console import show_table
from kerneq.lab.data import DataError, load, normalise
from kerneq.lab.evaluate import evaluate
from kerneq.lab.prediction import Prediction, Predictor, format_csv, make_table, predict
from kerneq.lab.run.config import load as load_config
from kerneq.lab.training.build import build_model
from kerneq.lab.verify import certify
from kerneq.loading import load as load_model
from kerneq.loading import read_weights
from kerneq.solution import Status


def test_a_prediction_is_what_the_model_itself_says_about_the_same_pixels(digits_run, tmp_path):
    paths = write_digits(tmp_path, 70)  # more than one forward pass
    found = predict(digits_run, paths, top=10, device="cpu")
    config, images = load_config(digits_run / "config.toml"), load("digits", "test")
    model = build_model(config, images).eval()
    model.load_state_dict(read_weights(digits_run, "best")[1])
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (images.mean, images.std))
    with torch.no_grad():
        logits, solutions = model(normalise(images.pixels[:70], mean, std), solutions=True)
    expected = logits.double().softmax(1)
    [solution] = solutions.values()
    assert [p.path for p in found] == paths
    for p, row, steps, residual in zip(found, expected, solution.steps, solution.residual, strict=True):
        assert list(p.probabilities) == sorted(p.probabilities, reverse=True)
        assert sum(p.probabilities) == pytest.approx(1)
        shares = dict(zip(p.classes, p.probabilities, strict=True))
        assert [shares[name] for name in images.classes] == pytest.approx(row.tolist(), abs=1e-5)
        assert p.status is Status.CONVERGED and p.converged and p.steps == steps
        assert p.residual == pytest.approx(float(residual), rel=1e-2)


def test_one_picture_or_a_folder_of_them_by_path_or_text(digits_run, tmp_path):
    (tmp_path / "some").mkdir()
    first, second = write_digits(tmp_path / "some", 2)
    both = predict(digits_run, [first, second], device="cpu")
    for wrong in (Image.new("L", (8, 8)), [Image.new("L", (8, 8))], torch.zeros(1, 1, 8, 8)):
        with pytest.raises(TypeError, match="files or folders by name, got .*kerneq.load"):
            predict(digits_run, wrong)
    assert predict(digits_run, tmp_path, device="cpu") == predict(digits_run, [str(tmp_path)], device="cpu") == both
    alone = predict(str(digits_run), str(first), device=torch.device("cpu"))
    open_run = Predictor(str(digits_run), device="cpu")
    assert open_run.predict([(str(first), open_run.read(str(first)))]) == alone
    assert [(p.path, p.classes) for p in alone] == [(first, both[0].classes)]


def test_predictions_of_the_whole_test_set_have_the_accuracy_that_evaluation_gives(digits_run, tmp_path):
    labels = load("digits", "test").labels.tolist()
    found = predict(digits_run, write_digits(tmp_path, len(labels)), checkpoint="last", top=1, device="cpu")
    accuracy = sum(p.classes == (str(label),) for p, label in zip(found, labels, strict=True)) / len(labels)
    assert accuracy == pytest.approx(
        evaluate(digits_run, checkpoint="last", device="cpu").scores["test"]["accuracy"], abs=1e-9
    )
    assert accuracy > 0.5


def test_the_command_shows_a_table_or_prints_json(kerneq, digits_run, tmp_path):
    first, second = write_digits(tmp_path, 2)
    code, out, err = kerneq("predict", digits_run, first, second, "--top", "2", "--device", "cpu")
    assert code == 0 and err == "" and "digit0.png" in out and "digit1.png" in out
    assert out.count("%") == 4 and out.count("converged") == 2 and "not converged" not in out
    code, out, err = kerneq("predict", digits_run, first, "--top", "99", "--checkpoint", "last", "--json")
    result = json.loads(out)
    assert code == 0 and err == "" and result["failures"] == [] and result["checkpoint"] == "last"
    [row] = result["predictions"]
    assert row["path"] == str(first) and row["converged"] is True and row["status"] == "converged"
    assert row["steps"] > 1 and 0 < row["residual"] < 1e-2
    assert sorted(entry["class"] for entry in row["top"]) == [str(digit) for digit in range(10)]
    assert sum(entry["probability"] for entry in row["top"]) == pytest.approx(1)


def test_an_equilibrium_that_was_not_reached_is_marked(kerneq, tmp_path):
    settings = ["model.name=geq-dense-tiny", "model.max_steps=1", "model.tol=1e-6"]
    run = trained(tmp_path / "hasty", *settings)
    [path] = write_digits(tmp_path, 1)
    [prediction] = predict(run, [path], device="cpu")
    assert prediction.status is Status.MAX_STEPS and not prediction.converged and prediction.residual > 1e-6
    code, out, _ = kerneq("predict", run, path, "--device", "cpu")
    assert code == 0 and "not converged" in out and "1 of 1 predictions come from an unfinished equilibrium" in out
    code, out, _ = kerneq("predict", run, path, "--json")
    assert json.loads(out)["predictions"][0]["converged"] is False
    out = kerneq("predict", run, path, "--certify")[1]
    assert "makes a radius smaller, not untrue" in out


def test_files_that_are_no_pictures_get_a_sentence_and_the_others_a_prediction(kerneq, digits_run, tmp_path):
    [good] = write_digits(tmp_path, 1)
    names = ("text.png", "cut.png", "moving.gif", "deep.tif", "empty.jpg", "[bold]none.png")
    text, cut, moving, deep, empty, none = (tmp_path / name for name in names)
    text.write_text("not a picture")
    painted(64, 64).save(cut)
    cut.write_bytes(cut.read_bytes()[:200])
    painted(9, 9).save(moving, save_all=True, append_images=[painted(9, 9).rotate(90)])
    Image.fromarray(np.ones((9, 9), dtype=np.float32)).save(deep)
    empty.touch()
    bare = tmp_path / "bare"
    bare.mkdir()
    bad = [bare, text, cut, moving, deep, empty, none]
    code, out, err = kerneq("predict", digits_run, *bad[:3], good, *bad[3:], "--device", "cpu")
    assert code == 1 and "digit0.png" in out and "text.png" not in out and "Traceback" not in err
    lines = err.splitlines()
    assert len(lines) == len(bad)
    for path, line, words in zip(
        bad,
        lines,
        ("no pictures", "not a readable", "not a readable", "holds 2 pictures", "32 bits", "not a readable", "no file"),
        strict=True,
    ):
        assert str(path) in line and words in line
    code, out, err = kerneq("predict", digits_run, *bad, "--json")
    result = json.loads(out)
    assert code == 1 and result["predictions"] == [] and [f["path"] for f in result["failures"]] == list(map(str, bad))
    with pytest.raises(DataError, match="text.png is not a readable picture"):
        predict(digits_run, [good, text], device="cpu")


def test_a_picture_that_may_not_be_read_costs_the_others_no_prediction(kerneq, digits_run, tmp_path, monkeypatch):
    good, closed = write_digits(tmp_path, 2)
    closed.chmod(0)
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != closed and allowed(path, mode))  # root may all
    _, out, _ = kerneq("predict", digits_run, good, closed, "--device", "cpu")
    assert "digit0.png" in out


def test_a_folder_that_may_not_be_listed_costs_those_beside_it_no_prediction(kerneq, digits_run, tmp_path, monkeypatch):
    write_digits(tmp_path, 1)
    (tmp_path / "closed").mkdir()
    listed = Path.iterdir

    def iterdir(path):
        if path.name == "closed":
            raise PermissionError(13, "Permission denied")
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)  # root may all
    code, out, err = kerneq("predict", digits_run, tmp_path, "--device", "cpu")
    assert code == 1 and "digit0.png" in out and "closed could not be listed" in " ".join(err.split())


def test_a_folder_of_pictures_is_every_picture_in_it_and_csv_has_a_row_for_each(
    kerneq, digits_run, tmp_path, monkeypatch
):
    monkeypatch.setattr("kerneq.lab.prediction.TOGETHER", 2)  # so that there are several lots
    folder = tmp_path / "album"
    (folder / "more").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    (folder / "notes.txt").write_text("not a picture")
    (folder / "more.jpg").mkdir()  # a folder, whatever its name
    paths = [*write_digits(folder, 3), *write_digits(folder / "more", 2), *write_digits(folder / "more.jpg", 1)]
    write_digits(folder / ".hidden", 1)
    code, out, err = kerneq("predict", digits_run, folder, "--csv", "--top", "2", "--device", "cpu")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0 and err == "" and [row["picture"] for row in rows] == list(map(str, paths))
    for row, found in zip(rows, predict(digits_run, paths, top=2, device="cpu"), strict=True):
        assert (row["class 1"], row["class 2"]) == found.classes and row["converged"] == "True"
        assert float(row["probability 1"]) == pytest.approx(found.probabilities[0], rel=1e-4)
    (folder / "torn.png").write_bytes(paths[0].read_bytes()[:60])
    (folder / "link.png").symlink_to(folder / "gone.png")
    code, out, err = kerneq("predict", digits_run, folder, "--json")
    assert code == 1 and len(json.loads(out)["predictions"]) == 6 and "torn.png is not a readable" in err
    assert "There is no file" in err and "link.png" in err
    code, _, err = kerneq("predict", digits_run, folder, "--json", "--csv")
    assert code == 2 and "exclude each other" in err


def test_where_the_model_looks_is_drawn(kerneq, digits_run, tmp_path):
    paths, sheet = write_digits(tmp_path, 3), tmp_path / "maps.png"
    code, out, err = kerneq("predict", digits_run, *paths, "--saliency", sheet, "--device", "cpu")
    assert code == 0 and "digit2.png" in out and "all of the pictures: " in err and "maps.png" in err
    with Image.open(sheet) as drawn:
        assert drawn.height > 3 * 112 and len(drawn.getcolors(1 << 20)) > 100
    before = paths[0].read_bytes()
    for file in (os.path.relpath(paths[0]), digits_run / "config.toml", tmp_path / "new.jpg"):
        code, _, err = kerneq("predict", digits_run, tmp_path, "--saliency", file)
        assert code == 2 and "takes the name of a new .png file" in err and paths[0].read_bytes() == before
    code, _, err = kerneq("predict", digits_run, paths[0], "--saliency", tmp_path / "no" / "such" / "folder.png")
    assert code == 1 and "folder.png could not be written: No such file or directory" in err


def test_the_map_is_of_the_class_that_was_predicted_whatever_others_have_its_name(digits_run, tmp_path, monkeypatch):
    predictor, paths = Predictor(digits_run, device="cpu"), write_digits(tmp_path, 5)
    pictures = [(path, predictor.read(path)) for path in paths]
    wanted = [int(found.classes[0]) for found in predictor.predict(pictures)]
    seen = dataclasses.replace(predictor.trained.seen, classes=("crane",) * 10)
    predictor.trained = dataclasses.replace(predictor.trained, seen=seen)
    drawn = []
    monkeypatch.setattr(prediction, "map_each", lambda trained, images: drawn.extend(images.labels.tolist()) or {})
    prediction.draw_maps(predictor, predictor.predict(pictures))
    assert drawn == wanted and set(drawn) != {0}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux takes any bytes as a file's name")
def test_a_name_that_is_no_text_is_shown_all_the_same(kerneq, digits_run, tmp_path):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.png"))
    painted(8, 8).save(path)
    code, out, _ = kerneq("predict", digits_run, path, "--device", "cpu")
    assert code == 0 and "?.png" in out
    code, _, err = kerneq("predict", digits_run, str(path) + "x", "--device", "cpu")
    assert code == 1 and "?.pngx" in err


def test_a_wrong_request_ends_in_a_sentence_and_a_code(kerneq, digits_run, tmp_path):
    [path] = write_digits(tmp_path, 1)
    for arguments, code, words in (
        ([tmp_path, path], 1, "is not a run folder: it has no config.toml."),
        ([digits_run], 2, "Missing argument"),
        ([digits_run, path, "--checkpoint", "first"], 2, "`checkpoint` must be 'best' or 'last', got 'first'."),
        ([digits_run, path, "--top", "0"], 2, "Invalid value"),
        ([digits_run, path, "--device", "tpu"], 1, "`device` must be auto, cpu, cuda or cuda:N"),
    ):
        got, out, err = kerneq("predict", *arguments)
        assert got == code and out == "" and words in " ".join(err.split()) and "Traceback" not in err
    with pytest.raises(ValueError, match="`top` must be a whole number, at least 1, got 0."):
        predict(digits_run, [path], top=0, device="cpu")
    with pytest.raises(ValueError, match="`checkpoint` must be 'best' or 'last', got 'first'."):
        load_model(digits_run, checkpoint="first")
    with pytest.raises(TypeError, match="A run is a folder, or the name of weights that ship, got 3."):
        load_model(3)


@pytest.mark.parametrize("columns", [40, 80])
def test_a_class_stands_beside_its_probability_at_80_columns(columns, capsys, monkeypatch):
    classes = ("automobile", "a class whose name is longer than any terminal is wide " * 3, "cat")
    path = Path("a/rather/long/path/to/a/picture/that/does/not/fit/into/a/terminal/of/80/columns.png")
    shares = (1.0, 0.25, 0.125)
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = Prediction(path, classes, shares, Status.MAX_STEPS, 50, 1e-3, 0.123, labels=(1, 0, 3))
    show_table(make_table([shown], "title"))
    out = capsys.readouterr().out.splitlines()
    lines = [line for line in out if "%" in line]
    assert max(map(len, out)) <= 80
    assert [("automobile" in line, "cat" in line) for line in lines] == [(True, False), (False, False), (False, True)]
    assert "12.50%" in lines[2] and all(cell in lines[0] for cell in ("100.00%", "1.0e-03", "not converged", "0.123"))
    first, second, third = (out[1].index(heading) for heading in ("picture", "class", "share"))
    caption = next(number for number, line in enumerate(out) if "No change of" in line)
    rows = [line for line in out[2:caption] if "─" not in line]
    assert "".join(line[first:second].strip() for line in rows) == str(path)
    assert "".join(line[second : third - 2] for line in rows).replace(" ", "") == "".join(classes).replace(" ", "")


def test_names_that_are_too_long_or_hold_escape_codes_do_no_harm(kerneq, digits_run, tmp_path):
    [good] = write_digits(tmp_path, 1)
    coloured = good.rename(tmp_path / "red\x1b[31m\x07.png")
    code, out, err = kerneq("predict", digits_run, "x" * 5000, tmp_path / "no\x1b]0;title\x07.png", coloured)
    assert code == 1 and "red\ufffd[31m" in out and "\x1b" not in out + err
    first, second = err.splitlines()
    assert "File name too long" in first and "There is no file" in second


def test_a_postscript_file_that_is_called_a_picture_is_not_run(kerneq, digits_run, tmp_path, monkeypatch):
    path = tmp_path / "picture.png"
    painted(9, 9).save(path, format="EPS")

    def gone(*arguments, **keywords):
        raise AssertionError("Ghostscript was called")

    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", gone)
    monkeypatch.setattr("PIL.EpsImagePlugin.has_ghostscript", lambda: True)
    code, _, err = kerneq("predict", digits_run, path, "--device", "cpu")
    assert code == 1 and "not a readable picture (cannot identify image file" in err


def test_a_picture_may_be_certified_and_a_model_without_bounds_says_so(kerneq, digits_run, colour_run, tmp_path):
    path = write_digits(tmp_path, 1)[0]
    code, out, _ = kerneq("predict", digits_run, path, "--certify", "--json", "--device", "cpu")
    radius = json.loads(out)["predictions"][0]["certified_radius"]
    table = kerneq("predict", digits_run, path, "--certify")[1]
    assert code == 0 and radius > 0 and f"{radius:.3f}" in table and "equilibria solved exactly" in table
    code, _, err = kerneq("predict", colour_run[0], path, "--certify")
    assert code == 2 and "no bounds are known of the layers of such a model" in err and "Traceback" not in err


def test_a_radius_is_shown_for_the_class_it_is_of_only(digits_run, monkeypatch, tmp_path):
    predictor, path = Predictor(digits_run, device="cpu"), write_digits(tmp_path, 1)[0]
    pictures = [(path, predictor.read(path))]
    assert predictor.predict(pictures, certified=True)[0].radius > 0

    def of_another(*arguments, **named):
        proved = certify(*arguments, **named)
        return dataclasses.replace(proved, prediction=(proved.prediction + 1) % 10)

    monkeypatch.setattr(prediction, "certify", of_another)
    assert predictor.predict(pictures, certified=True)[0].radius == 0


def test_a_picture_below_the_threshold_shows_none_of_the_classes(kerneq, digits_run, tmp_path):
    paths = write_digits(tmp_path, 6)
    shares = sorted(p.probabilities[0] for p in predict(digits_run, paths))
    between = f"{(shares[2] + shares[3]) / 2}"
    found = predict(digits_run, paths, threshold=between)
    assert sum(p.known is False for p in found) == 3 and predict(digits_run, paths[0])[0].known is None
    code, out, _ = kerneq("predict", digits_run, *paths, "--threshold", between)
    assert code == 0 and out.count("none of them") == 3
    rows = kerneq("predict", digits_run, *paths, "--threshold", between, "--csv")[1].splitlines()
    assert "none_of_them" in rows[0] and sum(",True," in row for row in rows) >= 3
    folder = shutil.copytree(digits_run, tmp_path / "run", ignore=lambda *_: ["evaluation.json"])
    code, _, err = kerneq("predict", folder, paths[0], "--threshold", "auto")
    assert code == 2 and "No threshold was chosen for" in err and "between 0 and 1 instead of auto" in err
    least = evaluate(folder, device="cpu").threshold.confidence
    assert {p.known for p in predict(folder, paths, threshold="auto")} == {p >= least for p in shares}
    code, _, err = kerneq("predict", folder, paths[0], "--threshold", "1.5")
    assert code == 2 and "`threshold` must be auto or a confidence between 0 and 1, got '1.5'." in err


def test_csv_has_no_escape_codes_and_no_formulas(digits_run, tmp_path):
    names = ("=cmd|' /C calc'!A0", "red\x1b[31m", "@SUM(1)", "-1")
    shown = Prediction(tmp_path / "a\u202eb.png", names, (0.4, 0.3, 0.2, 0.1), None, None, None, labels=(0, 1, 2, 3))
    text = format_csv([shown, dataclasses.replace(shown, path=Path("=1+1.png"))], 4)
    [first, second] = list(csv.reader(io.StringIO(text)))[1:]
    assert "\x1b" not in text and "\u202e" not in text and second[0] == "'=1+1.png"
    assert first[1] == "'" + names[0] and first[5] == "'@SUM(1)" and first[7] == "'-1" and first[2] == "0.4"


def test_features_are_what_the_head_makes_the_logits_of(kerneq, digits_run, tmp_path):
    (tmp_path / "pictures").mkdir()
    paths = write_digits(tmp_path / "pictures", 3)
    code, out, _ = kerneq("features", digits_run, tmp_path / "pictures", tmp_path / "out.npy", "--device", "cpu")
    rows, names = np.load(tmp_path / "out.npy"), json.loads((tmp_path / "out.json").read_text())
    assert code == 0 and "3 pictures" in out and names["pictures"] == sorted(map(str, paths))
    model = load_model(digits_run)
    logits = model.head(torch.from_numpy(rows)).softmax(1)
    shares = [p.probabilities[0] for p in predict(digits_run, sorted(paths), device="cpu")]
    torch.testing.assert_close(logits.amax(1), torch.tensor(shares), rtol=1e-4, atol=1e-5)
    x = torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(model.head(model.features(x)), model(x))
    for wrong in (tmp_path / "out.npy", ""):
        code, _, err = kerneq("features", digits_run, paths[0], wrong)
        assert code == 2 and "OUT.npy is the name of a new .npy file" in err
    (tmp_path / "bad.png").write_text("no picture")
    code, _, err = kerneq("features", digits_run, tmp_path / "bad.png", tmp_path / "new.npy")
    assert code == 1 and "bad.png" in err and not (tmp_path / "new.npy").exists()
