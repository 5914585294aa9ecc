"""Every example runs as people run it, says what it should, stays short and leaves nothing behind."""

import importlib
import re
import runpy
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch
from PIL import Image

import kerneq

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """What an example prints, run in an empty folder where every warning is an error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)  # as `python examples/…` has it

    def go(name: str, *arguments: str, leaves: Sequence[str] | None = None) -> str:
        """Run one, which leaves its picture."""
        path = str(EXAMPLES / f"{name}.py")
        monkeypatch.setattr(sys, "argv", [path, *arguments])
        runpy.run_path(path, run_name="__main__")
        assert [path.name for path in tmp_path.iterdir()] == ([f"{name}.png"] if leaves is None else list(leaves))
        return capsys.readouterr().out

    yield go
    plt.close("all")
    torch.set_default_dtype(torch.float32)  # some examples compute in float64


def test_examples_are_short_and_there_is_a_test_for_each():
    names = {path.stem for path in EXAMPLES.glob("*.py")} - {"beside_torchdeq"}  # which compares the showcases
    here = Path(__file__).read_text()
    for name in names:
        assert f'run("{name}"' in here or name in SHOWCASES, name
        lines = (EXAMPLES / f"{name}.py").read_text().splitlines()
        assert len([line for line in lines if line.strip()]) <= 60, name


def test_a_layer_learns_inside_a_network_of_ones_own(run):
    printed = run("layer_in_your_network", "--epochs", "3")
    accuracies = [float(number) for number in re.findall(r"test accuracy ([\d.]+)%", printed)]
    assert len(accuracies) == 3 and accuracies[-1] > 90
    assert printed.count("297 of 297 samples reached") == 3


@pytest.mark.filterwarnings("default")  # Lightning warns about the machine, and imports what warns about itself
def test_a_model_learns_inside_a_lightning_module(run):
    pytest.importorskip("lightning")
    printed = run("lightning_module", "--epochs", "1")
    (accuracy,) = re.findall(r"validation accuracy ([\d.]+)%", printed)
    assert float(accuracy) > 30  # guessing gives 10


def test_an_equilibrium_is_drawn_that_proximal_finds_and_plain_iteration_does_not(run, tmp_path):
    output = tmp_path / "pictures"
    printed = run("see_an_equilibrium", "--steps", "5", "--output", str(output), leaves=["pictures"])
    assert "plain iteration: E rose at some step" in printed and "Proximal: E fell at every step" in printed
    plain, proximal = (float(number) for number in re.findall(r"residual (\S+)", printed))
    assert plain > 0.3 and proximal < 2e-2
    with Image.open(output / "equilibrium.gif") as moving, Image.open(output / "equilibrium.png") as still:
        assert moving.n_frames == 5 and still.width > moving.width


def test_pictures_of_ones_own_are_learnt_and_new_ones_get_the_names_of_the_folders(run):
    printed = run("own_pictures", "--count", "20", "--epochs", "1")
    assert re.search(r"test accuracy [\d.]+%", printed)
    assert re.findall(r"new-(\w+).png: (?:disc|ring|stripes) \(\d+%\)", printed) == ["disc", "ring", "stripes"]


def test_a_kernel_and_a_prox_of_ones_own_solve_and_differentiate(run):
    printed = run("own_kernel")
    assert "4 of 4 samples reached tol=1e-10" in printed
    assert "agrees with finite differences: True" in printed
    (zeros,) = re.findall(r"(\d+)% of the state", printed)
    assert 20 < int(zeros) < 90


@pytest.mark.parametrize("form", [(), ("--rate", "0.6")], ids=["equation", "function"])
def test_the_gradients_are_as_far_from_the_truth_as_their_table_says(run, form):
    printed = run("choose_a_gradient", *form)
    errors = {row.split("  ")[0]: float(row[24:].split()[0]) for row in printed.splitlines()[1:]}
    assert len(errors) == (13 if form else 10)
    assert errors["Implicit(1e-06)"] < 1e-5 and errors["Implicit(1e-06)"] < errors["Implicit(0.001)"] < 1e-2
    assert errors["Phantom(20, 0.8)"] < errors["Phantom(5, 0.8)"] < errors["Phantom(1, 1)"]
    assert errors["Neumann(0)"] == errors["Phantom(1, 1)"] and errors["Unrolled(20)"] < errors["Unrolled(5)"]
    if form:
        assert (
            errors["Neumann(20)"] < errors["Neumann(5)"]
            and errors["Reversible(20, 0.8)"] < 0.02 < errors["Reversible(5, 0.8)"]
        )


def test_counts_are_fitted_at_scale_with_their_exposure(run):
    printed = run("counts_per_exposure", "--samples", "3000", "--centres", "60")
    (error,) = re.findall(r"error of the rate: ([\d.]+)%", printed)
    assert float(error) < 15
    (missed, most) = re.findall(r"miss: (\S+); .* at most (\S+) in f", printed)[0]
    assert float(missed) < 0.1 and float(most) < 5
    assert "numbers the same function: True" in printed


def test_attacks_within_the_certified_radius_fail_and_wider_ones_succeed(run):
    printed = run("certify_prediction", "--epochs", "1")
    assert float(re.findall(r"test accuracy ([\d.]+)%", printed)[0]) > 70
    rows = re.findall(r"^ +(\d)  +([\d.]+)  \[(\d), \d, (\d)\]$", printed, re.MULTILINE)
    assert len(rows) == 4 and all(float(radius) > 0 and digit == near for digit, radius, near, _ in rows)
    assert sum(digit != far for digit, _, _, far in rows) >= 3


def test_unknown_digits_get_lower_probabilities_than_known_ones(run):
    printed = run("find_unknown_classes", "--epochs", "3")
    (known, unknown, share) = (float(number) for number in re.findall(r"largest probability +(.*)", printed)[0].split())
    assert known > unknown and share > 0.8
    assert "−E(z*)" in printed and "mean weight of the patches" in printed


def test_kernel_logistic_regression_and_its_equilibrium_give_the_same_probabilities(run):
    printed = run("kernel_logistic", "--samples", "60")
    assert float(re.findall(r"([\d.]+)% of 1000 new points right", printed)[0]) > 85
    assert float(re.findall(r"largest difference .*: (\S+)", printed)[0]) < 1e-8


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_two_processes_have_the_gradients_of_one(run):
    printed = run("two_processes", "--steps", "3")
    rows = re.findall(r"^ +\d+ +(\S+) +(\S+) +(\S+)$", printed, re.MULTILINE)
    assert len(rows) == 3 and all(alone == together and float(error) < 1e-9 for alone, together, error in rows)


def test_a_certified_denoiser_has_a_bound_on_what_a_solve_is_off(run):
    printed = run("certified_deblurring", "--steps", "6")
    assert "2 of 2 samples reached tol=1e-05" in printed
    assert 0 < float(re.findall(r"not further than (\S+),", printed)[0]) < 1e-2


@pytest.mark.filterwarnings("default")  # PyTorch's exporter and its compiler warn of themselves
def test_an_exported_model_is_right_with_enough_steps_by_onnxruntime_and_aotinductor(run):
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    arguments = ["--aot"] if shutil.which("g++") else []
    printed = run("export_model", "--steps", "1", "2", *arguments)
    errors = [float(error) for error in re.findall(r"off by (\S+) at most", printed)]
    assert errors[0] > 2 * errors[1] and len(errors) == 2 + len(arguments)
    assert errors[2:] == pytest.approx(errors[1:2] * len(arguments), rel=0.1)  # the same steps


# Showcases: small here. Each trains with both libraries.

SHOWCASES = {
    "text_transformer": (["--length", "12", "--steps", "3"], (12, 3)),
    "graph_chains": (["--length", "4", "--steps", "10"], (4, 10)),
    "implicit_picture": (["--size", "8", "--steps", "4"], (8, 4, {})),
    "flow_two_states": (["--side", "12", "--steps", "2"], (12, 2, {})),
    "restore_pictures": (["--holes", "--steps", "1"], (True, 1, {})),
}


@pytest.fixture
def in_short(monkeypatch):
    """The table of a showcase without a search for torchdeq's tolerance, with one timing, without a profile."""
    pytest.importorskip("torchdeq")
    monkeypatch.syspath_prepend(EXAMPLES)
    shared = importlib.import_module("beside_torchdeq")
    for name, value in (("LOOSER", (1.0,)), ("TIMES", 1), ("peak", lambda call: 0.0)):
        monkeypatch.setattr(shared, name, value)


@pytest.mark.parametrize("batched", [True, False])
def test_the_layer_by_torchdeq_has_the_value_and_the_gradients_of_ours(batched, in_short):
    """Else the comparison is not fair: normalised weights, too, must be learnt there."""
    shared = importlib.import_module("beside_torchdeq")
    torch.manual_seed(0)
    linear = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(4, 4)).eval()
    block = torch.nn.ModuleList([linear])
    block.forward = lambda z, x: torch.tanh(0.7 * linear(z) + x)
    rule = kerneq.gradients.Implicit(tol=1e-6)
    ours = kerneq.Equilibrium(block, batched=batched, tol=1e-6, gradient=rule)
    x, found = torch.randn(5, 4), []
    for layer in (ours, *(shared.like(ours, method, 1.0) for method in shared.SOLVERS)):
        value = layer(x).value
        found.append([value, *torch.autograd.grad(value.square().sum(), list(block.parameters()))])
        assert all(g.abs().max() > 0 for g in found[-1])
    for theirs in found[1:]:
        torch.testing.assert_close(theirs, found[0], rtol=1e-3, atol=1e-4)


def read_table(printed: str) -> dict[str, float]:
    """Return the worst residual of every library and solver of a table."""
    rows = [line for line in printed.splitlines() if line.startswith(("kerneq, ", "torchdeq, "))]
    assert len(rows) == 4
    return {row[:28].strip(): float(row.split()[-2]) for row in rows}


@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.weight_norm.*", "ignore:.*os.fork.*")
@pytest.mark.parametrize("name", SHOWCASES)
def test_a_showcase_trains_and_stands_beside_torchdeq(name, run, in_short, capsys):
    arguments, settings = SHOWCASES[name]
    assert "samples reached tol=" in run(name, *arguments)
    train = importlib.import_module(name).train
    importlib.import_module("beside_torchdeq").compare(partial(train, *settings), "how good")
    residuals = read_table(capsys.readouterr().out)
    assert list(residuals.values())[0] <= 1e-3


def test_long_strings_get_more_steps_than_short_ones_and_come_out_right(run):
    printed = run("prefix_sums", "--length", "5", "--steps", "120")
    few, full = (int(share) for share in re.findall(r"^(?:.*batch: )?(\d+)% (?:right )?with", printed, re.MULTILINE))
    assert few < 60 and full > few + 20


def test_starts_that_are_kept_save_steps(run):
    printed = run("reuse_starts", "--epochs", "3")
    (zero, _), (kept, right) = re.findall(r"([\d.]+) at the end; ([\d.]+)% right", printed)
    assert float(kept) < float(zero) - 1 and float(right) > 80
