"""Weights that ship, and how a run becomes a folder to hand on."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from predict_helpers import write_digits

import kerneq as kq
from kerneq import loading, operators
from kerneq.lab.cli import evaluation
from kerneq.lab.data import DataError
from kerneq.lab.evaluate import TrainedRun, export
from kerneq.lab.evaluate.attack import InPixels
from kerneq.lab.evaluate.export import card
from kerneq.lab.run import SHIPPED, Run, TrainingError, find_run
from kerneq.lab.run.config import load
from kerneq.lab.training import train
from kerneq.lab.training.metrics import validate
from kerneq.linear_maps import run_lanczos

# The first ten logits of the shipped weights for `waves`, float32 on a CPU, when they were shipped.
WAVES = {
    "geq-5m-cifar10": [
        [-0.1627, -0.2798, 3.6289, -0.2646, -1.0103, -1.4355, 1.5727, -1.0402, -0.4978, -0.4534],
        [-0.0670, -0.2042, 2.4224, -0.2466, 0.1433, -1.1205, 1.7430, -1.2309, -0.5349, -0.8476],
    ],
    "geq-5m-cifar100": [
        [2.8748, -0.0554, -1.1123, -1.0807, -0.0923, -0.4238, 2.6439, 0.6625, -0.1199, 0.3656],
        [3.4906, -0.6890, -1.1171, -1.1777, -0.5598, -0.4605, 2.7781, 1.3777, 0.2335, 0.9629],
    ],
    "geq-6m-imagenette": [
        [-0.7461, -0.8151, -0.8962, -0.4616, 0.2952, -0.8546, -1.0510, 0.1223, 1.6679, 2.6059],
        [-0.2430, -0.7703, -0.6959, -0.5179, 0.1747, -0.3797, -1.0693, 0.2499, 1.4468, 1.6758],
    ],
}


def waves(size: int) -> torch.Tensor:
    """Two pictures (2, 3, size, size) that anybody can draw."""
    side = torch.linspace(-1, 1, size, dtype=torch.float64)
    y, x = torch.meshgrid(side, side, indexing="ij")
    plane = [torch.sin(a * x + b * y + c) for a, b, c in ((3, 1, 0), (1, 4, 1), (5, -2, 2), (0, 6, 0))]
    return torch.stack([torch.stack(plane[start : start + 3]) for start in (0, 1)]).float()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("runs") / "tiny"
    train(load("geq-tiny-digits", ["training.epochs=1"]), path)
    return Run(path)


def test_an_exported_run_is_a_small_run_that_says_what_it_is(trained, tmp_path):
    exported = export(trained.path, tmp_path / "mine")
    x = torch.rand(4, 1, 8, 8)
    torch.testing.assert_close(kq.load(exported.path)(x), kq.load(str(trained.path))(x), atol=2e-2, rtol=0)
    smaller = exported.checkpoint("best").stat().st_size / trained.checkpoint("best").stat().st_size
    shown = (exported.path / "README.md").read_text()
    assert smaller < 0.7 and exported.rows() == trained.rows() and exported.classes() == trained.classes()
    assert hashlib.sha256(exported.checkpoint("best").read_bytes()).hexdigest() in shown
    assert "Not evaluated" in shown and "1 epochs" not in shown and "8 × 8 pixels, 1 channel in [0, 1]" in shown
    assert "logits: 0, 1, 2, 3" in shown and "licence: CC BY 4.0" in shown and "Attacks were not tried on it." in shown
    with pytest.raises(TrainingError, match="already exists"):
        export(trained.path, tmp_path / "mine")
    assert not list(tmp_path.glob(".*"))


def test_the_card_of_a_run_on_some_of_the_classes_says_so(trained, tmp_path):
    """Its accuracy is not that of the whole data set, and half of that was not trained on."""
    path = shutil.copytree(trained.path, tmp_path / "five")
    config = path / "config.toml"
    config.write_text(config.read_text().replace('subset = "all"', 'subset = "first-five-classes"'))
    numbers = {"accuracy": 0.5, "images": 178, "loss": 1.0}
    (path / "evaluation.json").write_text(json.dumps({"scores": {"test": numbers}}))
    shown = card(Run(path))
    assert "the 178 test images of digits (first five classes)**" in shown
    assert "the training images of digits (first five classes)," in shown


def test_the_command_of_a_card_is_quoted_for_a_shell(trained, tmp_path):
    exported = export(trained.path, tmp_path / "my model")
    assert "kerneq predict 'my model' photo.jpg" in (exported.path / "README.md").read_text()


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("evaluation.json", "{", r"damaged/evaluation\.json is damaged"),
        ("evaluation.json", '{"scores": {"test": {"accuracy": 0.5}}}', "The evaluation of .*damaged is damaged"),
        ("evaluation/attack.json", "[]", r"damaged/evaluation/attack\.json is damaged"),
    ],
)
def test_an_evaluation_that_is_damaged_is_named_and_not_exported(trained, tmp_path, file, content, words):
    path = shutil.copytree(trained.path, tmp_path / "damaged")
    (path / "evaluation").mkdir(exist_ok=True)
    (path / file).write_text(content)
    with pytest.raises(TrainingError, match=words):
        export(path, tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


def test_an_export_that_fails_leaves_nothing_behind(trained, tmp_path, monkeypatch):
    def full(*arguments):
        raise TrainingError("No space left on device.")

    monkeypatch.setattr(sys.modules["kerneq.lab.evaluate.export"], "save", full)
    with pytest.raises(TrainingError, match="No space"):
        export(trained.path, tmp_path / "deep" / "mine")
    assert not list((tmp_path / "deep").iterdir())


def test_export_measures_the_norms_of_the_rounded_weights_and_stores_them(trained, tmp_path, monkeypatch):
    searches = []
    counted = lambda *a, **k: searches.append(1) or run_lanczos(*a, **k)  # noqa: E731
    monkeypatch.setattr("kerneq.linear_maps.run_lanczos", counted)
    exported = export(trained.path, tmp_path / "mine")
    assert searches
    model = TrainedRun.open(exported.path, "best", "cpu").model
    assert all(part.settled for part in model.modules() if isinstance(part, operators.Operator))


def test_a_card_shows_a_name_that_is_no_text_all_the_same(trained, tmp_path):
    names = [*trained.classes()[:-1], os.fsdecode(b"caf\xe9")]
    copy = shutil.copytree(trained.path, tmp_path / "copy")
    (copy / "classes.json").write_text(json.dumps({"classes": names}))
    exported = export(copy, tmp_path / os.fsdecode(b"mine \xff"))
    assert exported.classes() == tuple(names) and ", caf?." in (exported.path / "README.md").read_text()


def test_what_was_measured_on_the_weights_of_another_epoch_is_not_handed_on(trained, tmp_path):
    epoch = TrainedRun.open(trained.path).epoch
    copy = Run(shutil.copytree(trained.path, tmp_path / "copy"))
    for name, of in (("scores", epoch), ("count", epoch + 1)):
        copy.write_part(name, {"epoch": of, "scores": {"test": {"accuracy": 0.5, "images": 3, "loss": 1.0}}})
    exported = export(copy.path, tmp_path / "mine")
    assert "50.00% on the 3 test images" in (exported.path / "README.md").read_text() and exported.part("count") == {}


def test_the_command_hands_on_a_run(trained, tmp_path, capsys):
    evaluation.export(trained.path, tmp_path / "mine")
    assert "README.md" in capsys.readouterr().out and Run(tmp_path / "mine").exists


def test_a_name_is_a_folder_or_weights_that_ship_or_a_sentence(trained, tmp_path, monkeypatch):
    assert find_run(trained.path) == trained and find_run("geq-5m-cifar10").path.parent == SHIPPED
    with pytest.raises(TrainingError, match="Did you mean `geq-5m-cifar10`"):
        kq.load("geq-5m-cifar")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "geq-5m-cifar10").symlink_to(trained.path)
    assert find_run("geq-5m-cifar10").config().data.name == "digits"  # a folder of one's own goes first


@pytest.mark.parametrize("name", loading.names())
def test_shipped_weights_say_what_they_said_when_they_were_shipped(name):
    run = find_run(name)
    assert run.checkpoint("best").stat().st_size <= 16 * 2**20 and run.test()["accuracy"] > 0
    shown = (run.path / "README.md").read_text().splitlines()
    assert [line for line in card(run).splitlines() if line not in shown] == [], "the card says what the records do"
    model = kq.load(name)
    assert all(part.settled for part in model.modules() if isinstance(part, operators.Operator))
    logits = model(waves(run.config().data.size or 32))
    torch.testing.assert_close(logits[:, :10].detach(), torch.tensor(WAVES[name]), atol=2e-3, rtol=1e-3)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", loading.names())
def test_shipped_weights_have_their_recorded_accuracy(name):
    trained = TrainedRun.open(name)
    try:
        test = trained.test
    except DataError as error:
        pytest.skip(str(error))
    scores = validate(trained.model, trained.batches(test), trained.process, trained.config.training.amp)
    assert abs(scores["accuracy"] - trained.run.test()["accuracy"]) <= 0.0015


def test_shipped_weights_name_a_picture_straight_after_install(tmp_path):
    from PIL import Image

    Image.new("RGB", (40, 30), "navy").save(tmp_path / "sea.png")
    command = [sys.executable, "-m", "kerneq", "predict", "geq-5m-cifar10", "sea.png", "--json", "--device", "cpu"]
    environment = {**os.environ, "KERNEQ_DATA": str(tmp_path / "nothing"), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0 and "airplane" in done.stdout, done.stderr


def test_names_of_classes_and_paths_of_this_machine_stay_out_of_a_card(colour_run, tmp_path):
    names = ["<img src=x onerror=alert(1)> [a](javascript:b)", "red\x1b[31m\u202e a|b\n# c"]
    copy = Run(shutil.copytree(colour_run[0], tmp_path / "copy"))
    (copy.path / "classes.json").write_text(json.dumps({"classes": names}))
    exported = export(copy.path, tmp_path / "x`<i>")
    shown = (exported.path / "README.md").read_text()
    assert "\\<img" in shown and "<img" not in shown.replace("\\<", "") and "](java" not in shown.replace("\\](", "")
    assert "<i>" not in shown.replace("\\<", "").partition("```")[0]
    assert "\x1b" not in shown and "\u202e" not in shown and "\n# c" not in shown and "folder:pictures" in shown
    everything = "".join(file.read_text() for file in exported.path.glob("*.*"))
    assert str(colour_run[1].parent) not in everything and '"command"' not in everything
    assert str(colour_run[1].parent) in (copy.path / "config.toml").read_text()


@pytest.mark.parametrize("content", ['{"resumed": 3}', '{"scores": 1}', "[" * 9999])
@pytest.mark.parametrize("file", ["evaluation.json", "environment.json", "evaluation/attack.json", "metrics.jsonl"])
def test_a_crafted_record_is_no_traceback(kerneq, trained, tmp_path, file, content):
    copy = Run(shutil.copytree(trained.path, tmp_path / "copy"))
    (copy.path / "evaluation").mkdir(exist_ok=True)
    (copy.path / file).write_text(content)
    for command in (("export", copy.path, tmp_path / "mine"), ("report", copy.path, "--output", tmp_path / "a.html")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code, _, err = kerneq(*command)
        assert code in (0, 1) and (code == 0 or str(copy.path) in err), err


@pytest.mark.parametrize("kind", ["pipe", "zeros"])
def test_no_command_waits_for_a_pipe_or_reads_a_device_without_end(kerneq, trained, tmp_path, kind):
    def replace(path):
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")

    files = ["evaluation.json", "evaluation/mistakes.png"]
    if kind == "pipe":
        files += ["config.toml", "classes.json", "environment.json", "metrics.jsonl", "checkpoints/best.safetensors"]
    picture = write_digits(tmp_path, 1)[0]
    for file in files:
        copy = Path(shutil.copytree(trained.path, tmp_path / file.replace("/", "-")))
        replace(copy / file)
        out = tmp_path / f"{file.replace('/', '-')}.html"
        for command in (
            ("report", copy, "--output", out),
            ("export", copy, out.with_suffix(".d")),
            ("predict", copy, picture, copy / file, "--threshold", "auto"),
        ):
            code, _, err = kerneq(*command)
            assert code == 0 or (code in (1, 2) and err.startswith("kerneq: ")), (command, err)
    replace(tmp_path / "pipe.toml")
    for command in ("sweep", "train"):
        code, _, err = kerneq(command, tmp_path / "pipe.toml")
        assert code == 2 and "pipe.toml" in err


def test_without_its_packages_an_onnx_file_is_refused_before_anything_is_written(
    kerneq, trained, tmp_path, monkeypatch
):
    monkeypatch.setattr("kerneq.lab.evaluate.onnx.NEEDED", ("onnx_of_nobody",))
    code, _, err = kerneq("export", trained.path, tmp_path / "mine", "--onnx", "4")
    assert code == 1 and "install them by `pip install 'kerneq[onnx]'`" in err and not (tmp_path / "mine").exists()


def test_an_onnx_file_says_what_the_model_says_with_so_many_steps(kerneq, tmp_path):
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    train(load("geq-dense-tiny-digits", ["training.epochs=1"]), tmp_path / "run")
    code, out, _ = kerneq("export", tmp_path / "run", tmp_path / "mine", "--onnx", "8")
    found = re.search(r"8 plain steps leave a residual of (\S+) and move the logits by (\S+) at most", out)
    assert code == 0 and float(found[1]) < 1e-2 and float(found[2]) < 0.1
    session = runtime.InferenceSession(tmp_path / "mine" / "model.onnx")
    opened = TrainedRun.open(tmp_path / "mine", device="cpu")
    for count in (1, 5):  # any batch
        x = torch.rand(count, 1, 8, 8)
        (logits,) = session.run(["logits"], {"pixels": x.numpy()})
        expected = InPixels(opened.model, opened.seen.mean, opened.seen.std)(x)
        torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=1e-3, atol=2e-2)
