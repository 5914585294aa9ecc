import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kerneq import __version__
from kerneq.lab import cli, demo
from kerneq.lab.cli import main
from kerneq.lab.run import Run, checkpoint
from kerneq.lab.run.config import EXPERIMENTS, load, write
from kerneq.lab.training.metrics import METRICS
from kerneq.loading import read_checkpoint

pytestmark = pytest.mark.usefixtures("empty_folder")
QUICK = ["model.name=resnet-tiny", "training.epochs=1", "training.batch_size=256"]


@pytest.fixture
def kerneq(kerneq):
    """Call the program; returns (exit code, what it said)."""

    def call(*arguments: str) -> tuple[int, str]:
        code, out, err = kerneq(*arguments)
        return code, out + err

    return call


def test_a_run_is_trained_evaluated_and_reported_on(kerneq):
    code, said = kerneq("train", "geq-dense-tiny-digits", "training.epochs=2", "training.ema=0.9", "seed=1")
    assert code == 0 and "best validation accuracy" in said and "kerneq evaluate runs/geq-dense-tiny-digits" in said
    assert "steps" in said and "residual" in said
    run = Run(Path("runs/geq-dense-tiny-digits"))
    row = run.rows()[-1]
    assert row["validation"]["steps"] > 1 and row["validation"]["unconverged"] == 0 and "norm" in row["diagnostics"]
    assert list((run.path / "tensorboard").iterdir())
    code, said = kerneq("evaluate", str(run.path), "--checkpoint", "last")
    assert code == 0 and "accuracy" in said and "solver steps" in said
    assert run.test()["images"] == 355 and 0.2 < run.test()["accuracy"] <= 1
    code, said = kerneq("report", str(run.path), "--output", "page.html")
    assert code == 0 and "geq-dense-tiny" in Path("page.html").read_text()
    code, _ = kerneq("train", str(run.path), "--resume")
    assert code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["trian"], 2, "No such command"),
        (["train", "--lr", "3"], 2, "No such option"),
        (["train", "nowhere.toml"], 2, "There is no file nowhere.toml"),
        (["train", "nope"], 2, "There is no experiment 'nope'. The nearest names are: "),
        (["train", "optimizer.lrr=1"], 2, "Did you mean `optimizer.lr`?"),
        (["train", "model.kernel.split=5", "--show-config"], 2, "`split` must divide the number of features"),
        (["train", "data.name=cifar10"], 1, "The data set cifar10 is not in"),
        (["train", "data.name=digit"], 1, "Did you mean `digits`?"),
        (["train", "data.name=folder:~nosuch/x"], 1, "There is no folder"),
        (["train", "data.name=folder:x\udcff"], 2, r"`data.name` must be valid UTF-8, got 'folder:x\udcff': rename"),
        (["train", "device=tpu"], 2, "`device` must be auto, cpu, cuda or cuda:N, got `tpu`."),
        (["train", "model.name=resnet-tiny", "--name", "a/b"], 2, "without slashes"),
        (["train", "--runs", "/proc/nowhere"], 1, "cannot be used"),
        (["train", "...toml"], 2, "without slashes, got `..`"),
        (["train", f"augment.cutout={10**400}"], 2, "`augment.cutout` must be at most 1000000"),
        (["train", "augment.cutout=17"], 1, "`cutout` must be at most 16 here"),
        (["train", "geq-tiny-digits", "model." + "a." * 5000 + "a=1"], 2, "There is no setting `model.a`"),
        (["train", "."], 2, "add --resume"),
        (["train", ".", "--resume"], 2, "There is no file config.toml"),
        (["train", ".", "--resume", "--runs", "a"], 2, "--name, --runs and --from are for a new run"),
        (["evaluate"], 2, "Missing argument"),
        (["evaluate", "nowhere"], 1, "There is no run folder nowhere, and no weights of that name ship"),
        (
            ["evaluate", "geq-5m-cifar10", "--checkpoint", "first"],
            2,
            "`checkpoint` must be 'best' or 'last', got 'first'.",
        ),
        (["report", "nowhere"], 1, "There is no run folder nowhere"),
        (["demo", "--epochs", "0"], 2, "Invalid value"),
    ],
)
def test_a_wrong_request_ends_in_a_sentence_and_a_code(kerneq, arguments, code, words):
    Path("...toml").touch()
    got, said = kerneq(*arguments)
    assert got == code, said
    assert not Path("runs").exists()
    assert words in " ".join(said.split())
    assert "Traceback" not in said


def test_a_bug_is_not_hidden_behind_a_sentence(monkeypatch):
    def broken():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        main(broken)


def test_a_warning_of_ours_is_a_sentence_and_anothers_says_where_it_is_from():
    said = []

    def command():
        for file in (cli.__file__, "/elsewhere/torch.py"):
            said.append(warnings.formatwarning(UserWarning("a line was skipped"), UserWarning, file, 1, ""))

    main(command)
    assert said[0] == "kerneq: a line was skipped\n" and said[1].startswith("/elsewhere/torch.py:1: UserWarning:")


def test_show_config_prints_what_a_run_would_use_and_does_nothing(kerneq):
    code, said = kerneq("train", "geq-5m-cifar10", "optimizer.lr=0.2", "--show-config")
    assert code == 0 and "lr = 0.2  # the highest learning rate" in said and "milestones = [0.5, 0.75]" in said
    assert '[model.kernel]\nname = "gaussian"  # similarity' in said and "gamma = 0.2\n" in said
    assert not Path("runs").exists()


def test_train_alone_shows_its_help(kerneq):
    code, said = kerneq("train")
    assert (
        code in (0, 2)
        and "train [OPTIONS] [FILE] [KEY=VALUE]..." in said
        and "--resume" in said
        and not Path("runs").exists()
    )


def test_a_checkpoint_that_is_not_there_comes_with_the_one_that_is_or_the_command_that_makes_it(kerneq):
    assert kerneq("train", *QUICK, "--name", "a")[0] == 0
    assert kerneq("export", "runs/a", "small")[0] == 0
    code, said = kerneq("evaluate", "small", "--checkpoint", "last")
    assert code == 1 and "no checkpoint small/checkpoints/last.safetensors: ask for the best one." in said
    Path("runs/a/checkpoints/best.safetensors").unlink()
    code, said = kerneq("evaluate", "runs/a")
    assert code == 1 and "best.safetensors: ask for the last one." in said
    Path("runs/a/checkpoints/last.safetensors").unlink()
    code, said = kerneq("evaluate", "runs/a")
    assert code == 1 and "best.safetensors: kerneq train runs/a --resume makes it." in said


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("kerneq pre", {"predict"}),
        ("kerneq train geq-tiny-d", {"geq-tiny-digits"}),
        ("kerneq sweep gam", {"gamma"}),
        ("kerneq evaluate runs/x --checkpoint ", {"best", "last"}),
        ("kerneq predict geq-5m-cifar", {"geq-5m-cifar10", "geq-5m-cifar100"}),
    ],
)
def test_the_shell_completes_without_importing_torch(words, offered):
    place = {"_KERNEQ_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    assert set(said_without_torch("kerneq", place).split()) == offered


def test_help_comes_without_importing_torch():
    assert "Kernel equilibrium models" in said_without_torch("kerneq --help", {})


@pytest.mark.parametrize("program", ["from kerneq.cli import main; main()", "import kerneq.__main__ as m; m.main()"])
def test_without_the_laboratory_the_program_says_what_to_install(program):
    code = f"import sys; sys.modules |= dict(typer=None, rich=None); {program}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("The program kerneq needs rich, typer: install them by `pip ")


def test_help_swallows_no_word_and_names_what_it_wants_in_capitals(kerneq):
    """Typer takes a [word] for a style and leaves it out."""
    code, said = kerneq("sweep", "--help")
    assert code == 0 and "with a table `grid`" in " ".join(said.replace("│", " ").split()) and "FILE" in said
    assert "FOLDER" in kerneq("export", "--help")[1]


def said_without_torch(command: str, environment: dict[str, str]) -> str:
    code = f"import sys; sys.argv = {command.split()}\nfrom kerneq.lab.cli import main\n"
    code += "try: main()\nfinally: assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_terminal_without_our_characters_costs_nobody_a_result():
    code = "from kerneq.lab.cli import main\nfrom kerneq.lab.console import say\nmain(lambda: say('95 % … μ'))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONIOENCODING": "latin-1"}, capture_output=True
    )
    assert done.returncode == 0 and done.stdout == b"95 % ? ?\n"


def test_a_card_without_memory_is_a_sentence_with_advice(capsys):
    def command() -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free. Including non-PyTorch memory, "
            "this process has 9 GiB in use. Of the allocated memory 8 GiB is allocated by PyTorch. If reserved but"
        )

    with pytest.raises(SystemExit, match="1"):
        main(command)
    said = capsys.readouterr().err
    assert "allocate 2.00 GiB. GPU 0 has 1.00 GiB free. Free the card" in said and "training.batch_size" in said


def test_the_version_is_printed(kerneq):
    assert kerneq("--version") == (0, f"kerneq {__version__}\n")


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "TORCHELASTIC_RESTART_COUNT"])
@pytest.mark.parametrize("value", ["abc", "-2", ""])
def test_an_odd_environment_is_a_sentence(kerneq, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    code, said = kerneq("train", *QUICK)
    assert code == 1 and f"{name} must be a whole number, got '{value}'" in said


@pytest.mark.parametrize("name", [r"$\frac{a$[bold]", "[red", "a\x1b[31mb"])
def test_a_name_that_is_code_elsewhere_is_a_name(kerneq, name):
    code, said = kerneq("train", *QUICK, "--name", name)
    assert code == 0 and "1 epoch, best" in said and "\x1b" not in said
    assert "\x1b" in name or (f"runs/{name}: 1 epoch" in said and f"kerneq evaluate 'runs/{name}'" in said)
    code, said = kerneq("evaluate", f"runs/{name}")
    assert code == 0 and "\x1b" not in said
    assert kerneq("report", f"runs/{name}")[0] == 0


def test_a_diverged_training_ends_in_its_sentence(kerneq):
    code, said = kerneq("train", "model.name=geq-tiny", "training.batch_size=256", "optimizer.lr=1000", "--name", "a")
    assert code == 1 and "What was saved before is intact. Lower optimizer.lr" in said


def test_features_that_are_no_numbers_are_a_sentence_in_evaluation(kerneq):
    assert kerneq("train", "model.name=geq-tiny", *QUICK[1:], "--name", "a")[0] == 0
    path = Run(Path("runs/a")).checkpoint("best")
    tensors, facts = read_checkpoint(path)
    huge = {name: torch.full_like(tensor, 3e38) for name, tensor in tensors.items() if tensor.dim() > 1}
    checkpoint.save(path, tensors | huge, facts)
    code, said = kerneq("evaluate", "runs/a")
    assert code == 1 and "kerneq: The input has infinite or NaN entries" in said


def test_data_and_models_are_listed_in_80_columns(kerneq, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, said = kerneq("data")
    assert code == 0 and "digits" in said and "cifar10" in said and "licence" in said
    code, said = kerneq("models")
    assert code == 0 and "…" not in said.split("NAME")[1]
    [row] = [line for line in said.splitlines() if line.startswith("geq-5m ")]
    assert row.split()[:5] == ["geq-5m", "4.8M", "1", "cifar10", "94.8±0.1"]
    assert re.search(r"weights that ship, for kerneq predict: geq-5m-cifar10 \(9\d\.\d\d%\), geq-5m-cifar100 \(", said)


def test_a_data_folder_of_a_user_who_does_not_exist_is_a_folder_that_is_not_there(kerneq, monkeypatch):
    monkeypatch.setenv("KERNEQ_DATA", "~nosuch/x")
    code, said = kerneq("data")
    assert code == 0 and "~nosuch/x" in said
    code, said = kerneq("train", "data.name=cifar10")
    assert code == 1 and "cifar10 is not in ~nosuch/x" in " ".join(said.split())


def test_a_batch_too_small_for_a_batch_norm_is_a_sentence(kerneq):
    code, said = kerneq("train", "geq-dense-tiny-digits", "training.batch_size=1")
    assert code == 1 and "single value of each channel" in said and "training.batch_size" in said


def test_the_demo_ends_in_a_table_and_a_page(kerneq, monkeypatch):
    monkeypatch.setattr(demo, "DEMO_MODELS", ("geq-dense-tiny", "resnet-tiny"))
    Path("out/resnet-tiny").mkdir(parents=True)
    Path("out/resnet-tiny/config.toml").write_text(write(load("resnet-tiny-digits", ["training.epochs=3"])))
    Path("out/resnet-tiny/left by an earlier demo").touch()
    code, said = kerneq("demo", "--epochs", "1", "--output", "out")
    assert code == 0 and "test accuracy" in said and "out/report.html" in said
    assert not Path("out/resnet-tiny/left by an earlier demo").exists()
    Path("out/resnet-tiny/config.toml").unlink()
    code, said = kerneq("demo", "--epochs", "1", "--output", "out")
    assert code == 2 and "not a run of the demo" in said and Path("out/resnet-tiny").exists()


def test_the_demo_replaces_no_run_of_other_settings_and_none_in_use(kerneq, monkeypatch):
    monkeypatch.setattr(demo, "DEMO_MODELS", ("geq-dense-tiny", "resnet-tiny"))
    settings = {"out/geq-dense-tiny": [], "out/resnet-tiny": ["seed=7"]}
    for name, changes in settings.items():
        Path(name).mkdir(parents=True)
        Path(name, "config.toml").write_text(write(load(f"{Path(name).name}-digits", changes)))
    code, said = kerneq("demo", "--epochs", "1", "--output", "out")
    assert code == 2 and "out/resnet-tiny exists but is not a run of the demo" in said
    assert all(Path(name, "config.toml").exists() for name in settings)
    with Run(Path("out/geq-dense-tiny")).locked():
        Path("out/resnet-tiny/config.toml").write_text(write(load("resnet-tiny-digits")))
        code, said = kerneq("demo", "--epochs", "1", "--output", "out")
    assert code == 1 and "in use by process" in said
    assert all(Path(name, "config.toml").exists() for name in settings)


def test_the_module_runs_as_a_program_and_a_full_disk_gives_no_traceback(tmp_path):
    # The real limit on a file's size: every write beyond it fails as on a full disk.
    limit = "import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, (60000, 60000)); "
    limit += "runpy.run_module('kerneq', run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", limit, "train", *QUICK, "--name", "full"]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    said = " ".join((result.stdout + result.stderr).split())
    assert result.returncode == 1
    assert "could not be written: File too large" in said and "Traceback" not in said


def test_ctrl_c_where_nothing_is_trained_is_answered_too(kerneq, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("kerneq.lab.data.describe", interrupted)
    code, err = kerneq("data")
    assert (code, err) == (130, "kerneq: Interrupted.\n")


# Without slashes: `kerneq evaluate /` would evaluate every run on this machine.
words = st.text(st.characters(codec="utf-8", exclude_characters="\x00/"), max_size=10)
arguments = st.lists(
    words | st.sampled_from(["--resume", "--name", "--runs", "--show-config", "seed=1", "a.toml", "=", "model="]),
    max_size=4,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(command=st.sampled_from(["train", "evaluate", "report"]) | words, rest=arguments)
def test_no_arguments_whatever_give_a_traceback(monkeypatch, capsys, tmp_path, command, rest):
    (tmp_path / "here").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / "here")  # nor is there a run above it
    if command == "train":
        rest = [*rest, "seed=1", "training.epochs=0"]  # never a run, though `--name` may take the first of the two
    monkeypatch.setattr(sys, "argv", ["kerneq", command, *rest])
    with pytest.raises(SystemExit):
        main()
        raise SystemExit(0)
    capsys.readouterr()


def test_the_words_of_tables_are_explained_and_the_page_is_the_same(kerneq):
    page = (Path(__file__).parents[3] / "docs/glossary.md").read_text()
    assert kerneq("explain", "--markdown") == (0, page)
    for word in ("norm_raw", "energy", "gamma", "residual", "deletion", "MCE", "ece", "Not-Converged", "weights"):
        assert kerneq("explain", word)[0] == 0, word
    for metric in METRICS:
        assert kerneq("explain", metric.title)[0] == 0, "whatever a run prints"
    code, said = kerneq("explain", "gama")
    assert code == 2 and "Did you mean `gamma`?" in said and "norm_raw" in kerneq("explain")[1]


def test_experiments_are_listed_with_a_sentence_each(kerneq, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, said = kerneq("experiments")
    assert code == 0 and max(map(len, said.splitlines())) <= 80
    assert all(f"  {file.stem} " in said for file in EXPERIMENTS.glob("**/*.toml"))
    assert all(file.read_text().startswith("# ") for file in EXPERIMENTS.glob("**/*.toml")), "its sentence"
    _, said = kerneq("experiments", "CIFAR10", "kerdeq")
    assert "kerdeq-5m-cifar10" in said and "geq-5m-cifar10 " not in said.replace("mopteq", "").replace("kerdeq", "")
    _, said = kerneq("experiments", "own")
    assert "own-pictures" in said and "kerdeq-single-five-classes" not in said, "its sentence has the word known"
    assert "No experiment has nonsense and words in" in kerneq("experiments", "nonsense", "words")[1]


def test_what_cannot_be_allocated_is_said_with_its_size(kerneq):
    code, said = kerneq("train", "geq-tiny-digits", "model.width=1000000", "model.features=[1000000,8]")
    assert code == 1 and "no memory for a single tensor of 36,000.0 GB: lower the sizes" in " ".join(said.split())
