"""`kerneq predict` and the library behind it, on runs of an epoch or less."""

import json
import os
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kerneq.cli import main
from kerneq.config import load as load_config
from kerneq.config import parse
from kerneq.data import DATA_SETS, DataError, load
from kerneq.data.decode import decode
from kerneq.data.packed import Packed
from kerneq.data.pipeline import normalise
from kerneq.evaluate import evaluate, restore
from kerneq.predict import Predictor, predict
from kerneq.predict.picture import read_picture
from kerneq.predict.subject import SIDES, subject
from kerneq.solution import Status
from kerneq.training import Folder, TrainingError, train
from kerneq.training.model import build_model

ORIENTATION = 0x0112


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trained(path: Path, *settings: str) -> Path:
    train(parse("", ["training.epochs=1", "training.batch_size=256", "device=cpu", *settings]), path)
    return path


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory):
    """An equilibrium model after an epoch on the embedded digits, 8×8 and grey."""
    return trained(tmp_path_factory.mktemp("runs") / "dense", "model.name=geq-dense-tiny", "training.ema=0.9")


@pytest.fixture(scope="module")
def colour_run(tmp_path_factory):
    """A run on a folder of 40 pictures in two classes, 16×16 and in colour; the folder's path too."""
    home = tmp_path_factory.mktemp("colour")
    rng = np.random.default_rng(0)
    for split, count in (("train", 16), ("test", 4)):
        for name, channel in (("blue sky", 2), ("red wine", 0)):
            (home / "pictures" / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 60, (20, 24, 3), dtype=np.uint8)
                pixels[..., channel] += 180
                Image.fromarray(pixels).save(home / "pictures" / split / name / f"{i}.png")
    settings = [f"data.name=folder:{home / 'pictures'}", "data.size=16", "data.validation=0", "training.batch_size=8"]
    run = trained(home / "run", *settings, "model.name=resnet-tiny", "training.epochs=4", "optimizer.lr=0.05")
    return run, home / "pictures"


@pytest.fixture
def kerneq(monkeypatch, capsys):
    """Call the program; returns (exit code, standard output, standard error)."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kerneq", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
            raise SystemExit(0)
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return call


def write_digits(folder: Path, count: int) -> list[Path]:
    images = load("digits", "test")
    paths = [folder / f"digit{i}.png" for i in range(count)]
    for path, pixels in zip(paths, images.pixels, strict=False):
        Image.fromarray(pixels[0].numpy()).save(path)
    return paths


def painted(width: int, height: int) -> Image.Image:
    """A smooth colour picture in which no two corners are alike."""
    y, x = np.mgrid[:height, :width] / max(width, height)
    return Image.fromarray((np.stack([x, y, 0.5 * x * y + 0.2], axis=2) * 255).astype(np.uint8))


def test_a_prediction_is_what_the_model_itself_says_about_the_same_pixels(digits_run, tmp_path):
    paths = write_digits(tmp_path, 70)  # more than one forward pass
    found = predict(digits_run, paths, top=10, device="cpu")
    config, images = load_config(digits_run / "config.toml"), load("digits", "test")
    model = build_model(config, images).eval()
    restore(model, Folder(digits_run).checkpoint("best"))
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


def test_predictions_of_the_whole_test_set_have_the_accuracy_that_evaluation_gives(digits_run, tmp_path):
    labels = load("digits", "test").labels.tolist()
    found = predict(digits_run, write_digits(tmp_path, len(labels)), which="last", top=1, device="cpu")
    accuracy = sum(p.classes == (str(label),) for p, label in zip(found, labels, strict=True)) / len(labels)
    assert accuracy == pytest.approx(evaluate(digits_run, "last", "cpu").scores["test"].accuracy, abs=1e-9)
    assert accuracy > 0.5


def test_the_command_shows_a_table_or_prints_json(kerneq, digits_run, tmp_path):
    first, second = write_digits(tmp_path, 2)
    code, out, err = kerneq("predict", digits_run, first, second, "--top", "2", "--device", "cpu")
    assert code == 0 and err == "" and "digit0.png" in out and "digit1.png" in out
    assert out.count("%") == 4 and out.count("converged") == 2 and "not converged" not in out
    code, out, err = kerneq("predict", digits_run, first, "--top", "99", "--which", "last", "--json")
    result = json.loads(out)
    assert code == 0 and err == "" and result["failures"] == [] and result["checkpoint"] == "last"
    [row] = result["predictions"]
    assert row["path"] == str(first) and row["converged"] is True and row["status"] == "converged"
    assert row["steps"] > 1 and 0 < row["residual"] < 1e-2
    assert sorted(entry["class"] for entry in row["top"]) == [str(digit) for digit in range(10)]
    assert sum(entry["probability"] for entry in row["top"]) == pytest.approx(1)


def test_an_equilibrium_that_was_not_reached_is_marked(kerneq, tmp_path):
    settings = ["model.name=geq-dense-tiny", "model.settings.max_steps=1", "model.settings.tol=1e-6"]
    run = trained(tmp_path / "hasty", *settings)
    [path] = write_digits(tmp_path, 1)
    [prediction] = predict(run, [path], device="cpu")
    assert prediction.status is Status.MAX_STEPS and not prediction.converged and prediction.residual > 1e-6
    code, out, _ = kerneq("predict", run, path, "--device", "cpu")
    assert code == 0 and "not converged" in out and "1 of 1 predictions come from an unfinished equilibrium" in out
    code, out, _ = kerneq("predict", run, path, "--json")
    assert json.loads(out)["predictions"][0]["converged"] is False


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
    bad = [text, cut, moving, deep, empty, none, tmp_path]
    code, out, err = kerneq("predict", digits_run, *bad[:3], good, *bad[3:], "--device", "cpu")
    assert code == 1 and "digit0.png" in out and "text.png" not in out and "Traceback" not in err
    lines = err.splitlines()
    assert len(lines) == len(bad)
    for path, line, words in zip(
        bad,
        lines,
        ("not a readable", "not a readable", "holds 2 pictures", "32 bits", "not a readable", "no file", "a folder"),
        strict=True,
    ):
        assert str(path) in line and words in line
    code, out, err = kerneq("predict", digits_run, *bad, "--json")
    result = json.loads(out)
    assert code == 1 and result["predictions"] == [] and [f["path"] for f in result["failures"]] == list(map(str, bad))
    with pytest.raises(DataError, match="text.png is not a readable picture"):
        predict(digits_run, [good, text], device="cpu")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux takes any bytes as a file's name")
def test_a_name_that_is_no_text_is_shown_all_the_same(kerneq, digits_run, tmp_path):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.png"))
    painted(8, 8).save(path)
    code, out, _ = kerneq("predict", digits_run, path, "--device", "cpu")
    assert code == 0 and "?.png" in out
    code, _, err = kerneq("predict", digits_run, str(path) + "x", "--device", "cpu")
    assert code == 1 and "?.pngx" in err


@pytest.mark.parametrize("size", [(40, 23), (23, 40), (16, 16), (7, 5)])
@pytest.mark.parametrize("ending", ["png", "jpg"])
def test_pictures_are_read_as_the_reader_of_picture_folders_reads_them(tmp_path, size, ending):
    path = tmp_path / f"plain.{ending}"
    painted(*size).save(path)
    expected = decode(path, 16)
    assert torch.equal(read_picture(path, 3, 16), expected)
    opaque = tmp_path / "opaque.png"  # the way of the transparent ones; nothing shows through here
    with Image.open(path) as picture:
        picture.convert("RGBA").save(opaque)
    with Image.open(path) as picture:
        picture.convert("RGB").save(tmp_path / "same.png")
    assert torch.equal(read_picture(opaque, 3, 16), decode(tmp_path / "same.png", 16))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("ending", ["png", "jpg"])
def test_a_picture_is_turned_as_its_exif_data_say(tmp_path, orientation, ending):
    upright = painted(48, 32)
    stored = {  # how a camera stores what should be seen as `upright`
        1: upright,
        2: upright.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        3: upright.transpose(Image.Transpose.ROTATE_180),
        4: upright.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
        5: upright.transpose(Image.Transpose.TRANSPOSE),
        6: upright.transpose(Image.Transpose.ROTATE_90),
        7: upright.transpose(Image.Transpose.TRANSVERSE),
        8: upright.transpose(Image.Transpose.ROTATE_270),
    }[orientation]
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    path, plain = tmp_path / f"turned.{ending}", tmp_path / "plain.png"
    stored.save(path, exif=exif)
    upright.save(plain)
    difference = read_picture(path, 3, 16).int() - read_picture(plain, 3, 16).int()
    # A JPEG loses up to 8 levels here, turned or not; a picture turned wrongly is 157 levels off and more.
    assert difference.abs().max() <= (0 if ending == "png" else 20)


def test_transparency_is_white_and_grey_is_luma_and_16_bits_become_8(tmp_path):
    clear, half, palette, deep, red = (tmp_path / f"{name}.png" for name in ("clear", "half", "palette", "deep", "red"))
    Image.new("RGBA", (9, 9), (255, 0, 0, 0)).save(clear)
    assert bool((read_picture(clear, 3, 4) == 255).all())
    Image.new("RGBA", (9, 9), (0, 0, 0, 51)).save(half)
    assert bool((read_picture(half, 1, 4) == 204).all())
    indexed = Image.new("P", (9, 9), 1)
    indexed.putpalette([0, 0, 0, 10, 200, 30])
    for picture, invisible in ((indexed, 1), (Image.new("L", (9, 9), 7), 7), (Image.new("RGB", (9, 9), 9), (9, 0, 0))):
        picture.save(palette, transparency=invisible)
        assert bool((read_picture(palette, 3, 4) == 255).all())
    indexed.save(palette, transparency=0)  # another entry of the palette than the one in use
    assert read_picture(palette, 3, 4)[:, 0, 0].tolist() == [10, 200, 30]
    Image.fromarray(np.full((9, 9), 128 * 257, dtype=np.uint16)).save(deep)
    assert read_picture(deep, 1, 4).unique().tolist() == [128]
    Image.new("RGB", (9, 9), (255, 0, 0)).save(red)
    assert read_picture(red, 1, 4).unique().tolist() == [76] and read_picture(red, 1, 4).shape == (1, 4, 4)


def test_a_picture_made_to_fill_the_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    path = tmp_path / "large.png"
    painted(14, 14).save(path)
    with warnings.catch_warnings(), pytest.raises(DataError, match="large.png is not a readable picture"):
        read_picture(path, 3, 8)


def test_a_model_without_an_equilibrium_names_the_classes_of_its_folder(kerneq, colour_run, tmp_path):
    run, _ = colour_run
    red = tmp_path / "red.jpg"
    Image.new("RGB", (300, 200), (210, 30, 30)).save(red)
    [prediction] = predict(run, [red], device="cpu")
    assert prediction.classes == ("red wine", "blue sky") and prediction.converged
    assert prediction.status is prediction.steps is prediction.residual is None
    code, out, _ = kerneq("predict", run, red, "--json")
    [row] = json.loads(out)["predictions"]
    assert code == 0 and row["converged"] is row["status"] is row["steps"] is row["residual"] is None
    code, out, _ = kerneq("predict", run, red)
    assert code == 0 and "red wine" in out and "converged" not in out and "not known" not in out


def test_without_its_folder_of_pictures_a_run_numbers_the_classes_and_says_so(kerneq, colour_run, tmp_path):
    run, pictures = colour_run
    red = tmp_path / "red.png"
    Image.new("RGB", (30, 20), (210, 30, 30)).save(red)
    hidden = pictures.rename(pictures.with_name("hidden"))
    try:
        code, out, _ = kerneq("predict", run, red, "--top", "1")
        assert code == 0 and "red wine" not in out and "names of the classes are not known" in out
        code, out, _ = kerneq("predict", run, red, "--json")
        result = json.loads(out)
        assert result["named"] is False and result["predictions"][0]["top"][0]["class"] == "1"
    finally:
        hidden.rename(pictures)
    (pictures / "train" / "green grass").mkdir()  # a class that the model has never heard of
    try:
        assert not Predictor.open(run, device="cpu").named
    finally:
        (pictures / "train" / "green grass").rmdir()


@pytest.mark.parametrize("name", sorted(name for name, found in DATA_SETS.items() if isinstance(found, Packed)))
def test_the_size_and_classes_of_a_packed_data_set_are_known_without_it(name, monkeypatch, tmp_path):
    try:
        images = load(name, "test")
    except DataError as error:
        images = None
        reason = str(error)
    monkeypatch.setenv("KERNEQ_DATA", str(tmp_path))
    config = parse("", [f"data.name={name}"])
    known, named = subject(config, outputs=10)
    assert named and known.shape[1:] == (SIDES[name], SIDES[name]) and len(known) == 0
    if images is None:
        pytest.skip(f"{reason} Its pictures' size could not be compared.")
    assert (known.shape, known.classes, known.mean, known.std) == (
        images.shape,
        images.classes,
        images.mean,
        images.std,
    )


def test_a_run_on_some_of_the_classes_names_those():
    some, _ = subject(parse("", ["data.name=cifar10", "data.subset=first-five-classes"]), outputs=5)
    assert some.classes == ("airplane", "automobile", "bird", "cat", "deer")
    photographs, named = subject(parse("", ["data.name=imagenette", "data.size=64"]), outputs=10)
    assert named and photographs.classes[0] == "tench" and photographs.shape == (3, 64, 64)


def test_a_wrong_request_ends_in_a_sentence_and_a_code(kerneq, digits_run, tmp_path):
    [path] = write_digits(tmp_path, 1)
    for arguments, code, words in (
        ([tmp_path, path], 1, "is not a run folder: it has no config.toml."),
        ([digits_run], 2, "Missing argument"),
        ([digits_run, path, "--which", "first"], 2, "--which must be best or last, got `first`."),
        ([digits_run, path, "--top", "0"], 2, "Invalid value"),
        ([digits_run, path, "--device", "tpu"], 1, "`device` must be auto, cpu, cuda or cuda:N"),
    ):
        got, out, err = kerneq("predict", *arguments)
        assert got == code and out == "" and words in " ".join(err.split()) and "Traceback" not in err
    with pytest.raises(ValueError, match="`top` must be a whole number, at least 1, got 0."):
        predict(digits_run, [path], top=0, device="cpu")


def test_a_damaged_or_absent_checkpoint_is_named(digits_run, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.toml").write_bytes((digits_run / "config.toml").read_bytes())
    with pytest.raises(TrainingError, match="There is no checkpoint .*best.safetensors"):
        Predictor.open(tmp_path, device="cpu")
    whole = Folder(digits_run).checkpoint("best").read_bytes()
    for damage in (whole[:-7], whole[:40], b"", whole[:-1] + bytes([whole[-1] ^ 1])):
        Folder(tmp_path).checkpoint("best").write_bytes(damage)
        with pytest.raises(TrainingError, match="best.safetensors is damaged"):
            Predictor.open(tmp_path, device="cpu")
